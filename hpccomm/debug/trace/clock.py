"""Clocks: the difference between a rank's and that of the group's first rank, by messages back and forth."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..records import EPOCH, Record

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

ROUNDS = 12  # of which the quickest counts


def now() -> float:
    """Return the time since the epoch, by a clock that never goes back."""
    return EPOCH + time.perf_counter()


def offset(comm: Any, now: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds to add to this rank's `now()` to get that of rank 0, and the largest error of that.

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


@dataclass
class Clocks:
    """The difference between this process's clock and that of the first rank of a group, measured once or more."""

    key: str = ""  # of the group; "" where nothing has been measured
    size: int = 0  # of the group
    error: float | None = None  # seconds by which `corrected` may be wrong; None where nothing has been measured
    points: list[tuple[float, float]] = field(default_factory=list)  # readings of this clock, and the seconds to add

    def measure(self, group: ProcessGroup) -> None:
        """Measure, maybe again, because clocks drift; every rank of the group calls this."""
        if group.comm is not None:
            ahead, error = offset(group.comm, now)
            self.points.append((now(), ahead))
            self.error = max(self.error or 0.0, error)

    def corrected(self, record: Record) -> Record:
        """Return a record with the times of the first rank's clock."""
        end = self._corrected(record.end) if record.end else 0.0
        return replace(record, begin=self._corrected(record.begin), end=end)

    def _corrected(self, reading: float) -> float:
        """Take the drift between the first measurement and the last to be even."""
        if not self.points:
            return reading
        (first, ahead), (last, later) = self.points[0], self.points[-1]
        share = min(1.0, max(0.0, (reading - first) / (last - first))) if last > first else 0.0
        return reading + ahead + share * (later - ahead)
