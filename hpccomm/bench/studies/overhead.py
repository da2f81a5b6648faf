"""The time that hpccomm adds to a call: hpccomm's call minus the same work written with mpi4py, in ns.

On one rank there is no communication, so only the layers take time. The result is the smallest of many repetitions, as
timeit recommends, because disturbances only make repetitions longer. Two ranks exchange messages, whose time depends on
the other rank's arrival, so the result is the median of the slower rank's times. hpccomm is measured on its compiled
path and its Python path if this process has both, and again with its recorder. The last rows are mpi4py's own calls
under ``hpccomm run``.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import hpccomm as hc

from ...debug.report import Reporter
from ...debug.start import LONGEST_PERIOD
from ...debug.trace.recorder import record
from ...debug.watchdog import Watchdog
from ...run.communicators import watched
from ..contenders import Call, Contender
from ..contenders.hpccomm_calls import HPCComm
from ..contenders.hpccomm_calls import batch as batched
from ..measure import Plan, measure
from ..registry import Arrays, Benchmark, Case, load
from ..session import Session

BYTES = 8  # of each array
AWAITS = 20  # in one run of the event loop, because starting the loop takes longer than an await
DERIVED = ("added_ns", "ratio", "recorder_ns", "python_added_ns")  # properties of an Overhead
PLANS = {1: Plan(iterations=50, batch_seconds=2e-3), 2: Plan(iterations=400, batch_seconds=5e-4)}  # by number of ranks


@dataclass(frozen=True)
class Comparison:
    """The same work on the same arrays in mpi4py, in hpccomm, and on hpccomm's Python path if that differs."""

    operation: str
    arrays: Arrays
    mpi4py: Call
    hpccomm: Call
    python: Call | None = None  # None: the same as hpccomm
    times: int = 1  # repetitions of the work in one call

    @property
    def calls(self) -> dict[str, Call]:
        """The calls by contender."""
        both = {"mpi4py": self.mpi4py, "hpccomm": self.hpccomm}
        return both if self.python is None else both | {"python": self.python}


@dataclass(frozen=True)
class Overhead:
    """The times of a comparison, in ns."""

    operation: str
    mpi4py_ns: float
    hpccomm_ns: float
    recorded_ns: float  # hpccomm's time with the recorder on
    python_ns: float | None = None  # the time of hpccomm's Python path, if the compiled path exists too

    @property
    def added_ns(self) -> float:
        """The time that hpccomm adds to mpi4py's call; negative if hpccomm is faster."""
        return self.hpccomm_ns - self.mpi4py_ns

    @property
    def python_added_ns(self) -> float | None:
        """The time that the Python path adds to mpi4py's call."""
        return None if self.python_ns is None else self.python_ns - self.mpi4py_ns

    @property
    def recorder_ns(self) -> float:
        """The time that the recorder adds to hpccomm's call."""
        return self.recorded_ns - self.hpccomm_ns

    @property
    def ratio(self) -> float:
        """The time of hpccomm divided by the time of mpi4py."""
        return self.hpccomm_ns / self.mpi4py_ns


def overheads(group: hc.ProcessGroup, plan: Plan | None = None) -> list[Overhead]:
    """Return the measurements of calls on one rank, or of messages on two; the contenders take turns."""
    if group.size not in PLANS:
        raise ValueError(f"overheads are measured on 1 or 2 ranks; this group has {group.size}")
    found = []
    with Session(group, ["mpi4py", "python"]) as session:
        for each in on_one_rank(session) if group.size == 1 else on_two_ranks(session):
            ns = _ns(each, each.calls, session, plan)
            with record():
                (recorded,) = _ns(each, {"hpccomm": each.hpccomm}, session, plan).values()
            found.append(Overhead(each.operation, ns["mpi4py"], ns["hpccomm"], recorded, ns.get("python")))
    return found


def _ns(of: Comparison, calls: Mapping[str, Call], session: Session, plan: Plan | None) -> dict[str, float]:
    size = session.group.size
    gc.disable()  # as timeit does
    try:
        timings = measure(calls, session.comm, plan or PLANS[size])
    finally:
        gc.enable()
    seconds = {name: each.minimum if size == 1 else each.median for name, each in timings.items()}
    return {name: 1e9 / of.times * each for name, each in seconds.items()}


def on_one_rank(session: Session) -> Iterator[Comparison]:
    """Yield the comparisons for one rank; on more ranks, messages go to the right neighbour."""
    yield _benchmark(session, "all_reduce")
    yield _benchmark(session, "all_reduce", "all_reduce, AVG", op="avg")
    yield _converted(
        session, "all_reduce, strided", np.float32, lambda shape, dtype: np.empty((*shape, 2), dtype)[..., 0]
    )
    yield _converted(session, "all_reduce, float16", np.float16)
    yield _coalesced(session, "all_reduce_coalesced, 3 arrays", 3)
    for name in ("broadcast", "reduce", "all_gather_single"):
        yield _benchmark(session, name)
    yield _benchmark(session, "all_gather", "all_gather, list of arrays")
    for name in ("reduce_scatter_single", "all_to_all_single", "sendrecv", "barrier"):
        yield _benchmark(session, name)
    for name in ("all_reduce", "broadcast", "barrier"):
        yield _benchmark(session, name, f"{name}, async + wait", async_op=True)
    # A blocking send to the same rank would wait forever, so these messages are asynchronous.
    yield _exchange(session, "isend + irecv + wait_all", [1])
    yield _exchange(session, "batch of isend + irecv + wait_all", [1], batch=True)
    yield from _watched(session)


