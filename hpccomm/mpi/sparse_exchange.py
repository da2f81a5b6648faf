"""Sparse exchanges: the receivers of messages do not know of them before they arrive.

Blocking exchanges within a node use its memory instead (`node_exchange_sparse` of the compiled fast path). Each
receiver gets one message that describes the arrays and includes small ones, and one message for each larger array. The
number of ranks decides how a rank knows which messages to expect:

* few: each rank sends every rank a block of a few bytes, with the message if it is short, otherwise with its length;
  the time grows with the number of ranks (`CountedExchange`);
* many: no rank announces its messages. Every rank takes incoming messages until all ranks know that all their messages
  have been taken (`ConsensusExchange`).
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
from ..job import mpi_library
from ..job.tags import SPARSE, SPARSE_TURNS
from .datatypes import as_bytes, message
from .layout import send_buffer
from .works import MPIWork, wait_for_all

SMALL = 4 << 10  # bytes of all arrays for one rank, up to which the message includes them
FEW = 64  # ranks
BLOCKS = 8 << 10  # bytes of the blocks that one rank sends to all others
NOTHING = [bytearray(), 0, MPI.BYTE]
LENGTH = np.dtype(np.int64)  # each block begins with one


def tags_of(turn: int) -> range:
    """Return the three tags of an exchange, by its number in its group."""
    first = SPARSE + 3 * (turn % SPARSE_TURNS)
    return range(first, first + 3)


def half_a_cycle_before(turn: int) -> int:
    """Return the exchange that a rank must have completed before it begins exchange `turn`.

    Then every rank has begun that exchange, and so has completed the previous one with the tags of `turn`.
    """
    return turn - SPARSE_TURNS // 2


class SparseExchange(Work):
    """One exchange.

    `arrays` has for each receiver a tuple of arrays, or a list of one. `received` gets a tuple from each sender, or the
    array itself instead of a list of one; its keys are the senders' `names`.

    A signal handler may raise after any call, and the interrupted step is repeated. So one step in C begins and notes a
    receive: a receive begun twice would wait forever.
    """

    translate_error = MPIWork.translate_error
    # large arrays are received after their sizes have been seen
    progress = Progress(needs_polling=mpi_library.any_thread_may_call())

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
        self._came: dict[int, Any] = {}  # by sender: the arrays of messages that have been taken
        self._received, self._names = received, names
        self._requests: list[MPI.Request] = []
        self._heads: dict[int, bytes] = {}
        self._sent: list[Any] = []  # keeps arrays until they are sent
        for rank, each in arrays.items():
            sent = list(map(send_buffer, each))
            self._heads[rank], is_whole = _head_of(sent, type(each) is list)
            self._sent += sent
            if not is_whole:
                self._requests += [comm.Isend(message(array), rank, self._data) for array in sent if array.nbytes]

    def _expect(self, source: int, length: int) -> None:
        """Begin to receive the message that describes another rank's arrays."""
        head = bytearray(length)
        requests = map(self._comm.Irecv, [[head, MPI.BYTE]], [source], [self._head])
        self._coming.update(zip([source], zip(requests, [head])))

    def _take_heads(self) -> bool:
        """Take the messages that have come; return whether all expected ones have been taken."""
        for source, (request, head) in self._coming.items():
            if source not in self._came and request.Test():
                self._take(source, head)
        return self._coming.keys() <= self._came.keys()

    def _take(self, source: int, head: bytearray | memoryview) -> None:
        """Make the arrays of a message, and begin to receive those that it does not include."""
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
    """A block for every rank first, then the messages that do not fit into it.

    Large arrays need the receiver to poll this exchange. Between start and wait the progress thread does, so ranks may
    wait for several exchanges in different orders, and for other operations in between.
    """

    def __init__(self, comm: MPI.Intracomm, async_op: bool, *arguments: Any) -> None:
        super().__init__(comm, *arguments)
        size = comm.size
        self._block = BLOCKS // size // LENGTH.itemsize * LENGTH.itemsize
        sent, self._blocks = bytearray(self._block * size), bytearray(self._block * size)
        self._fill(sent)
        self._counting: list[MPI.Request] = []
        if async_op:  # by messages: MPICH 5.0.2's MPI_Ialltoall sometimes never completed on one rank
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
        """Write the length of each message, and the message itself if it is short."""
        for rank, head in self._heads.items():
            start = rank * self._block
            text = len(head).to_bytes(LENGTH.itemsize, sys.byteorder) + head * self._is_short(len(head))
            blocks[start : start + len(text)] = text

    def _count(self) -> None:
        """Take the short messages, and begin to receive the others, whose lengths are known now."""
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
        """Take the messages that have come; return whether all sends and receives are complete."""
        if self._counting:
            if not MPI.Request.Testall(self._counting):
                return False
            self._count()
        if not (self._take_heads() and MPI.Request.Testall(self._requests)):
            return False
        self._end()
        return True

    def block(self) -> None:
        """Wait for all sends and receives."""
        if self._counting:
            wait_for_all(self._counting)
            self._count()
        wait_for_all([request for request, _ in self._coming.values()])
        self._take_heads()
        wait_for_all(self._requests)
        self._end()


class ConsensusExchange(SparseExchange):
    """Non-blocking consensus (T. Hoefler et al., Scalable communication protocols for dynamic sparse data exchange).

    ::

        begin    a synchronous send to each receiver; then larger arrays
        then     take incoming messages; when all synchronous sends are done, enter a non-blocking barrier
        end      when the barrier is done: nothing more can come

    The barrier is made of messages, because all ranks would have to call MPI_Ibarrier in the same order as other
    collectives. Several exchanges may be in flight, and ranks may wait for them in different orders. So each exchange
    also advances those before it, in one thread at a time.
    """

    _looks = False  # whether a thread advances exchanges

    def __init__(self, comm: MPI.Intracomm, unfinished: deque[ConsensusExchange], *arguments: Any) -> None:
        super().__init__(comm, *arguments)
        self._unfinished = unfinished
        self._is_done = False
        self._fault: Exception | None = None
        self._taken = [comm.Issend([head, MPI.BYTE], rank, self._head) for rank, head in self._heads.items()]
        self._rounds: list[MPI.Request] = []  # of the barrier, whose algorithm is dissemination
        unfinished.append(self)  # from here on a thread that waits for a later exchange advances it

    def poll(self) -> bool:
        """Advance this exchange and those before it; return whether it is complete on all ranks."""
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
        """Advance as far as possible now. An error is kept for this exchange's own `poll`."""
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
        """Take the messages that have come; return whether all have been taken, on all ranks."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._head, status):  # no other thread receives it
            self._expect(status.Get_source(), status.Get_count(MPI.BYTE))
        return (
            self._take_heads()
            and MPI.Request.Testall(self._taken)
            and self._have_met()
            and MPI.Request.Testall(self._requests)
        )

    def _have_met(self) -> bool:
        """Advance the barrier; return whether all ranks have entered it."""
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
    """Return the message that describes arrays, and whether it includes their values."""
    kinds = [(array.shape, _pickled(array.dtype)) for array in sent]
    is_whole = sum(array.nbytes for array in sent) <= SMALL
    head = pickle.dumps((kinds, is_whole, is_single), pickle.HIGHEST_PROTOCOL)
    return b"".join([head, *(as_bytes(array) for array in sent)]) if is_whole else head, is_whole


# Python code pickles dtypes, in 2 us
@lru_cache(maxsize=64)
def _pickled(dtype: Any) -> bytes:
    return pickle.dumps(dtype, pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=64)
def _dtype_of(pickled: bytes) -> Any:
    return pickle.loads(pickled)
