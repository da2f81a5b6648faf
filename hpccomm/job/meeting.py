"""The meeting of all ranks at the end of a group, separate from the program's barriers."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .tags import MEETING


class Meeting:
    """A dissemination barrier (Hensgen, Finkel and Manber 1988) by messages with their own tag.

    In each round a rank sends one message; the distance to its receiver doubles from round to round. After
    ceil(log2(size)) rounds a rank knows that all have come, and whether all will free their shared resources. No two
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
        """The rank before this one if it has not come; None after the first round."""
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