def on_two_ranks(session: Session) -> Iterator[Comparison]:
    """Yield the comparisons for two ranks; each rank is both neighbours of the other."""
    yield _benchmark(session, "ping_pong", "ping-pong: send + recv")
    yield _benchmark(session, "sendrecv")
    yield _exchange(session, "isend + irecv + wait_all", [1])
    yield _exchange(session, "halo: 2 irecv + 2 isend + wait_all", [1, -1])
    yield _exchange(session, "halo: batch_isend_irecv + wait_all", [1, -1], batch=True)
    yield _future(session, "all_reduce, get_future().wait()")
    yield _awaited(session, "all_reduce, await")
    yield _block(session, "coalescing(), 3 all_reduce")
    yield from _without_arrays(session)


# -- the comparisons -----------------------------------------------------------------------------------------


def _case(session: Session, name: str, dtype: Any = np.float64, op: str = "sum") -> tuple[Benchmark, Case]:
    benchmark = load()[name]
    (case,) = session.cases(benchmark, [BYTES], dtype, op)
    return benchmark, case


def _by_path(session: Session, call: Callable[[HPCComm], Call]) -> dict[str, Any]:
    """Return the result of `call` for each of hpccomm's paths, by contender."""
    return {each.name: call(each) for each in session.contenders.values() if isinstance(each, HPCComm)}


def _benchmark(
    session: Session,
    name: str,
    title: str = "",
    op: str = "sum",
    async_op: bool = False,
    contenders: Mapping[str, Contender] | None = None,
) -> Comparison:
    """Return the comparison of an operation, as in ``hpccomm bench``; default: all contenders of the session."""
    benchmark, case = _case(session, name, op=op)
    arrays = benchmark.arrays(case)
    both: dict[str, Any] = {
        contender: each.call(benchmark, case, arrays, async_op)
        for contender, each in (contenders or session.contenders).items()
    }
    return Comparison(title or name, arrays, **both)


def _converted(session: Session, title: str, dtype: Any, allocate: Any = np.empty) -> Comparison:
    """Compare all_reduce of arrays that MPI can't take with a sum of contiguous float32 copies."""
    benchmark, case = _case(session, "all_reduce", dtype)
    arrays = benchmark.arrays(replace(case, allocate=allocate))
    array, all_reduce = arrays.receive, session.comm.Allreduce

    def by_hand() -> None:
        copy = array.astype(np.float32)
        all_reduce(MPI.IN_PLACE, [copy, MPI.FLOAT], MPI.SUM)
        array[...] = copy

    return Comparison(
        title, arrays, by_hand, **_by_path(session, lambda each: each.call(benchmark, case, arrays, False))
    )


def _coalesced(session: Session, title: str, pieces: int) -> Comparison:
    """Compare sums of several arrays in one call."""
    _, case = _case(session, "all_reduce")
    whole = replace(case, count=pieces * case.count)
    arrays = replace(load()["all_reduce"].arrays(whole), receive=[case.array(case.count) for _ in range(pieces)])
    benchmark = load()["all_reduce_coalesced"]
    both: dict[str, Any] = {
        each.name: each.call(benchmark, whole, arrays, False) for each in session.contenders.values()
    }
    return Comparison(title, arrays, **both)


def _block(session: Session, title: str) -> Comparison:
    """Compare a coalescing block with one sum of a packed array."""
    comparison = _coalesced(session, title, 3)
    arrays = comparison.arrays.receive

    def block(group: hc.ProcessGroup) -> None:
        with hc.coalescing(group):
            for array in arrays:
                hc.all_reduce(array, group=group)

    return replace(comparison, **_by_path(session, lambda each: partial(block, each.group)))


def _future(session: Session, title: str) -> Comparison:
    """Compare a wait for a Future with MPI_Wait."""
    comparison = _benchmark(session, "all_reduce", title, async_op=True)
    array = comparison.arrays.receive

    def future(group: hc.ProcessGroup) -> None:
        hc.all_reduce(array, group=group, async_op=True).get_future().wait()

    return replace(comparison, **_by_path(session, lambda each: partial(future, each.group)))


def _awaited(session: Session, title: str) -> Comparison:
    """Compare `await` in an event loop with MPI_Wait, `AWAITS` times in each call."""
    comparison = _benchmark(session, "all_reduce", title, "max", async_op=True)
    array, loop = comparison.arrays.receive, asyncio.new_event_loop()

    async def program(group: hc.ProcessGroup) -> None:
        for _ in range(AWAITS):
            await hc.all_reduce(array, "max", group, async_op=True)

    def by_hand() -> None:
        for _ in range(AWAITS):
            comparison.mpi4py()

    def awaits(group: hc.ProcessGroup) -> None:
        loop.run_until_complete(program(group))

    weakref.finalize(awaits, loop.close)
    return replace(
        comparison, mpi4py=by_hand, times=AWAITS, **_by_path(session, lambda each: partial(awaits, each.group))
    )


