"""A sparse exchange: messages between ranks of which the receivers know nothing before they come.

To each receiver goes one message that says what the arrays are, with small ones themselves, and one for each larger
array. How a rank knows which messages to expect depends on the number of ranks:

* few: each tells each other how long its message is, which takes the longer the more there are (`CountedExchange`);
* many: nobody is told. Every rank takes what comes, until all ranks know that what they have sent has been taken
  (`ConsensusExchange`).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.work import Work
from .datatypes import as_bytes, message
from .layout import send_buffer
from .works import MPIWork

SMALL = 4 << 10  # bytes of all arrays for one rank: up to there they travel with what they are
TURNS = 1 << 13  # after which tags are used again; every MPI has four times as many
FEW = 64  # ranks


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
        arrays: Mapping[int, Sequence[Any]],
        received: dict[int, Any],
        names: Sequence[int],
    ) -> None:
        super().__init__()
        self._comm = comm
        self._head, self._data = 2 * (turn % TURNS), 2 * (turn % TURNS) + 1  # tags
        self._came: dict[int, Any] = {}
        self._received, self._names = received, names
        self._requests: list[MPI.Request] = []
        self._heads: dict[int, bytes] = {}
        self._sent: list[Any] = []  # alive until it has gone
        for rank, each in arrays.items():
            sent = list(map(send_buffer, each))
            self._heads[rank], is_whole = _head_of(sent, type(each) is list)
            self._sent += sent
            if not is_whole:
                self._requests += [comm.Isend(message(array), rank, self._data) for array in sent if array.nbytes]

    def _take(self, source: int, head: bytearray) -> None:
        """Make the arrays of a message, and receive those that have not come with it."""
        kinds, is_whole, is_single = pickle.loads(head)
        arrays = [np.empty(shape, _dtype_of(dtype)) for shape, dtype in kinds]
        at = len(head) - sum(array.nbytes for array in arrays)
        for array in arrays:
            if is_whole:
                as_bytes(array)[:] = np.frombuffer(head, np.uint8, array.nbytes, at)
                at += array.nbytes
            elif array.nbytes:
                self._requests.append(self._comm.Irecv(message(array), source, self._data))
        self._came[source] = arrays[0] if is_single else tuple(arrays)

    def _end(self) -> None:
        self._received.update((self._names[source], self._came[source]) for source in sorted(self._came))


class CountedExchange(SparseExchange):
    """The lengths of the messages first, then these.

    That of one exchange needs nothing of another but progress, which MPI makes in any call: so ranks may wait for
    several in different orders.
    """

    def __init__(self, comm: MPI.Intracomm, async_op: bool, *arguments: Any) -> None:
        super().__init__(comm, *arguments)
        sent = np.array([len(self._heads.get(rank, b"")) for rank in range(comm.size)], np.int64)
        self._lengths = np.empty_like(sent)
        self._counting: list[MPI.Request] = []
        self._coming: list[tuple[int, MPI.Request, bytearray]] = []
        if async_op:  # by messages, for MPI_Ialltoall of MPICH 5.0.2 has been seen not to end, on one rank
            self._sent.append(sent)
            ranks = range(comm.size)
            self._counting = [comm.Irecv(self._lengths[rank : rank + 1], rank, self._head) for rank in ranks]
            self._requests += [comm.Isend(sent[rank : rank + 1], rank, self._head) for rank in ranks]
        else:
            comm.Alltoall(sent, self._lengths)
            self._expect()
        self._requests += [comm.Isend([head, MPI.BYTE], rank, self._head) for rank, head in self._heads.items()]

    def _expect(self) -> None:
        """Receive the messages whose lengths are known now."""
        self._counting = []
        for source, length in enumerate(self._lengths.tolist()):
            if length:
                head = bytearray(length)
                self._coming.append((source, self._comm.Irecv([head, MPI.BYTE], source, self._head), head))

    def poll(self) -> bool:
        """Take what has come; return whether all that is sent and received is done."""
        if self._counting:
            if not MPI.Request.Testall(self._counting):
                return False
            self._expect()
        waiting = []
        for each in self._coming:
            if each[1].Test():
                self._take(each[0], each[2])
            else:
                waiting.append(each)
        self._coming = waiting
        if waiting or not MPI.Request.Testall(self._requests):
            return False
        self._end()
        return True

    def block(self) -> None:
        """Wait for what comes, and until what is sent has gone."""
        if self._counting:
            MPI.Request.Waitall(self._counting)
            self._expect()
        for source, request, head in self._coming:
            request.Wait()
            self._take(source, head)
        self._coming = []
        MPI.Request.Waitall(self._requests)
        self._end()


class ConsensusExchange(SparseExchange):
    """Non-blocking consensus (T. Hoefler et al., Scalable communication protocols for dynamic sparse data exchange).

    ::

        begin    a synchronous send to each receiver; then larger arrays
        then     take what comes; when all synchronous sends are done, enter a barrier that does not block
        end      when the barrier is done: nothing more can come

    A rank may be exchanges ahead of another that has not seen the end of its barrier yet, and several may be in flight:
    so each has tags of its own, looks after those before it, and enters its barrier after them.
    """

    def __init__(self, comm: MPI.Intracomm, unfinished: deque[ConsensusExchange], *arguments: Any) -> None:
        super().__init__(comm, *arguments)
        self._unfinished = unfinished
        unfinished.append(self)
        self._is_done = False
        self._barrier: MPI.Request | None = None
        self._taken = [comm.Issend([head, MPI.BYTE], rank, self._head) for rank, head in self._heads.items()]

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
        while (coming := self._comm.Improbe(MPI.ANY_SOURCE, self._head, status)) is not None:
            head = bytearray(status.Get_count(MPI.BYTE))
            coming.Recv([head, MPI.BYTE])
            self._take(status.Get_source(), head)
        if self._barrier is None:
            if not MPI.Request.Testall(self._taken) or self._is_behind():
                return False
            self._barrier = self._comm.Ibarrier()
        if not (self._barrier == MPI.REQUEST_NULL or self._barrier.Test()) or not MPI.Request.Testall(self._requests):
            return False
        self._end()
        self._is_done = True
        self._unfinished.remove(self)
        return True

    def _is_behind(self) -> bool:
        """Return whether an exchange before this one has not entered its barrier."""
        return any(each._barrier is None for each in takewhile(lambda each: each is not self, self._unfinished))

    def block(self) -> None:
        """Take what comes until all ranks have done so."""
        from ..core.timeouts import pause, pauses

        looks = pauses()
        while not self.poll():
            pause(next(looks))


def _head_of(sent: Sequence[Any], is_single: bool) -> tuple[bytes, bool]:
    """Return the message that says what arrays are, and whether it has their values, too."""
    kinds = [(array.shape, _pickled(array.dtype)) for array in sent]
    is_whole = sum(array.nbytes for array in sent) <= SMALL
    head = pickle.dumps((kinds, is_whole, is_single), pickle.HIGHEST_PROTOCOL)
    return b"".join([head, *(as_bytes(array) for array in sent)]) if is_whole else head, is_whole


# dtypes are pickled by Python code, in 2 us
@lru_cache(maxsize=64)
def _pickled(dtype: Any) -> bytes:
    return pickle.dumps(dtype, pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=64)
def _dtype_of(pickled: bytes) -> Any:
    return pickle.loads(pickled)
