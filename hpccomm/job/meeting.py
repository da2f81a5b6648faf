"""The meeting of all ranks at the end of a group, which can't be mistaken for a barrier of the program."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .tags import MEETING


class Meeting:
    """A dissemination barrier (Hensgen, Finkel and Manber 1988), of messages with a tag of their own.

    In each round a rank tells another that it has come, twice as far away as in the round before: so every rank has
    heard of all others after ceil(log2(size)) rounds, and whether all of them will free what they have together. No two
    rounds have the same source, so one tag is enough.
    """

    def __init__(self, comm: Any, frees: bool) -> None:
        self._comm = comm
        self.all_free = frees
        self._sent, self._came = b"", bytearray([True])
        self._distance = 0  # of this round
        self._pending: list[Any] = []

    @property
    def absent(self) -> int | None:
        """The rank that has not come, if this one knows: in the first round, the one before it."""
        return (self._comm.Get_rank() - 1) % self._comm.Get_size() if self._distance == 1 else None

    def is_over(self) -> bool:
        """Return whether all have come; the meeting makes progress only in this call."""
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        while MPI.Request.Testall(self._pending):
            self._distance = 2 * self._distance or 1
            self.all_free = self.all_free and bool(self._came[0])
            if self._distance >= size:
                return True
            before, after = (rank - self._distance) % size, (rank + self._distance) % size
            self._sent = bytes([self.all_free])
            self._pending = [
                self._comm.Irecv([self._came, MPI.BYTE], before, MEETING),
                self._comm.Isend([self._sent, MPI.BYTE], after, MEETING),
            ]
        return False