def _without_arrays(session: Session) -> Iterator[Comparison]:
    """Yield the comparisons of barriers, objects (a dict of two entries) and groups; both sides are mostly Python."""
    comm, group, value = session.comm, session.group, {"step": 3, "name": "x"}
    slots = [None] * group.size
    calls: dict[str, tuple[Call, Call]] = {
        "monitored_barrier": (comm.Barrier, lambda: hc.monitored_barrier(group)),
        "all_gather_object": (lambda: comm.allgather(value), lambda: hc.all_gather_object(slots, value, group)),
        "broadcast_object_list": (
            lambda: comm.bcast(value),
            lambda: hc.broadcast_object_list([value], group=group, group_src=0),
        ),
        "new_group + destroy": (
            lambda: comm.Dup().Free(),
            lambda: hc.destroy_process_group(hc.new_group(group.ranks, use_local_synchronization=True)),
        ),
    }
    yield _benchmark(session, "barrier")
    for operation, (by_hand, ours) in calls.items():
        yield Comparison(operation, Arrays(receive=None), by_hand, ours)


def _watched(session: Session) -> Iterator[Comparison]:
    """Yield the comparisons of mpi4py's own calls with the same calls under ``hpccomm run``."""
    own = session.contenders["mpi4py"]
    both = {"mpi4py": own, "hpccomm": type(own)(session.group, watched(session.comm, "watched"))}
    yield _benchmark(session, "all_reduce", "hpccomm run: Allreduce", contenders=both)
    yield _exchange(session, "hpccomm run: Isend + Irecv + Waitall", [1], contenders=both)


def _exchange(
    session: Session,
    title: str,
    directions: Sequence[int],
    batch: bool = False,
    contenders: Mapping[str, Contender] | None = None,
) -> Comparison:
    """Compare messages of one element, one in each direction (1: to the right)."""
    rank, ranks, count = session.group.rank, session.group.size, len(directions)
    arrays = Arrays(
        send=np.zeros((count, 1)),
        receive=np.zeros((count, 1)),
        given=lambda: _numbers(rank, count),
        expected=lambda: [_numbers((rank - step) % ranks, count)[i] for i, step in enumerate(directions)],
    )
    both: dict[str, Any] = {}
    for contender, each in (contenders or session.contenders).items():
        starts = [each.receiver(arrays.receive[i], (rank - to) % ranks, True) for i, to in enumerate(directions)]
        starts += [each.sender(arrays.send[i], (rank + to) % ranks, True) for i, to in enumerate(directions)]
        both[contender] = batched(starts) if batch and isinstance(each, HPCComm) else each.together(starts)
    return Comparison(title, arrays, **both)


def _numbers(rank: int, count: int) -> Any:
    return 1.0 + rank * count + np.arange(count)


def watchdog_look(looks: int = 200) -> float:
    """Return the median time of one look of the watchdog, in seconds."""
    watchdog, seconds = Watchdog(Reporter(0, 1, ".")), []
    for _ in range(looks):
        began = time.perf_counter()
        watchdog.look(time.monotonic())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def table(found: Sequence[Overhead], ranks: int, look: float) -> str:
    """Return the table of the results; `look` is the time of one look of the watchdog in seconds."""
    how = "1 rank, 8 bytes, minimum" if ranks == 1 else f"{ranks} ranks, 8 bytes, median"
    has_both = any(each.python_ns is not None for each in found)
    columns = ["mpi4py", "compiled" if has_both else "hpccomm", "added", "ratio", *["python", "added"] * has_both]
    lines = [
        f"what hpccomm adds to mpi4py's own call (below 0: faster than mpi4py): {how} of the repetitions",
        _line("operation", [*columns, "recorder adds"]),
        _line("", ["" if column == "ratio" else "(ns)" for column in [*columns, "recorder"]]),
    ]
    for each in found:
        python = ["-" if ns is None else f"{ns:.0f}" for ns in (each.python_ns, each.python_added_ns)] * has_both
        compiled = [f"{each.hpccomm_ns:.0f}", f"{each.added_ns:.0f}", f"{each.ratio:.2f}"]
        row = [f"{each.mpi4py_ns:.0f}", *compiled, *python, f"{each.recorder_ns:.0f}"]
        lines.append(_line(each.operation, row))
    share = look / LONGEST_PERIOD
    first = found[0]
    lines.append(
        f"the watchdog looks once in {LONGEST_PERIOD:g} s, for {1e6 * look:.0f} us: {100 * share:.4f} % of the time, "
        f"{share * first.hpccomm_ns:.3f} ns of each {first.operation}"
    )
    return "\n".join(lines)


def _line(operation: str, columns: Sequence[str]) -> str:
    *most, last = (f"{column:>{6 if i == 3 else 9}}" for i, column in enumerate(columns))
    return f"{operation:<34} {' '.join(most)} {last:>14}"
