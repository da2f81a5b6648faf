"""Overlap: the share of an asynchronous operation that hides behind equal compute.

Three things are timed, interleaved: the operation started and waited for at once (t), computing that takes as long (c),
and the computing between the start and the wait (b). What could be saved is the smaller of t and c; what is saved is
t + c - b. A fourth one asks the library now and then, between pieces of the computing, whether the operation is done:
many MPI libraries move data only while the program is inside a call of theirs. The last sleeps instead of computing, as
a program does while a GPU computes: that leaves the core to whatever makes the operation progress, which on a machine
without spare cores nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..contenders import Call, Contender
from ..measure import measure, timed
from ..registry import Benchmark, Case, load
from ..report import aligned, heads, microseconds
from ..session import Session

OPERATIONS = ("all_reduce", "all_gather_single", "all_to_all_single")
KERNEL_ELEMENTS = 512  # float64: stays in the first cache, so that computing and communicating do not share memory
TIMED = ("communication", "compute", "both", "polled", "idle", "both idle")
COLUMNS = [("size", "bytes", 11), ("contender", "", 10), ("alone", "us", 10), ("compute", "us", 10)]
COLUMNS += [column for what in ("both", "polled", "idle") for column in ((what, "us", 10), ("hidden", "", 8))]
SHARES = ("hidden", "hidden_polled", "hidden_idle")
PIECES = 16  # of the computing, when the library is asked in between


@dataclass(frozen=True)
class Overlap:
    """What one contender hides of one operation, for one size; times in us."""

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
        """The share (0 to 1) that hides behind computing without calls."""
        return _share(self.communication_us, self.compute_us, self.both_us)

    @property
    def hidden_polled(self) -> float:
        """The share that hides behind computing with calls in between."""
        return _share(self.communication_us, self.compute_us, self.polled_us)

    @property
    def hidden_idle(self) -> float:
        """The share that hides behind sleeping."""
        return _share(self.communication_us, self.idle_us, self.both_idle_us)


def _share(communication: float, compute: float, both: float) -> float:
    return min(1.0, max(0.0, (communication + compute - both) / min(communication, compute)))


def overlaps(session: Session, operation: str, sizes: Sequence[int], dtype: Any) -> Iterator[list[Overlap]]:
    """Measure `operation` with every contender, and yield the results of one size after the other."""
    benchmark = load()[operation]
    for case in session.cases(benchmark, sizes, dtype):
        calls: dict[str, Call] = {}
        for contender in session.contenders.values():
            calls |= _calls(session, contender, benchmark, case)
        timings = measure(calls, session.comm, session.plan)
        for contender in session.contenders.values():
            contender.release()
        yield [
            Overlap(operation, name, case.nbytes, *(timings[f"{name} {what}"].median * 1e6 for what in TIMED))
            for name in session.contenders
            if f"{name} communication" in timings
        ]


def _calls(session: Session, contender: Contender, benchmark: Benchmark, case: Case) -> dict[str, Call]:
    """Return the calls of one contender, as TIMED names them; none, if it has not this operation."""
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
    """Return the number of runs of the kernel that take `seconds`."""
    trial = 2000
    best = min(timed(partial(_compute, trial), 1) for _ in range(5))
    return max(1, round(seconds / (best / trial)))


def head(operation: str) -> str:
    """Return the head of the table."""
    title = (
        f"overlap of {operation}: the share that hides behind equal compute; polled: asking {PIECES} times if it is "
        "done; idle: sleeping instead"
    )
    return f"{title}\n{heads(COLUMNS)}"


def line(found: Overlap) -> str:
    """Return one line of the table."""
    cells = [str(found.size_bytes), found.contender]
    cells += [microseconds(found.communication_us), microseconds(found.compute_us)]
    for us, share in zip((found.both_us, found.polled_us, found.both_idle_us), SHARES, strict=True):
        cells += [microseconds(us), f"{getattr(found, share):.0%}"]
    return aligned(COLUMNS, cells)
