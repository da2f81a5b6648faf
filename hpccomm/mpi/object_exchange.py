"""Non-blocking collectives of objects: each pickle is one message to its receiver.

First each rank sends every rank the length of its pickle for it. All sends begin at once, from copies, so an exchange
ends on a rank as soon as its own pickles have arrived. The other ranks may meanwhile wait for exchanges in another
order, or be in an operation for which this rank is late. MPI's own collectives can't be used: they need two steps, and
MPI would match the second step with another operation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.work import Work
from .datatypes import message
from .sparse_exchange import tags_of
from .works import MPIWork, wait_for_all


class ObjectExchange(Work):
    """One exchange, which takes a `turn` among the sparse exchanges.

    `finish` is called with the received pickles by sender, in the order of the ranks.
    """

    translate_error = MPIWork.translate_error

    def __init__(
        self,
        comm: MPI.Intracomm,
        turn: int,
        pickles: Mapping[int, bytes],
        finish: Callable[[dict[int, bytearray]], None],
    ) -> None:
        super().__init__(lambda: finish(self._came))
        self._comm = comm
        lengths, self._tag, _ = tags_of(turn)
        ranks = range(comm.size)
        sent = np.array([len(pickles.get(rank, b"")) for rank in ranks], np.int64)
        self._lengths = np.empty_like(sent)
        self._requests = [comm.Irecv(self._lengths[rank : rank + 1], rank, lengths) for rank in ranks]
        self.sends = [comm.Isend(sent[rank : rank + 1], rank, lengths) for rank in ranks]
        buffers = {id(each): np.frombuffer(each, np.uint8) for each in pickles.values()}
        self.sends += [comm.Isend(message(buffers[id(each)]), rank, self._tag) for rank, each in pickles.items()]
        self._knows_lengths = False
        self._came: dict[int, Any] = {}

    def _expect(self) -> None:
        """Begin to receive the pickles, whose lengths are known now."""
        came = {rank: np.empty(length, np.uint8) for rank, length in enumerate(self._lengths.tolist()) if length}
        self._requests = [self._comm.Irecv(message(each), rank, self._tag) for rank, each in came.items()]
        self._came, self._knows_lengths = came, True

    def poll(self) -> bool:
        """Advance the receives; return whether all pickles have come."""
        if not self._knows_lengths:
            if not MPI.Request.Testall(self._requests):
                return False
            self._expect()
        return MPI.Request.Testall(self._requests)

    def block(self) -> None:
        """Wait for all pickles."""
        if not self._knows_lengths:
            wait_for_all(self._requests)
            self._expect()
        wait_for_all(self._requests)
