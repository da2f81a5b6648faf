"""A sparse exchange: messages between ranks of which the receivers know nothing before they come.

Blocking ones of a node are done in its memory before this file is asked (`node_all_to_all_sparse` of the compiled
fast path). To each receiver goes one message that says what the arrays are, with small ones themselves, and one for
each larger array. How a rank knows which messages to expect depends on the number of ranks:

* few: each sends each other a block of a few bytes, which has the message where it is short, and its length
  otherwise; that takes the longer the more there are (`CountedExchange`);
* many: nobody is told. Every rank takes what comes, until all ranks know that what they have sent has been taken
  (`ConsensusExchange`).
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.work import STATE_LOCK, Progress, Work, is_of_a_signal_handler
from ..job.tags import SPARSE, SPARSE_TURNS
from .datatypes import as_bytes, message
from .layout import send_buffer
from .works import MPIWork

SMALL = 4 << 10  # bytes of all arrays for one rank: up to there they travel with what they are
FEW = 64  # ranks
BLOCKS = 8 << 10  # bytes of the blocks that one rank sends to all others
NOTHING = [bytearray(), 0, MPI.BYTE]
LENGTH = np.dtype(np.int64)  # with which each block begins


def tags_of(turn: int) -> range:
    """Return the three tags of an exchange, by its number among those of its group."""
    first = SPARSE + 3 * (turn % SPARSE_TURNS)
    return range(first, first + 3)


def half_a_cycle_before(turn: int) -> int:
    """Return the exchange that a rank has to have done when it begins another one.

    So every rank has begun that one, and has done the one before it that had the tags of the new one.
    """
    return turn - SPARSE_TURNS // 2


class SparseExchange(Work):
    """One exchange.

    `arrays` has for each receiver a tuple of arrays, or a list of one. `received` is filled likewise, a list of one
    with the array itself; its keys are the senders' `names`.

    The handler of a signal may raise after any call, and what was interrupted is done again. So a receive is begun and
    noted by one step in C: one that is begun twice would wait for ever.
    """

    translate_error = MPIWork.translate_error
    # what is large is received when its size has been seen
    progress = Progress(needs_polling=MPI.Query_thread() == MPI.THREAD_MULTIPLE)

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
        self._head, self._data, self._barrier = tags_of(turn)
        self._coming: dict[int, tuple[MPI.Request, bytearray]] = {}  # by sender: messages of known lengths
        self._came: dict[int, Any] = {}  # the arrays of those that have been taken
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

    def _expect(self, source: int, length: int) -> None:
        """Receive the message that says what arrays another rank sends."""
        head = bytearray(length)
        requests = map(self._comm.Irecv, [[head, MPI.BYTE]], [source], [self._head])
        self._coming.update(zip([source], zip(requests, [head])))

    def _take_heads(self) -> bool:
        """Take the messages that have come; return whether none is missing of those that are expected."""
        for source, (request, head) in self._coming.items():
            if source not in self._came and request.Test():
                self._take(source, head)
        return self._coming.keys() <= self._came.keys()

    def _take(self, source: int, head: bytearray | memoryview) -> None:
        """Make the arrays of a message, and receive those that have not come with it."""
        kinds, is_whole, is_single = pickle.loads(head)
        arrays = [np.empty(shape, _dtype_of(dtype)) for shape, dtype in kinds]
        if is_whole:
            at = len(head) - sum(array.nbytes for array in arrays)
            for array in arrays:
                as_bytes(array)[:] = np.frombuffer(head, np.uint8, array.nbytes, at)
                at += array.nbytes
        buffers = [] if is_whole else [message(array) for array in arrays if array.nbytes]
        came = arrays[0] if is_single else tuple(arrays)
        self._requests += map(self._comm.Irecv, buffers, repeat(source), repeat(self._data))
        self._came[source] = came

    def _end(self) -> None:
        self._received.update((self._names[source], self._came[source]) for source in sorted(self._came))
        self._sent = []


class CountedExchange(SparseExchange):
    """A block for every rank first, then the messages that were too long for it.

    What is large needs the receiver to look at this exchange. Between start and wait the progress thread does, so ranks
    may wait for several in different orders, and for other operations in between.
    """

    def __init__(self, comm: MPI.Intracomm, async_op: bool, *arguments: Any) -> None:
        super().__init__(comm, *arguments)
        size = comm.size
        self._block = BLOCKS // size // LENGTH.itemsize * LENGTH.itemsize
        sent, self._blocks = bytearray(self._block * size), bytearray(self._block * size)
        self._fill(sent)
        self._counting: list[MPI.Request] = []
        if async_op:  # by messages, for MPI_Ialltoall of MPICH 5.0.2 has been seen not to end, on one rank
            for rank in range(size):
                part = slice(rank * self._block, (rank + 1) * self._block)
                self._counting.append(comm.Irecv([memoryview(self._blocks)[part], MPI.BYTE], rank, self._head))
                self._requests.append(comm.Isend([memoryview(sent)[part], MPI.BYTE], rank, self._head))
        else:
            comm.Alltoall([sent, self._block, MPI.BYTE], [self._blocks, self._block, MPI.BYTE])
            self._count()
        for rank, head in self._heads.items():
            if not self._is_short(len(head)):
                self._requests.append(comm.Isend([head, MPI.BYTE], rank, self._head))

    def _is_short(self, length: int) -> bool:
        return length <= self._block - LENGTH.itemsize

    def _fill(self, blocks: bytearray) -> None:
        """Write the length of each message, and the message where it is short."""
        for rank, head in self._heads.items():
            start = rank * self._block
            text = len(head).to_bytes(LENGTH.itemsize, sys.byteorder) + head * self._is_short(len(head))
            blocks[start : start + len(text)] = text

    def _count(self) -> None:
        """Take the short messages, and receive the others, whose lengths are known now."""
        lengths = np.frombuffer(self._blocks, LENGTH)[:: self._block // LENGTH.itemsize]
        for source, length in enumerate(lengths.tolist()):
            if not self._is_short(length):
                if source not in self._coming:
                    self._expect(source, length)
            elif length and source not in self._came:
                start = source * self._block + LENGTH.itemsize
                self._take(source, memoryview(self._blocks)[start : start + length])
        self._counting = []

    def poll(self) -> bool:
        """Take what has come; return whether all that is sent and received is done."""
        if self._counting:
            if not MPI.Request.Testall(self._counting):
                return False
            self._count()
        if not (self._take_heads() and MPI.Request.Testall(self._requests)):
            return False
        self._end()
        return True

    def block(self) -> None:
        """Wait for what comes, and until what is sent has gone."""
        if self._counting:
            MPI.Request.Waitall(self._counting)
            self._count()
        MPI.Request.Waitall([request for request, _ in self._coming.values()])
        self._take_heads()
        MPI.Request.Waitall(self._requests)
        self._end()


class ConsensusExchange(SparseExchange):
    """Non-blocking consensus (T. Hoefler et al., Scalable communication protocols for dynamic sparse data exchange).

    ::

        begin    a synchronous send to each receiver; then larger arrays
        then     take what comes; when all synchronous sends are done, enter a barrier that does not block
        end      when the barrier is done: nothing more can come

    The barrier is made of messages, since MPI_Ibarrier would have to be called in the same order on all ranks as other
    collectives. Several exchanges may be in flight, for which ranks may wait in different orders: so each looks after
    those before it, and one thread at a time does.
    """

    _looks = False  # whether a thread does

    def __init__(self, comm: MPI.Intracomm, unfinished: deque[ConsensusExchange], *arguments: Any) -> None:
        super().__init__(comm, *arguments)
        self._unfinished = unfinished
        self._is_done = False
        self._fault: Exception | None = None
        self._taken = [comm.Issend([head, MPI.BYTE], rank, self._head) for rank, head in self._heads.items()]
        self._rounds: list[MPI.Request] = []  # of the barrier, whose algorithm is dissemination
        unfinished.append(self)  # from here on a thread that waits for a later one looks after it

    def poll(self) -> bool:
        """Take what has come, also of the exchanges before this one; return whether all ranks have done so."""
        mine = False
        try:
            with STATE_LOCK:
                if not ConsensusExchange._looks:
                    ConsensusExchange._looks = mine = True
            if mine and not self._is_done:
                for each in list(self._unfinished):
                    each.advance()
                    if each is self:
                        break
        finally:
            if mine:
                ConsensusExchange._looks = False
        if self._is_done and self._fault is not None:
            raise self._fault
        return self._is_done

    def advance(self) -> None:
        """Go on as far as is possible now. An error waits for this exchange's own `poll`."""
        try:
            if not self._go_on():
                return
            self._end()
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            self._fault = error
        self._is_done = True
        self._unfinished.remove(self)

    def _go_on(self) -> bool:
        """Take what has come; return whether all has, on all ranks."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._head, status):  # and no other thread receives it
            self._expect(status.Get_source(), status.Get_count(MPI.BYTE))
        return (
            self._take_heads()
            and MPI.Request.Testall(self._taken)
            and self._have_met()
            and MPI.Request.Testall(self._requests)
        )

    def _have_met(self) -> bool:
        """Go on in the barrier; return whether all ranks have entered it."""
        comm = self._comm
        while not self._rounds or self._rounds[-1].Test():
            distance = 1 << len(self._rounds)
            if distance >= comm.size:
                return True
            send = map(comm.Isend, [NOTHING], [(comm.rank + distance) % comm.size], [self._barrier])
            receive = map(comm.Irecv, [NOTHING], [(comm.rank - distance) % comm.size], [self._barrier])
            self._requests += send
            self._rounds += receive
        return False


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
