"""A barrier that names the missing ranks: an exchange without contents."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.exchange import TIMED_OUT, Exchange
from ..errors import DistTimeoutError, on_rank


def monitored_barrier(exchange: Exchange, ranks: Sequence[int], timeout: float, wait_all_ranks: bool) -> None:
    """Return when all ranks have called it; raise DistTimeoutError on each caller if a rank does not in time.

    `ranks` are the global ranks of the group's ranks.
    """

    def late(_: object, missing: list[int]) -> str:
        named = missing if wait_all_ranks else missing[:1]
        names = [str(ranks[rank]) for rank in named or [0]]  # none: rank 0 came after others had left
        have = "have" if len(names) > 1 else "has"
        return f"rank{'s' * (len(names) > 1)} {', '.join(names)} {have} not arrived after {timeout:g} s"

    outcome, text = exchange({}, timeout, lambda _: "", late)
    if outcome == TIMED_OUT:
        raise DistTimeoutError(f"monitored_barrier: {text}{on_rank()}")
