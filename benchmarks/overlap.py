"""Overlap: the share of an asynchronous operation that is hidden by compute of the same duration.

Three calls are timed, interleaved: the operation started and waited for at once (t), compute of the same duration (c),
and compute between the start and the wait (b). The possible saving is the smaller of t and c; the saving is t + c - b.
A fourth call polls the operation between pieces of the compute, because many MPI libraries move data only inside their
calls. The last call sleeps instead of computing, like a program that waits for a GPU. On a machine without spare cores,
that leaves a core to the progress thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import hpccomm as hc
from hpccomm.bench.contenders import Call, Contender
from hpccomm.bench.measure import Plan, measure, timed
from hpccomm.bench.registry import Benchmark, Case, load
from hpccomm.bench.report import aligned, heads, microseconds
from hpccomm.bench.session import Session

from . import study

OPERATIONS = ("all_reduce", "all_gather_single", "all_to_all_single")
KERNEL_ELEMENTS = 512  # float64: they stay in the L1 cache, and take no memory bandwidth from communication
TIMED = ("communication", "compute", "both", "polled", "idle", "both idle")
COLUMNS = [("size", "bytes", 11), ("contender", "", 10), ("alone", "us", 10), ("compute", "us", 10)]
COLUMNS += [column for what in ("both", "polled", "idle") for column in ((what, "us", 10), ("hidden", "", 8))]
SHARES = ("hidden", "hidden_polled", "hidden_idle")
PIECES = 16  # of the compute, with a poll after each


@dataclass(frozen=True)
class Overlap:
    """The overlap of one contender for one operation and size; times in us."""

    operation: str
    contender: str
    size_bytes: int
    communication_us: float
    compute_us: float
    both_us: float
    polled_us: float
    idle_us: float
    both_idle_us: float

    @property
    def hidden(self) -> float:
        """The share (0 to 1) hidden by compute without polls."""
        return _share(self.communication_us, self.compute_us, self.both_us)

    @property
    def hidden_polled(self) -> float:
        """The share hidden by compute with polls."""
        return _share(self.communication_us, self.compute_us, self.polled_us)

    @property
    def hidden_idle(self) -> float:
        """The share hidden by sleep."""
        return _share(self.communication_us, self.idle_us, self.both_idle_us)


def _share(communication: float, compute: float, both: float) -> float:
    return min(1.0, max(0.0, (communication + compute - both) / min(communication, compute)))


def steps(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> Iterator[Overlap]:
    """Yield the overlap of each contender for each operation and size, on every rank."""
    with Session(world, ["mpi4py"], plan) as session:
        for operation in OPERATIONS:
            yield from overlaps(session, operation, sizes)


def overlaps(session: Session, operation: str, sizes: Sequence[int]) -> Iterator[Overlap]:
    """Yield the overlap of each contender for each size."""
    benchmark = load()[operation]
    for case in session.cases(benchmark, sizes):
        calls: dict[str, Call] = {}
        for contender in session.contenders.values():
            calls |= _calls(session, contender, benchmark, case)
        timings = measure(calls, session.comm, session.plan)
        for contender in session.contenders.values():
            contender.release()
        for name in session.contenders:
            if f"{name} communication" in timings:
                times = (timings[f"{name} {what}"].median * 1e6 for what in TIMED)
                yield Overlap(operation, name, case.nbytes, *times)


def _calls(session: Session, contender: Contender, benchmark: Benchmark, case: Case) -> dict[str, Call]:
    """Return the calls of one contender by the names in TIMED; none if it lacks the operation."""
    try:
        arrays = contender.arrays(benchmark, case)
        start = contender.start(benchmark, case, arrays)
        contender.wait(start())
    except contender.refusals:  # on all ranks, before anything is sent
        return {}
    wait, poll = contender.wait, contender.poll

    def beside(work: Call) -> Call:
        def call() -> None:
            handle = start()
            work()
            wait(handle)

        return call

    def communicate() -> None:
        wait(start())

    seconds = measure({"": communicate}, session.comm, replace(session.plan, iterations=20))[""].median
    times = session.comm.bcast(repetitions(seconds))
    compute, piece = partial(_compute, times), partial(_compute, max(1, times // PIECES))
    idle = partial(time.sleep, session.comm.bcast(seconds))

    def polled() -> None:
        handle = start()
        for _ in range(PIECES):
            piece()
            poll(handle)
        wait(handle)

    calls: tuple[Call, ...] = (communicate, compute, beside(compute), polled, idle, beside(idle))
    return {f"{contender.name} {what}": call for what, call in zip(TIMED, calls, strict=True)}


_kernel_array = np.ones(KERNEL_ELEMENTS)


def _compute(times: int) -> None:
    array, multiply = _kernel_array, np.multiply
    for _ in range(times):
        multiply(array, 1.0, out=array)


def repetitions(seconds: float) -> int:
    """Return the number of kernel runs in `seconds`."""
    trial = 2000
    best = min(timed(partial(_compute, trial), 1) for _ in range(5))
    return max(1, round(seconds / (best / trial)))


def text(found: Sequence[Overlap]) -> str:
    """Return a table for each operation."""
    lines = []
    for operation in dict.fromkeys(each.operation for each in found):
        lines += [
            f"overlap of {operation}: the share that hides behind equal compute; polled: asking {PIECES} times if it "
            "is done; idle: sleeping instead",
            heads(COLUMNS),
            *(line(each) for each in found if each.operation == operation),
            "",
        ]
    return "\n".join(lines[:-1])


def line(found: Overlap) -> str:
    """Return one line of the table."""
    cells = [str(found.size_bytes), found.contender]
    cells += [microseconds(found.communication_us), microseconds(found.compute_us)]
    for us, share in zip((found.both_us, found.polled_us, found.both_idle_us), SHARES, strict=True):
        cells += [microseconds(us), f"{getattr(found, share):.0%}"]
    return aligned(COLUMNS, cells)


if __name__ == "__main__":
    study.main(__doc__, steps, text)
