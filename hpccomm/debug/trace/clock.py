"""Clocks: measure the difference between a rank's clock and that of the group's first rank, with round trips."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..records import EPOCH, Record

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

ROUNDS = 12  # the fastest one counts


def now() -> float:
    """Return the time since the epoch, from a monotonic clock."""
    return EPOCH + time.perf_counter()


def offset(comm: Any, now: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds to add to this rank's `now()` to get rank 0's, and the largest error of this sum.

    Collective; rank 0 answers the ranks in turn. Rank 0's reading is assumed to be from the middle of a round, so the
    error is at most half the time of the fastest round.
    """
    from ...job.tags import PAIRWISE as TAG  # the program may leave messages that it never receives

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
    """The difference between this process's clock and that of a group's first rank, from one or more measurements."""

    key: str = ""  # of the group; "" before a measurement
    size: int = 0  # of the group
    error: float | None = None  # seconds by which `corrected` may be wrong; None before a measurement
    points: list[tuple[float, float]] = field(default_factory=list)  # readings of this clock, and the seconds to add

    def measure(self, group: ProcessGroup) -> None:
        """Measure, perhaps again, because clocks drift; collective."""
        if group.comm is not None:
            ahead, error = offset(group.comm, now)
            self.points.append((now(), ahead))
            self.error = max(self.error or 0.0, error)

    def corrected(self, record: Record) -> Record:
        """Return a record with its times on the first rank's clock."""
        end = self._corrected(record.end) if record.end else 0.0
        return replace(record, begin=self._corrected(record.begin), end=end)

    def _corrected(self, reading: float) -> float:
        """Interpolate the drift between the first and the last measurement."""
        if not self.points:
            return reading
        (first, ahead), (last, later) = self.points[0], self.points[-1]
        share = min(1.0, max(0.0, (reading - first) / (last - first))) if last > first else 0.0
        return reading + ahead + share * (later - ahead)
