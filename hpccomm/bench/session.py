"""Run the benchmarks of one command: for each size make the arrays and calls, check results, and time them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import gpu
from .contenders import Call, Contender, Unsupported, contender_class
from .measure import Plan, measure
from .registry import Arrays, Benchmark, Case
from .report import Row, row

if TYPE_CHECKING:
    from .. import ProcessGroup


class Session:
    """The contenders on one group; a context manager that closes them. Every rank makes the same calls.

    If ``device="cuda"``, the arrays are on each rank's current GPU.
    """

    def __init__(
        self, group: ProcessGroup, against: Sequence[str] = ("mpi4py",), plan: Plan | None = None, device: str = "cpu"
    ) -> None:
        if group.comm is None:
            raise ValueError(f"{group!r} has no MPI communicator to measure with")
        self.group = group
        self.comm = group.comm.Dup()
        self.plan = plan or Plan()
        self.finish: Callable[[], None] | None = gpu.finish if device == "cuda" else None
        self._allocate: Callable[..., Any] = gpu.empty if device == "cuda" else np.empty
        self.contenders: dict[str, Contender] = {}  # the contenders that run here, hpccomm first
        self.missing: dict[str, str] = {}  # for each contender that does not run here: the reason
        for name in dict.fromkeys(["hpccomm", *against]):
            chosen = contender_class(name, device)
            why = self._first(chosen.missing())  # one rank without it (perhaps on another node) is enough
            if why is None:
                try:
                    self.contenders[name] = chosen(group, self.comm)
                except Unsupported as error:
                    why = str(error)
                why = self._first(why)
            if why is not None:
                self.missing[name] = why
                self.contenders.pop(name, None)

    def _first(self, reason: str | None) -> str | None:
        """Return the reason of the first rank that has one."""
        return next(filter(None, self.comm.allgather(reason)), None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for contender in self.contenders.values():
                contender.close()
            self.comm.Free()

    def run(
        self,
        benchmark: Benchmark,
        sizes: Sequence[int],
        dtype: Any = np.float32,
        op: str = "sum",
        *,
        check: bool = False,
        async_op: bool = False,
    ) -> Iterator[list[Row]]:
        """Yield the rows of each size: one row for each contender."""
        for case in self.cases(benchmark, sizes, dtype, op):
            yield self.measure(benchmark, case, check, async_op)

    def cases(self, benchmark: Benchmark, sizes: Sequence[int], dtype: Any = np.float32, op: str = "sum") -> list[Case]:
        """Return the cases of a benchmark, one for each size."""
        template = Case(self.group.rank, self.group.size, 0, np.dtype(dtype), op, allocate=self._allocate)
        return benchmark.cases(template, sizes if benchmark.sized else [0])

    def measure(self, benchmark: Benchmark, case: Case, check: bool = False, async_op: bool = False) -> list[Row]:
        """Return the rows of one case, on every rank."""
        shared = benchmark.arrays(case)
        calls, arrays, notes = self.calls(benchmark, case, shared, async_op)
        wrong = {name: self.count_wrong(arrays[name], call) for name, call in calls.items()} if check else {}
        for each in arrays.values():
            each.clear()
        transfers = benchmark.transfers(case)
        timings = measure(calls, self.comm, self.plan, self.finish)
        timings = {name: each.scaled(transfers) for name, each in timings.items()}
        for contender in self.contenders.values():
            contender.release()
        names = [*self.contenders, *self.missing]
        reference = timings.get(names[0])
        return [
            row(benchmark, case, name, timings.get(name), reference, wrong.get(name), notes.get(name, ""))
            for name in names
        ]

    def calls(
        self, benchmark: Benchmark, case: Case, shared: Arrays, async_op: bool = False
    ) -> tuple[dict[str, Call], dict[str, Arrays], dict[str, str]]:
        """Return the contenders' calls, each tried once; their arrays; and the reasons of contenders without a call."""
        calls: dict[str, Call] = {}
        used: dict[str, Arrays] = {}
        notes = dict(self.missing)
        for name, contender in self.contenders.items():
            refusal = None
            try:
                arrays = contender.arrays(benchmark, case) if contender.own_arrays else shared
                call = contender.call(benchmark, case, arrays, async_op)
                call()
                self._wait()
            except contender.refusals as error:
                refusal = str(error) or type(error).__name__
            refusal = self._first(refusal)
            if refusal is None:
                calls[name], used[name] = call, arrays
            else:
                notes[name] = refusal.strip().split("\n")[0]
        return calls, used, notes

    def count_wrong(self, arrays: Arrays, call: Call) -> int:
        """Return the number of elements on all ranks that differ from NumPy's."""
        arrays.fill()
        self.comm.Barrier()  # no rank may receive while it still fills its arrays
        call()
        self._wait()
        total: int = self.comm.allreduce(arrays.wrong())
        return total

    def _wait(self) -> None:
        if self.finish is not None:
            self.finish()
