"""The exchange of parts of arrays between ranks: one message for each pair of ranks, packed where it has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.backend import Pieces
from ..core.work import Once, Work
from ..job.tags import EXCHANGE
from .datatypes import message
from .layout import is_plain
from .persistent import MPIPersistentWork
from .works import all_done

ALIGNMENT = 16  # bytes, of each part of a packed message


class Plan:
    """What one rank packs, sends, receives and unpacks; a part that is alone in its message may stay where it lies."""

    def __init__(self, rank: int, sends: Pieces, receives: Pieces, adds: bool) -> None:
        outgoing, incoming = by_peer(sends), by_peer(receives)
        slots = {rank: iter(outgoing.pop(rank, []))}  # what a rank sends to itself is copied
        incoming.pop(rank, None)
        self.sent: dict[int, Any] = {}
        self.received: dict[int, Any] = {}
        self._packed: list[tuple[Any, Any]] = []
        for peer, pieces in outgoing.items():
            self.sent[peer], filled = _message(pieces)
            self._packed += [(slot, piece) for slot, piece in zip(filled, pieces) if slot is not piece]
        for peer, pieces in incoming.items():
            self.received[peer], filled = _message(pieces, may_stay=not adds)
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


def exchange(comm: MPI.Intracomm, plan: Plan, async_op: bool) -> Work | None:
    """Do an exchange once."""
    requests: list[Any] = [comm.Irecv(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    plan.pack()
    requests += [comm.Isend(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    if async_op and requests:
        return all_done(requests, plan.unpack, plan)
    MPI.Request.Waitall(requests)
    if plan.unpack is not None:
        plan.unpack()
    return None


def set_up(comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool) -> MPIPersistentWork:
    """Return the persistent form of an exchange."""
    plan = Plan(comm.Get_rank(), sends, receives, adds)
    requests = [comm.Recv_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.received.items()]
    requests += [comm.Send_init(message(buffer), peer, EXCHANGE) for peer, buffer in plan.sent.items()]
    return MPIPersistentWork(requests, plan.pack, plan.unpack, plan)


def by_peer(pieces: Iterable[tuple[int, Any]]) -> dict[int, list[Any]]:
    """Return the parts of arrays of each rank, in their order."""
    found: dict[int, list[Any]] = {}
    for peer, piece in pieces:
        found.setdefault(peer, []).append(piece)
    return found


def _message(pieces: list[Any], may_stay: bool = True) -> tuple[Any, list[Any]]:
    """Return a contiguous array for the values of `pieces`, and the part of it for each, in its shape."""
    if may_stay and len(pieces) == 1 and is_plain(pieces[0]):
        return pieces[0], pieces
    starts, end = places(pieces)
    buffer = np.empty(end, np.uint8)
    parts = (buffer[start : start + piece.nbytes] for start, piece in zip(starts, pieces))
    return buffer, [part.view(piece.dtype).reshape(piece.shape) for part, piece in zip(parts, pieces)]


def places(pieces: list[Any]) -> tuple[list[int], int]:
    """Return where the values of each of `pieces` are in a message, and how many bytes it has."""
    starts, end = [], 0
    for piece in pieces:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + piece.nbytes
    return starts, end
