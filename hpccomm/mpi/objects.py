"""Python objects over MPI: pickled by mpi4py, with large buffers sent separately and without a copy (PEP 574).

An `_Unpicklable` replaces an object that can't be pickled, so that every rank raises the same error and none waits. A
collective begins with a block of BLOCK bytes from each rank, in one MPI call. That is all if every pickle fits.
Otherwise the block says so, and mpi4py's collective follows, which needs several calls. `object_exchange.py` has the
asynchronous collectives, `object_messages.py` the messages.
"""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from threading import get_ident
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from ..core.backend import Backend
from ..core.operations import NotLoaded
from ..core.options import BackendOptions
from ..core.timeouts import MAIN, pause, pauses
from ..core.work import Work, is_of_a_signal_handler
from ..errors import DistError, on_rank
from ..job.mpi_library import private
from ..job.tags import OBJECTS
from . import sparse_exchange
from .object_exchange import ObjectExchange
from .object_messages import ObjectReceive, ObjectSend, Receives, matched
from .sparse_exchange import ConsensusExchange, CountedExchange
from .works import as_backend_error

BLOCK = 256  # bytes; Open MPI needs twice the time for 512
UNPICKLABLE, LARGE = 1, 0  # first byte of a block; otherwise it is 0x80, every pickle's first byte


