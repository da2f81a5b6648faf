"""The exchange of parts of arrays between ranks: one message for each pair of ranks, packed where it has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import setitem
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..core.backend import Pieces
from ..core.overlap import Extent, address_of, extent, overlapping
from ..core.work import Once, Work
from ..job.tags import EXCHANGE
from .datatypes import message
from .layout import is_plain
from .persistent import MPIPersistentWork
from .works import MPIWorks, check_length

T = TypeVar("T")

ALIGNMENT = 16  # bytes, of each part of a packed message


class Plan:
    """What one rank packs, sends, receives and unpacks; a part that is alone in its message may stay where it lies."""

    def __init__(self, rank: int, sends: Pieces, receives: Pieces, adds: bool) -> None:
        extents = [[extent(piece, address_of(piece)) for _, piece in pieces] for pieces in (sends, receives)]
        outgoing, incoming = _stays(sends, *extents), _stays(receives, *extents[::-1])
        slots = {}
        self.sent: dict[int, Any] = {}
        self.received: dict[int, Any] = {}
        self._packed: list[tuple[Any, Any]] = []
        for peer, pieces in by_peer(outgoing).items():
            if peer == rank:  # what a rank sends to itself is copied
                filled = [piece if stays else np.empty_like(piece) for piece, stays in pieces]
                slots[rank] = iter(filled)
            else:
                self.sent[peer], filled = _message(pieces)
            self._packed += [(slot, piece) for slot, (piece, _) in zip(filled, pieces) if slot is not piece]
        for peer, pieces in by_peer(incoming).items():
            if peer != rank:
                self.received[peer], filled = _message([(piece, stays and not adds) for piece, stays in pieces])
                slots[peer] = iter(filled)
        steps: list[Callable[[], Any]] = []
        for peer, target in receives:
            source = next(slots[peer])
            if adds:
                steps.append(partial(np.add, target, source, target))
            elif source is not target:
                steps.append(partial(setitem, target, ..., source))
        self.unpack = Once(*steps) if steps else None

    def pack(self) -> None:
        """Fill the messages."""
        for slot, piece in self._packed:
            slot[...] = piece


class ExchangeWork(MPIWorks):
    """An exchange in flight, which notices messages that are too short: the ranks mean different parts."""

    def __init__(self, requests: list[Any], sizes: list[int], plan: Plan) -> None:
        super().__init__(requests, plan.unpack, plan)
        self._sizes = sizes  # of the messages that are received, whose requests are the first ones

    def poll(self) -> bool:
        """As MPIWorks; check the messages."""
        is_done = super().poll()
        if is_done:
            self._check()
        return is_done

    def block(self) -> None:
        """As MPIWorks; check the messages."""
        super().block()
        self._check()

    def _check(self) -> None:
        for status, nbytes in zip(self._statuses, self._sizes):
            check_length("", status, nbytes)


def exchange(comm: MPI.Intracomm, plan: Plan, async_op: bool) -> Work | None:
    """Do an exchange once."""
    plan.pack()
    requests: list[Any] = [comm.Irecv(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    requests += [comm.Isend(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    work = ExchangeWork(requests, [buffer.nbytes for buffer in plan.received.values()], plan)
    if async_op and requests:
        return work
    work.block()
    if plan.unpack is not None:
        plan.unpack()
    return None


def set_up(comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool) -> MPIPersistentWork:
    """Return the persistent form of an exchange."""
    plan = Plan(comm.Get_rank(), sends, receives, adds)
    requests = [comm.Recv_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    requests += [comm.Send_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    return MPIPersistentWork(requests, plan.pack, plan.unpack, plan)


def by_peer(pieces: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Return the parts of arrays of each rank, in their order."""
    found: dict[int, list[T]] = {}
    for peer, piece in pieces:
        found.setdefault(peer, []).append(piece)
    return found


def _stays(pieces: Pieces, own: list[Extent], others: list[Extent]) -> Iterator[tuple[int, tuple[Any, bool]]]:
    """Yield the parts, each with whether it may stay where it lies: it shares no memory with the others."""
    for (peer, piece), is_shared in zip(pieces, overlapping(own, others)):
        yield peer, (piece, not is_shared)


def _message(pieces: list[tuple[Any, bool]]) -> tuple[Any, list[Any]]:
    """Return a contiguous array for the values of `pieces`, and the part of it for each, in its shape."""
    first, stays = pieces[0]
    if stays and len(pieces) == 1 and is_plain(first):
        return first, [first]
    starts, end = places([piece for piece, _ in pieces])
    buffer = np.empty(end, np.uint8)
    parts = (buffer[start : start + piece.nbytes] for start, (piece, _) in zip(starts, pieces))
    return buffer, [part.view(piece.dtype).reshape(piece.shape) for part, (piece, _) in zip(parts, pieces)]


def places(pieces: list[Any]) -> tuple[list[int], int]:
    """Return where the values of each of `pieces` are in a message, and how many bytes it has."""
    starts, end = [], 0
    for piece in pieces:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + piece.nbytes
    return starts, end
