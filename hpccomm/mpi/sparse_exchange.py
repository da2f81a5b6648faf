"""A sparse exchange: messages between ranks of which the receivers know nothing before they come.

Nobody is told how many messages to expect: that takes a collective of all ranks. Instead every rank takes what comes,
until all ranks know that what they have sent has been taken (non-blocking consensus: T. Hoefler et al., Scalable
communication protocols for dynamic sparse data exchange, PPoPP 2010)::

    begin    a synchronous send to each receiver: what the arrays are, and small ones themselves; then larger arrays
    then     take what comes; when all synchronous sends are done, enter a barrier that does not block
    end      when the barrier is done: nothing more can come

A rank may be exchanges ahead of another that has not seen the end of its barrier yet, and several may be in flight: so
each has tags of its own, looks after those before it, and enters its barrier after them.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.work import Work
from .datatypes import as_bytes, message
from .layout import send_buffer
from .works import MPIWork

SMALL = 16 << 10  # bytes of all arrays for one rank: up to there they travel with what they are
TURNS = 1 << 13  # after which tags are used again; every MPI has four times as many


class SparseExchange(Work):
    """One exchange on a communicator of its own.

    `arrays` has for each receiver a tuple of arrays, or a list of one. `received` is filled likewise, a list of one
    with the array itself; its keys are the senders' `names`.
    """

    translate_error = MPIWork.translate_error

    def __init__(
        self,
        comm: MPI.Intracomm,
        turn: int,
        unfinished: deque[SparseExchange],
        arrays: Mapping[int, Sequence[Any]],
        received: dict[int, Any],
        names: Sequence[int],
    ) -> None:
        super().__init__()
        self._comm = comm
        self._head, self._data = 2 * (turn % TURNS), 2 * (turn % TURNS) + 1  # tags
        self._unfinished = unfinished
        unfinished.append(self)
        self._is_done = False
        self._came: dict[int, Any] = {}
        self._received = received
        self._names = names
        self._barrier: MPI.Request | None = None
        self._requests: list[MPI.Request] = []
        self.alive: list[Any] = []
        self._heads: list[MPI.Request] = []
        for rank, each in arrays.items():
            sent = list(map(send_buffer, each))
            kinds = [(array.shape, array.dtype) for array in sent]
            is_small = sum(array.nbytes for array in sent) <= SMALL
            small = b"".join(as_bytes(array).tobytes() for array in sent) if is_small else None
            head = pickle.dumps((kinds, small, type(each) is list), pickle.HIGHEST_PROTOCOL)
            self.alive.append((sent, head))
            self._heads.append(comm.Issend([head, MPI.BYTE], rank, self._head))
            if not is_small:
                self._requests += [comm.Isend(message(array), rank, self._data) for array in sent if array.nbytes]

    def poll(self) -> bool:
        """Take what has come, also of the exchanges before this one; return whether all ranks have done so."""
        for each in list(self._unfinished):
            if each is self:
                break
            each.advance()
        return self.advance()

    def advance(self) -> bool:
        """Take what has come of this one; return whether it is done."""
        if self._is_done:
            return True
        status = MPI.Status()
        while (head := self._comm.Improbe(MPI.ANY_SOURCE, self._head, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            head.Recv([data, MPI.BYTE])
            self._take(status.Get_source(), *pickle.loads(data))
        if self._barrier is None:
            if not MPI.Request.Testall(self._heads) or self._is_behind():
                return False
            self._barrier = self._comm.Ibarrier()
        if not (self._barrier == MPI.REQUEST_NULL or self._barrier.Test()) or not MPI.Request.Testall(self._requests):
            return False
        self._received.update((self._names[source], self._came[source]) for source in sorted(self._came))
        self._is_done = True
        self._unfinished.remove(self)
        return True

    def _is_behind(self) -> bool:
        """Return whether an exchange before this one has not entered its barrier."""
        return any(each._barrier is None for each in takewhile(lambda each: each is not self, self._unfinished))

    def _take(self, source: int, kinds: list[tuple[Any, Any]], small: bytes | None, is_single: bool) -> None:
        """Make the arrays of a message, and receive those that have not come with it."""
        arrays, at = [np.empty(shape, dtype) for shape, dtype in kinds], 0
        for array in arrays:
            if small is not None:
                as_bytes(array)[:] = np.frombuffer(small, np.uint8, array.nbytes, at)
                at += array.nbytes
            elif array.nbytes:
                self._requests.append(self._comm.Irecv(message(array), source, self._data))
        self._came[source] = arrays[0] if is_single else tuple(arrays)

    def block(self) -> None:
        """Take what comes until all ranks have done so."""
        from ..core.timeouts import pause, pauses

        looks = pauses()
        while not self.poll():
            pause(next(looks))