class ObjectTransport(Backend):
    """The object operations of one group."""

    name = "objects"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options.rank, options.size)
        if options.comm is None:
            raise DistError(f"the group {options.name!r} has no MPI communicator, over which objects travel{on_rank()}")
        self._comm = options.comm
        self._messages = pkl5.Intracomm(options.comm)
        self._receives = Receives(self._messages)
        self._has_duplicate = False  # for collectives
        self._turns = 0  # number of exchanges so far: sparse ones, and those of objects
        self._of_turn: dict[int, weakref.ref[Work]] = {}  # the latest exchanges
        self._unfinished: deque[ConsensusExchange] = deque()
        self._sending: list[list[MPI.Request]] = []  # of exchanges of objects

    @property
    def _collectives(self) -> pkl5.Intracomm:
        if not self._has_duplicate:
            # mpi4py's first collective would make it while holding the GIL: an early rank would stop its other threads,
            # and another rank, perhaps in here too, may wait for them.
            from .shared_memory import in_one_thread

            in_one_thread(self._comm, lambda: private(MPI._commctx_intra(self._messages)[0], self._messages))
            self._has_duplicate = True
        return self._messages

    def exchange_sparse(
        self, arrays: Mapping[int, Sequence[Any]], received: dict[int, Any], names: Sequence[int], async_op: bool
    ) -> Work | None:
        """Send arrays to some ranks, and fill `received` with those from others (`sparse_exchange.py`)."""
        arguments = self._next_turn(), arrays, received, names
        if self.size <= sparse_exchange.FEW:
            exchange: Work = CountedExchange(self._comm, async_op, *arguments)
            if not async_op:
                exchange.block()
                return None
        else:
            exchange = ConsensusExchange(self._comm, self._unfinished, *arguments)
        self._of_turn[self._turns] = weakref.ref(exchange)
        return exchange

    def _next_turn(self) -> int:
        """Return the number of a new exchange, once its tags are free on every rank."""
        self._turns += 1
        made = self._of_turn.pop(sparse_exchange.half_a_cycle_before(self._turns), None)
        if made is not None and (oldest := made()) is not None:
            looks = pauses()
            while not oldest.has_ended():
                pause(next(looks))
        return self._turns

    def exchange_objects(
        self, operation: str, objects: Mapping[int, Any], fill: Callable[[list[Any]], None]
    ) -> ObjectExchange:
        """Send an object to some ranks, and call `fill` with the received objects in rank order when they have come.

        It is the asynchronous form of every collective of objects. If one can't be pickled, all ranks get the reason.
        """
        distinct = {id(obj): obj for obj in objects.values()}  # many are the same object
        wrapped: dict[int, Any] = {key: self._wrapped(obj, copies=True) for key, obj in distinct.items()}
        failed = _first_unpicklable(wrapped.values())
        if failed is not None:
            sent = dict.fromkeys(range(self.size), pickle.dumps(failed))
        else:
            sent = {rank: wrapped[id(obj)].data for rank, obj in objects.items()}
        turn = self._next_turn()

        def finish(came: dict[int, bytearray]) -> None:
            fill(_unwrapped(operation, list(map(_unpickle, came.values())), came))

        self._sending = [each for each in self._sending if not MPI.Request.Testall(each)]
        exchange = ObjectExchange(self._comm, turn, sent, finish)
        self._of_turn[turn] = weakref.ref(exchange)
        self._sending.append(exchange.sends)
        return exchange

    def close(self) -> None:
        for sends in self._sending:
            MPI.Request.Waitall(sends)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object."""
        wrapped = self._wrapped(obj)
        blocks = self._all_blocks("all_gather_object", wrapped)
        if blocks is not None:
            return _unwrapped("all_gather_object", list(map(_unpickle, blocks)))
        return _unwrapped("all_gather_object", self._collectives.allgather(wrapped))

    def gather_object(self, obj: Any, root: int) -> list[Any] | None:
        """Return every rank's object on the root."""
        wrapped = self._wrapped(obj)
        gathered = bytearray(BLOCK * self.size) if self.rank == root else None
        self._comm.Gather((_block_of(wrapped), BLOCK, MPI.BYTE), gathered and (gathered, BLOCK, MPI.BYTE), root)
        blocks = _split(gathered) if gathered else []
        worst = bytearray(BLOCK)  # the block that all ranks must see: one that says LARGE or UNPICKLABLE
        if gathered:
            kinds = gathered[::BLOCK]
            worst = blocks[next((kinds.index(kind) for kind in (LARGE, UNPICKLABLE) if kind in kinds), root)]
        self._comm.Bcast((worst, BLOCK, MPI.BYTE), root)
        if worst[0] == UNPICKLABLE:
            _loaded("gather_object", worst, root)
        if worst[0] != LARGE:
            return _unwrapped("gather_object", list(map(_unpickle, blocks))) if self.rank == root else None
        received = self._collectives.gather(wrapped, root)
        failed = _first_unpicklable(received or ())
        _unwrapped("gather_object", [self._collectives.bcast(failed, root)])
        return None if received is None else _unwrapped("gather_object", received)

    def broadcast_object_list(self, objects: list[Any], root: int) -> list[Any]:
        """Return the root's objects."""
        wrapped = self._wrapped(objects) if self.rank == root else None
        block = bytearray(BLOCK) if wrapped is None else _block_of(wrapped)
        self._comm.Bcast((block, BLOCK, MPI.BYTE), root)
        if block[0] == LARGE:
            (received,) = _unwrapped("broadcast_object_list", [self._collectives.bcast(wrapped, root)], [root])
        elif wrapped is None or block[0] == UNPICKLABLE:
            received = _loaded("broadcast_object_list", block, root)
        return objects if self.rank == root else received

    def scatter_object_list(self, objects: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's object of the root's list."""
        wrapped, blocks, block = None, None, bytearray(BLOCK)
        if objects is not None:
            wrapped = [self._wrapped(obj) for obj in objects]
            failed = _first_unpicklable(wrapped)
            if failed is not None:
                wrapped = [failed] * self.size
            parts = list(map(_block_of, wrapped))
            is_large = any(part[0] == LARGE for part in parts)
            blocks = (bytes(BLOCK * self.size) if is_large else b"".join(parts), BLOCK, MPI.BYTE)
        self._comm.Scatter(blocks, (block, BLOCK, MPI.BYTE), root)
        if block[0] != LARGE:
            return _loaded("scatter_object_list", block, root)
        (received,) = _unwrapped("scatter_object_list", [self._collectives.scatter(wrapped, root)], [root])
        return received

    def _all_blocks(self, operation: str, wrapped: _Pickled | _Unpicklable) -> list[bytearray] | None:
        """Return the pickle of each rank; None if one is large."""
        gathered = bytearray(BLOCK * self.size)
        self._comm.Allgather((_block_of(wrapped), BLOCK, MPI.BYTE), (gathered, BLOCK, MPI.BYTE))
        blocks = _split(gathered)
        kinds = gathered[::BLOCK]
        if LARGE in kinds:
            return None
        if UNPICKLABLE in kinds:
            _loaded(operation, blocks[kinds.index(UNPICKLABLE)], kinds.index(UNPICKLABLE))
        return blocks

    def send_object_list(self, objects: list[Any], dst: int, tag: int) -> None:
        """Send the objects."""
        wrapped = self._wrapped(objects)
        if get_ident() == MAIN:
            self._messages.send(wrapped, dst, tag + OBJECTS)
        else:  # the end of the program can't stop a thread inside MPI_Send
            sending, looks = self._messages.isend(wrapped, dst, tag + OBJECTS), pauses()
            while not sending.test()[0]:
                pause(next(looks))
        _unwrapped("send_object_list", [wrapped])

    def recv_object_list(self, src: int | None, tag: int) -> tuple[list[Any], int]:
        """Return the objects received, and their sender."""
        if self._receives or get_ident() != MAIN:  # earlier receives come first; see also `wait_for`
            receive: Any = ObjectReceive(self._receives, src, tag + OBJECTS)
            receive.block()
            (received,) = _unwrapped("recv_object_list", [receive.came], [receive.source])
            return received, receive.source
        came: Any = matched(self._messages, MPI.Comm.Mprobe, MPI.ANY_SOURCE if src is None else src, tag + OBJECTS)
        came.wait()
        (received,) = _unwrapped("recv_object_list", [came.load()], [came.sender])
        return received, came.sender

    def isend_object_list(self, objects: list[Any], dst: int, tag: int) -> ObjectSend:
        """Begin to send a copy of the objects."""
        wrapped = self._wrapped(objects, copies=True)

        def finish() -> None:
            _unwrapped("send_object_list", [wrapped])

        return ObjectSend(self._receives, self._messages.isend(wrapped, dst, tag + OBJECTS), finish)

    def irecv_object_list(self, fill: Callable[[list[Any]], None], src: int | None, tag: int) -> ObjectReceive:
        """Begin to receive objects, and call `fill` with them when they have come."""

        def finish(came: Any) -> None:
            fill(*_unwrapped("recv_object_list", [came], [receive.source or 0]))

        receive = ObjectReceive(self._receives, src, tag + OBJECTS, finish)
        return receive

    def translate_error(self, operation: str, error: Exception) -> Exception:
        return as_backend_error(operation, error, self._messages)

    def _wrapped(self, obj: Any, copies: bool = False) -> _Pickled | _Unpicklable:
        try:
            return _Pickled(obj, copies)
        except Exception as error:  # pickling runs any __reduce__, so it can raise anything
            reason = f"a {type(obj).__name__} can't be pickled ({type(error).__name__}: {error})"
            return _Unpicklable(self.rank, reason)


class _Pickled:
    """A pickled object: its data and its large buffers, which are pickled again without a copy.

    `copies`: the buffers are in the data, so that the program may change its arrays.
    """

    def __init__(self, obj: Any, copies: bool = False) -> None:
        self.data, self.buffers = (pkl5.pickle.dumps(obj), []) if copies else pkl5.pickle.dumps_oob(obj)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _unpickle, tuple(map(pickle.PickleBuffer, (self.data, *self.buffers)))  # type: ignore[arg-type]


def _unpickle(data: Any, *buffers: Any) -> Any:
    try:
        return pkl5.pickle.loads_oob(data, list(buffers))
    except Exception as error:  # unpickling runs any code of the object's class; the other objects have come, too
        if is_of_a_signal_handler(error):
            raise
        return NotLoaded(error)


class _Unpicklable:
    """The substitute for an object that can't be pickled."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason


def _first_unpicklable(wrapped: Iterable[Any]) -> _Unpicklable | None:
    return next((each for each in wrapped if isinstance(each, _Unpicklable)), None)


def _split(gathered: bytearray) -> list[bytearray]:
    """Return the block of each rank."""
    return [gathered[start : start + BLOCK] for start in range(0, len(gathered), BLOCK)]


def _block_of(wrapped: _Pickled | _Unpicklable) -> bytes:
    if isinstance(wrapped, _Unpicklable):
        data = bytes([UNPICKLABLE]) + pickle.dumps(wrapped)
    else:
        data = b"" if wrapped.buffers else wrapped.data
    return data.ljust(BLOCK, b"\0") if len(data) <= BLOCK else bytes(BLOCK)


def _loaded(operation: str, block: bytes | bytearray, sender: int) -> Any:
    """Return the object of a block that is not large; raise if it could not be pickled."""
    data = block[1:] if block[0] == UNPICKLABLE else block
    return _unwrapped(operation, [_unpickle(data)], [sender])[0]


def _unwrapped(operation: str, received: Sequence[Any], senders: Iterable[int] | None = None) -> list[Any]:
    """Return the received objects; raise if one stands for an object that can't be pickled.

    `senders` are the ranks that sent them (default: all of the group).
    """
    for sender, each in zip(count() if senders is None else senders, received):
        if isinstance(each, _Unpicklable):
            raise TypeError(f"{operation}: on rank {each.rank} of the group, {each.reason}{on_rank()}")
        if isinstance(each, NotLoaded):
            each.sender = sender
    return list(received)
