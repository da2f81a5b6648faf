"""The exchange of parts of arrays between ranks: one message for each pair of ranks, packed where it has to be."""

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
from ..job.tags import EXCHANGE
from .datatypes import message
from .layout import is_plain
from .persistent import MPIPersistentWork
from .works import ExchangeWork


class Memory:
    """The memory of a blocking exchange, for the next one that needs as much: new pages cost more than the copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}  # by size
        self._taken: dict[int, list[Any]] = {}

    def begin(self) -> Callable[[tuple[int, ...], Any], Any]:
        """Return what makes arrays; what a failed exchange has taken is forgotten, for MPI may still write there."""
        self._taken = {}
        return self._empty

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        nbytes = prod(shape) * dtype.itemsize
        free = self._free.get(nbytes)
        memory = free.pop() if free else np.empty(nbytes, np.uint8)
        self._taken.setdefault(nbytes, []).append(memory)
        return memory.view(dtype).reshape(shape)

    def end(self) -> None:
        """Keep what this exchange has taken, and nothing else."""
        self._free, self._taken = self._taken, {}


class Plan(Messages):
    """What one rank packs, sends, receives and unpacks."""

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


def set_up(comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool) -> MPIPersistentWork:
    """Return the persistent form of an exchange."""
    plan = Plan(comm.Get_rank(), sends, receives, adds)
    requests = [comm.Recv_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    requests += [comm.Send_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    return MPIPersistentWork(requests, plan.pack, plan.unpack, plan)
