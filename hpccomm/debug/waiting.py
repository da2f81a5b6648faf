"""The wait for another rank's verdict: when to look into the folder, and when to give that rank up.

A state machine without I/O: it gets the time and the folder's state. On each node the first rank looks often, the
second half as often, the third a third as often. Together they look little more often than one rank, and a stuck rank
does not keep the others from looking. A rank that finds a verdict wakes the others of its node.
"""

from __future__ import annotations

PERIOD = 0.25  # seconds between two looks of a node's first rank
LOST = 60.0  # seconds without a sign of life after which the rank that makes the verdict is given up


class Wait:
    """The wait of one rank; `place` is its index among the ranks of its node, from 0."""

    def __init__(self, place: int, now: float) -> None:
        self._period = PERIOD * (place + 1)
        self._due = self._looked_at = self._seen_at = now
        self._sign = ""
        self._ends_at: float | None = None

    def is_due(self, now: float, is_woken: bool) -> bool:
        """Return whether to look into the folder now."""
        if now < self._due and not is_woken:
            return False
        self._due, self._looked_at = now + self._period, now
        return True

    def saw(self, now: float, sign: str, has_concluded: bool, more: float = 0.0) -> bool:
        """Take the folder's state; return whether the verdict is new. The wait ends `more` seconds after it."""
        if sign != self._sign:
            self._sign, self._seen_at = sign, now
        is_new = has_concluded and self._ends_at is None
        if is_new:
            self._ends_at = now + more
        return is_new

    def outcome(self, now: float) -> str:
        """Return "waits"; "given" once there is a verdict; "lost" if the rank that makes it shows no sign of life."""
        if self._ends_at is not None:
            return "given" if now >= self._ends_at else "waits"
        return "lost" if self._looked_at - self._seen_at > LOST else "waits"
