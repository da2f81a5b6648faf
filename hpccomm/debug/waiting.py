"""The wait for a verdict that another rank makes: when to look into the folder, and when to give that rank up.

A state machine: it gets the time and what is in the folder, and does nothing itself. Of the ranks of a node the first
looks often, the second half as often, the third a third as often: together hardly more than one, however many they are,
and no rank that is stuck keeps the others from looking. Whoever finds something wakes the others of its node.
"""

from __future__ import annotations

PERIOD = 0.25  # seconds between two looks of the first rank of a node
LOST = 60.0  # seconds without a sign of life after which the rank that makes the verdict is given up


class Wait:
    """The wait of one rank; `place` is its place among the ranks of its node, from 0."""

    def __init__(self, place: int, now: float) -> None:
        self._period = PERIOD * (place + 1)
        self._due = self._looked_at = self._seen_at = now
        self._sign = ""
        self._ends_at: float | None = None

    def is_due(self, now: float, is_woken: bool) -> bool:
        """Whether to look into the folder now."""
        if now < self._due and not is_woken:
            return False
        self._due, self._looked_at = now + self._period, now
        return True

    def saw(self, now: float, sign: str, has_concluded: bool, more: float = 0.0) -> bool:
        """Take what is in the folder; return whether the verdict is new. The wait ends `more` seconds after it."""
        if sign != self._sign:
            self._sign, self._seen_at = sign, now
        is_new = has_concluded and self._ends_at is None
        if is_new:
            self._ends_at = now + more
        return is_new

    def outcome(self, now: float) -> str:
        """Return "waits"; "given" where there is a verdict; "lost" where the rank that was to make it is gone."""
        if self._ends_at is not None:
            return "given" if now >= self._ends_at else "waits"
        return "lost" if self._looked_at - self._seen_at > LOST else "waits"
