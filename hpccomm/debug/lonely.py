"""Find waits in a job of one rank that can never end, because only the rank itself could end them."""

from __future__ import annotations

from typing import Any

from ..process.stderr import tell
from . import stacks
from .groups_seen import works_in_flight
from .watchdog import in_flight
from .words import duration

LONELY = 3.0  # seconds until a wait is reported


class Lonely:
    """The waits of a one-rank job: messages to itself that it does not receive, or the reverse."""

    def __init__(self) -> None:
        self._first: dict[Any, float] = {}
        self._reported: set[Any] = set()

    def look(self, now: float) -> None:
        """Report each message that has waited for some seconds, once."""
        waits = in_flight()
        if any(call.record.name == "destroy" for call in waits):  # it waits for all operations in flight
            waits += [stacks.polled_call(work, stacks.line_in_program()) for work in works_in_flight()]
        calls = {call.key: call for call in waits if call.record.is_a_message}
        self._first = {key: self._first.get(key, now) for key in calls}
        self._reported &= calls.keys()
        for key, call in calls.items():
            if now - self._first[key] >= LONELY and key not in self._reported:
                self._reported.add(key)
                from ..process.alone import start_more

                tell(
                    f"hpccomm: {call.record} at {call.record.where} has waited for {duration(now - self._first[key])}, "
                    f"and nobody else can send or receive here{start_more() or '; this job has one rank'}"
                )
