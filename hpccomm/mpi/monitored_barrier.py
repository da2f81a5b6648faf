"""A barrier that names the missing ranks: an exchange without contents."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from ..core.exchange import TIMED_OUT, Exchange
from ..errors import DistTimeoutError, on_rank


class MonitoredBarrier:
    """The monitored barriers of one group; `ranks` are the global ranks of its ranks."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self._exchange = Exchange(comm)
        self._ranks = ranks

    def __call__(self, timeout: float, wait_all_ranks: bool) -> None:
        """Return when all ranks have called it; raise DistTimeoutError on each caller if a rank does not in time."""

        def late(_: object, missing: list[int]) -> str:
            named = missing if wait_all_ranks else missing[:1]
            ranks = [str(self._ranks[rank]) for rank in named or [0]]  # none: rank 0 came after others had left
            have = "have" if len(ranks) > 1 else "has"
            return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {have} not arrived after {timeout:g} s"

        outcome, text = self._exchange({}, timeout, lambda _: "", late)
        if outcome == TIMED_OUT:
            raise DistTimeoutError(f"monitored_barrier: {text}{on_rank()}")
