"""The meeting of all ranks at the end of a group, which no barrier of the program is taken for."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .tags import MEETING


class Meeting:
    """A barrier of messages with a tag of their own: in each round a rank tells one further on that it has come.

    Dissemination (Hensgen, Finkel and Manber 1988): after ceil(log2(size)) rounds, each over twice the distance, every
    rank has heard of every other. No two rounds have the same source, so one tag is enough.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._distance = 0  # of this round
        self._pending: list[Any] = []

    @property
    def absent(self) -> int | None:
        """The rank that has not come, if this one knows: in the first round it waits for the rank before it."""
        return (self._comm.Get_rank() - 1) % self._comm.Get_size() if self._distance == 1 else None

    def is_over(self) -> bool:
        """Return whether all have come; this is also what lets the meeting go on."""
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        while MPI.Request.Testall(self._pending):
            self._distance = 2 * self._distance or 1
            if self._distance >= size:
                return True
            before, after = (rank - self._distance) % size, (rank + self._distance) % size
            self._pending = [
                self._comm.Irecv([None, 0, MPI.BYTE], before, MEETING),
                self._comm.Isend([None, 0, MPI.BYTE], after, MEETING),
            ]
        return False
