"""Clocks: how far a rank's is from that of the group's first rank, by messages back and forth."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..groups_seen import key_of
from ..records import Record

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

ROUNDS = 12  # of which the quickest counts
# What makes a reading of the clock seconds since the epoch; the process may be held up between the two looks.
EPOCH = max(time.time() - time.perf_counter() for _ in range(5))


def now() -> float:
    """Return the time since the epoch, by a clock that never goes back."""
    return EPOCH + time.perf_counter()


def offset(comm: Any, now: Callable[[], float]) -> tuple[float, float]:
    """Return what to add to this rank's `now()` to get that of rank 0, and how wrong it may be, both in seconds.

    Every rank of `comm` calls it; rank 0 answers one rank after the other. The reading of rank 0 is taken to be made in
    the middle of the round, so the error is at most half of what the quickest round took.
    """
    from ...job.tags import PAIRWISE as TAG  # at the end there may be messages of the program's that nobody took

    reading = bytearray(8)
    if comm.Get_rank() == 0:
        for rank in range(1, comm.Get_size()):
            for _ in range(ROUNDS):
                comm.Recv(bytearray(8), rank, TAG)
                comm.Send(struct.pack("d", now()), rank, TAG)
        return 0.0, 0.0
    found = []
    for _ in range(ROUNDS):
        began = now()
        comm.Send(reading, 0, TAG)
        comm.Recv(reading, 0, TAG)
        ended = now()
        found.append(((ended - began) / 2, struct.unpack("d", reading)[0] - (began + ended) / 2))
    error, ahead = min(found)
    return ahead, error


class Clocks:
    """How far this process's clock is from that of the first rank of a group, as found at one time or more.

    Attributes
    ----------
    key : str
        Of the group; "" where it has not been measured.
    size : int
        Of the group.
    ahead : float or None
        What was added at first to this clock's readings, in seconds.
    error : float or None
        How wrong that may be.
    """

    def __init__(self) -> None:
        self.key = ""
        self.size = 0
        self.ahead: float | None = None
        self.error: float | None = None
        self._points: list[tuple[float, float]] = []  # (a reading, what to add to it)

    def begin(self, group: ProcessGroup) -> None:
        """Measure against the first rank of this group from now on; every rank of it calls this."""
        self.__init__()  # type: ignore[misc]
        self.key, self.size = key_of(group), group.size
        self.measure(group)
        self.ahead = self._points[0][1]

    def measure(self, group: ProcessGroup) -> None:
        """Measure again, because clocks drift; every rank calls this."""
        if group.comm is not None:
            ahead, error = offset(group.comm, now)
            self._points.append((now(), ahead))
            self.error = max(self.error or 0.0, error)

    def corrected(self, record: Record) -> Record:
        """Return a record with the times of that clock."""
        end = self._corrected(record.end) if record.end else 0.0
        return replace(record, begin=self._corrected(record.begin), end=end)

    def _corrected(self, reading: float) -> float:
        """Between the first time it was measured and the last, clocks drift evenly."""
        if not self._points:
            return reading
        (first, ahead), (last, later) = self._points[0], self._points[-1]
        share = min(1.0, max(0.0, (reading - first) / (last - first))) if last > first else 0.0
        return reading + ahead + share * (later - ahead)
