"""What the Python layers add to a call: hpccomm's call minus mpi4py's own, in ns, on one rank.

With one rank MPI has next to nothing to do, so what is left is the way there. The smallest of many repetitions is
taken, as timeit advises: everything that disturbs a repetition makes it longer.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import hpccomm as hc

from ..contenders import Contender
from ..registry import Arrays, Case, load
from ..session import Session

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "sendrecv",
    "barrier",
)
ASYNCHRONOUS = ("all_reduce", "broadcast", "barrier")
BYTES = 8


@dataclass(frozen=True)
class Overhead:
    """One operation's times, in ns."""

    operation: str
    mpi4py_ns: float
    hpccomm_ns: float

    @property
    def added_ns(self) -> float:
        """What hpccomm adds to mpi4py's call."""
        return self.hpccomm_ns - self.mpi4py_ns


def overheads(group: hc.ProcessGroup, repetitions: int = 50, batch_seconds: float = 2e-3) -> list[Overhead]:
    """Measure every operation; `group` has one rank. The two take turns, so that both see the same machine."""
    if group.size != 1:
        raise ValueError(f"overheads are measured on one rank; this group has {group.size}")
    found = []
    with Session(group, ["mpi4py"]) as session:
        for name, pair in _pairs(session).items():
            best = _best(pair, repetitions, batch_seconds)
            found.append(Overhead(name, best["mpi4py"], best["hpccomm"]))
    return found


def _pairs(session: Session) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls of both, by operation."""
    benchmarks = load()
    pairs: dict[str, dict[str, Callable[[], Any]]] = {}
    for async_op, names in ((False, OPERATIONS), (True, ASYNCHRONOUS)):
        for name in names:
            benchmark = benchmarks[name]
            case = benchmark.case(0, 1, BYTES, np.dtype(np.float64))
            arrays = benchmark.arrays(case)
            pairs[f"{name}, async + wait" if async_op else name] = {
                contender.name: contender.call(benchmark, case, arrays, async_op)
                for contender in session.contenders.values()
            }
        if not async_op:
            # A blocking send to oneself waits for ever, so the pair of messages is the asynchronous one.
            pairs["isend + irecv + 2 waits"] = {
                contender.name: _message_to_itself(contender) for contender in session.contenders.values()
            }
    return pairs


def _message_to_itself(contender: Contender) -> Callable[[], Any]:
    case = Case(0, 1, 1, np.dtype(np.float64))
    arrays = Arrays(send=case.array(1), receive=case.array(1))
    receive, send = contender.receiver(arrays.receive, 0, True), contender.sender(arrays.send, 0, True)
    return partial(_exchange, contender.wait_all, receive, send)


def _exchange(wait_all: Callable[[Any], None], receive: Callable[[], Any], send: Callable[[], Any]) -> None:
    wait_all([receive(), send()])


def _best(calls: dict[str, Callable[[], Any]], repetitions: int, batch_seconds: float) -> dict[str, float]:
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    batches = {}
    for name, timer in timers.items():
        batch = 100
        while (seconds := timer.timeit(batch)) < batch_seconds / 4:
            batch *= 2
        batches[name] = max(1, int(batch * batch_seconds / seconds))
    best = dict.fromkeys(timers, float("inf"))
    for _ in range(repetitions):
        for name, timer in timers.items():
            best[name] = min(best[name], timer.timeit(batches[name]) / batches[name] * 1e9)
    return best


def table(found: list[Overhead]) -> str:
    """Return the results as text."""
    lines = [
        "what hpccomm adds to mpi4py's own call: 1 rank, 8 bytes, minimum of the repetitions",
        f"{'operation':<28} {'mpi4py':>9} {'hpccomm':>9} {'added':>9}",
        f"{'':<28} {'(ns)':>9} {'(ns)':>9} {'(ns)':>9}",
    ]
    lines += [f"{x.operation:<28} {x.mpi4py_ns:>9.0f} {x.hpccomm_ns:>9.0f} {x.added_ns:>9.0f}" for x in found]
    return "\n".join(lines)
