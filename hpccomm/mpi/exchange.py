"""The exchange of parts of arrays between ranks: one message for each pair of ranks, packed if necessary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from operator import setitem
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.backend import Pieces
from ..core.overlap import address_of
from ..core.pieces import Messages
from ..core.work import Once, Work
from ..job import failures
from ..job.tags import EXCHANGE
from .datatypes import message
from .layout import is_plain
from .persistent import MPIPersistentWork
from .works import ExchangeWork, check_length

MOST_REPEATED = 512 << 10  # bytes sent and received; if there are more, the copies dominate


class Memory:
    """Memory of a blocking exchange, reused by the next of the same sizes: new pages cost more than the copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}  # by size
        self._taken: dict[int, list[Any]] = {}

    def begin(self) -> Callable[[tuple[int, ...], Any], Any]:
        """Return the function that makes arrays; drop a failed exchange's memory, as MPI may still write to it."""
        self._taken = {}
        return self._empty

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        nbytes = prod(shape) * dtype.itemsize
        free = self._free.get(nbytes)
        memory = free.pop() if free else np.empty(nbytes, np.uint8)
        self._taken.setdefault(nbytes, []).append(memory)
        return memory.view(dtype).reshape(shape)

    def end(self) -> None:
        """Keep only the memory that this exchange has used."""
        self._free, self._taken = self._taken, {}


class Plan(Messages):
    """The messages of one rank, and the steps that pack and unpack them."""

    def __init__(self, rank: int, sends: Pieces, receives: Pieces, adds: bool, empty: Any = np.empty) -> None:
        super().__init__(rank, sends, receives, adds, address_of, is_plain, empty)
        steps = (partial(np.add, to, of, to) if adds else partial(setitem, to, ..., of) for to, of in self.unpacked)
        self.unpack = Once(*steps) if self.unpacked else None

    def pack(self) -> None:
        """Fill the messages."""
        for slot, piece in self.packed:
            slot[...] = piece


def exchange(
    comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool, memory: Memory, async_op: bool
) -> Work | None:
    """Do an exchange once."""
    plan = Plan(comm.Get_rank(), sends, receives, adds, np.empty if async_op else memory.begin())
    plan.pack()
    requests: list[Any] = [comm.Irecv(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    requests += [comm.Isend(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    work = ExchangeWork(requests, [buffer.nbytes for buffer in plan.received.values()], plan.unpack, plan)
    if async_op and requests:
        return work
    work.block()
    if plan.unpack is not None:
        plan.unpack()
    memory.end()
    return None


class RepeatedExchange:
    """Blocking exchanges of parts of the same shapes, planned once.

    It packs all parts into memory of its own, so it keeps none of the program's arrays.
    """

    def __init__(self, comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool) -> None:
        self._comm, self._adds = comm, adds
        self._set_up(sends, receives)

    def _set_up(self, sends: Pieces, receives: Pieces) -> None:
        messages = Messages(self._comm.Get_rank(), sends, receives, self._adds, address_of, None, np.empty)
        sent, received = ({id(part): i for i, (_, part) in enumerate(parts)} for parts in (sends, receives))
        self._packs = [(slot, sent[id(part)]) for slot, part in messages.packed]
        self._unpacks = [(received[id(part)], slot) for part, slot in messages.unpacked]
        self._received = [(message(buffer), peer, EXCHANGE) for peer, buffer in messages.received.items()]
        self._sent = [(message(buffer), peer, EXCHANGE) for peer, buffer in messages.sent.items()]
        self._sizes = [buffer.nbytes for buffer in messages.received.values()]
        self._statuses = [MPI.Status() for _ in (*self._received, *self._sent)]

    def __call__(self, sends: Pieces, receives: Pieces) -> None:
        """Do an exchange."""
        for slot, i in self._packs:
            slot[...] = sends[i][1]
        try:
            requests: list[MPI.Request] = [self._comm.Irecv(*each) for each in self._received]
            requests += [self._comm.Isend(*each) for each in self._sent]
            MPI.Request.Waitall(requests, self._statuses)
        except BaseException:
            failures.unsafe_buffers.append((self._received, self._sent))  # MPI may still write to this memory
            self._set_up(sends, receives)
            raise
        for status, nbytes in zip(self._statuses, self._sizes):
            check_length("", status, nbytes)
        for i, slot in self._unpacks:
            part = receives[i][1]
            if self._adds:
                np.add(part, slot, part)
            else:
                part[...] = slot


def set_up(comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool) -> MPIPersistentWork:
    """Return the persistent form of an exchange."""
    plan = Plan(comm.Get_rank(), sends, receives, adds)
    requests = [comm.Recv_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    requests += [comm.Send_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    return MPIPersistentWork(requests, plan.pack, plan.unpack, plan)
