"""The host time that hpccomm's layers add to CuPy's own calls of NCCL on GPU arrays.

The host only starts GPU operations, so this time limits programs with many small operations. CuPy's and hpccomm's calls
take turns, and their medians are compared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import hpccomm as hc

from ..contenders import Call
from ..contenders.hpccomm_calls import batch
from ..measure import Plan, measure
from ..registry import load
from ..session import Session

BYTES = 8  # of each array
PIECES = 10  # arrays in a coalesced call
PLAN = Plan(iterations=1000, batch=10)  # short batches: other processes interrupt few of them, and no queue gets full


@dataclass(frozen=True)
class GPUOverhead:
    """The host times of one operation, in ns."""

    operation: str
    cupy_ns: float
    hpccomm_ns: float

    @property
    def added_ns(self) -> float:
        """The time that hpccomm adds to CuPy's call."""
        return self.hpccomm_ns - self.cupy_ns


def overheads(group: hc.ProcessGroup, plan: Plan = PLAN) -> list[GPUOverhead]:
    """Return the measurements on the current GPU; raise DistBackendError without NCCL."""
    found = _measured(group, plan, comparisons)
    impatient: Any = hc.new_group(group.ranks, on_timeout="raise", use_local_synchronization=True)
    found += _measured(
        impatient, plan, lambda session: [_pair(session, "all_reduce", "all_reduce, on_timeout='raise'")]
    )
    impatient.destroy()
    return found


def _measured(
    group: hc.ProcessGroup, plan: Plan, compared: Callable[[Session], Iterable[tuple[str, Call, Call]]]
) -> list[GPUOverhead]:
    found = []
    with Session(group, ["nccl"], plan, "cuda") as session:
        if session.missing:
            raise hc.DistBackendError("; ".join(f"{name}: {why}" for name, why in session.missing.items()))
        for title, ours, raw in compared(session):
            gc.disable()  # as timeit does
            try:
                timings = measure({"cupy": raw, "hpccomm": ours}, session.comm, plan, session.finish)
            finally:
                gc.enable()
            found.append(GPUOverhead(title, *(1e9 * (each.host_median or 0) for each in timings.values())))
    return found


def comparisons(session: Session) -> Iterator[tuple[str, Call, Call]]:
    """Yield a title, hpccomm's call, and CuPy's call for the same work, for each row."""
    yield _pair(session, "all_reduce")
    yield _pair(session, "all_reduce", "all_reduce, async + wait", async_op=True)
    for name in (
        "broadcast", "reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "sendrecv"
    ):  # fmt: skip
        yield _pair(session, name)
    yield _batch(session)
    yield _pair(session, "all_reduce_coalesced", f"all_reduce_coalesced, {PIECES} arrays")
    _, _, raw = _pair(session, "all_reduce")
    (case,) = session.cases(load()["all_reduce"], [BYTES], np.float32)
    strided = case.array(2 * case.count)[::2]
    yield "all_reduce, strided", lambda: session.group.all_reduce(strided), raw
    with session.group.all_reduce_init(case.array(case.count)) as work:

        def once_more() -> None:
            work.start()
            work.wait()

        yield "all_reduce_init, start + wait", once_more, raw
        yield "all_reduce_init, run", work.run, raw


def _batch(session: Session) -> tuple[str, Call, Call]:
    """Return the row of a message in each direction; CuPy's calls are those of sendrecv."""
    (case,) = session.cases(load()["sendrecv"], [BYTES], np.float32)
    ours, (_, _, raw) = session.contenders["hpccomm"], _pair(session, "sendrecv")
    receive = ours.receiver(case.array(case.count), case.left, True)
    send = ours.sender(case.array(case.count), case.right, True)
    return "batch of isend + irecv + wait_all", batch([receive, send]), raw


def _pair(session: Session, name: str, title: str = "", async_op: bool = False) -> tuple[str, Call, Call]:
    benchmark = load()[name]
    (case,) = session.cases(benchmark, [BYTES], np.float32)
    arrays = benchmark.arrays(case)
    if benchmark.kind == "coalesced":
        arrays = replace(arrays, receive=[case.array(case.count) for _ in range(PIECES)])
    ours, raw = (session.contenders[each].call(benchmark, case, arrays, async_op) for each in ("hpccomm", "nccl"))
    return title or name, ours, raw


def table(found: Sequence[GPUOverhead], ranks: int) -> str:
    """Return the table of the results."""
    lines = [
        f"host time that hpccomm adds to CuPy's own call of NCCL: {ranks} rank{'s' * (ranks > 1)}, {BYTES} bytes, "
        "median of the repetitions",
        f"{'operation':<34} {'cupy':>9} {'hpccomm':>9} {'added':>9}",
        f"{'':<34} {'(ns)':>9} {'(ns)':>9} {'(ns)':>9}",
    ]
    lines += [
        f"{each.operation:<34} {each.cupy_ns:>9.0f} {each.hpccomm_ns:>9.0f} {each.added_ns:>9.0f}" for each in found
    ]
    return "\n".join(lines)
