"""Exchange parts of arrays: one message for each pair of ranks, or (in simple transports) one for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import setitem
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .backend import Pieces
from .joined_work import JoinedWork
from .overlap import Extent, all_unaliased, extent, overlapping
from .work import Once, Work

if TYPE_CHECKING:
    from .backend import Backend

T = TypeVar("T")

ALIGNMENT = 16  # bytes, for each part of a packed message


class Messages:
    """The messages of one rank, one for each other rank, and the copies to pack and unpack them.

    A part that is alone in its message may be sent from, or received into, its own memory.

    Attributes
    ----------
    sent, received : dict
        The messages, contiguous arrays, by rank.
    packed, unpacked : list of pairs of arrays
        The copies to make: (target, source). Those of `unpacked` are in the order of `receives`.
    """

    def __init__(
        self,
        rank: int,
        sends: Pieces,
        receives: Pieces,
        adds: bool,
        address_of: Callable[[Any], int],
        is_plain: Callable[[Any], bool] | None,
        empty: Callable[[tuple[int, ...], Any], Any],
    ) -> None:
        """`is_plain` returns whether the transport can use an array's own memory (None: it never can).

        `empty` makes contiguous arrays.
        """
        outgoing, incoming = by_peer(sends), by_peer(receives)
        stay_out: dict[int, list[bool]] = {}
        stay_in: dict[int, list[bool]] = {}
        if is_plain and any(
            len(pieces) == 1 or peer == rank for peer, pieces in (*outgoing.items(), *incoming.items())
        ):
            extents = [[extent(piece, address_of(piece)) for _, piece in pieces] for pieces in (sends, receives)]
            stay_out, stay_in = _apart(sends, *extents), _apart(receives, *extents[::-1])
        self._is_plain, self._empty = is_plain, empty
        self.sent: dict[int, Any] = {}
        self.received: dict[int, Any] = {}
        self.packed: list[tuple[Any, Any]] = []
        slots = {}
        for peer, pieces in outgoing.items():
            if peer == rank:  # a rank's parts for itself are copied
                each = zip(pieces, stay_out.get(rank, repeat(False)))
                filled = [piece if stays else empty(piece.shape, piece.dtype) for piece, stays in each]
                slots[rank] = iter(filled)
            else:
                self.sent[peer], filled = self._message(pieces, peer in stay_out and stay_out[peer][0])
            self.packed += [(slot, piece) for slot, piece in zip(filled, pieces) if slot is not piece]
        for peer, pieces in incoming.items():
            if peer != rank:
                self.received[peer], filled = self._message(pieces, not adds and peer in stay_in and stay_in[peer][0])
                slots[peer] = iter(filled)
        came = ((target, next(slots[peer])) for peer, target in receives)
        self.unpacked = [(target, source) for target, source in came if source is not target]

    def _message(self, pieces: list[Any], stays: bool) -> tuple[Any, list[Any]]:
        """Return a contiguous array for the values of `pieces`, and a view of it for each piece, of equal shape."""
        if stays and len(pieces) == 1 and self._is_plain and self._is_plain(pieces[0]):
            return pieces[0], pieces
        starts, end = places(pieces)
        buffer = self._empty((end,), np.dtype(np.uint8))
        parts = [buffer[start : start + piece.nbytes] for start, piece in zip(starts, pieces)]
        return buffer, [part.view(piece.dtype).reshape(piece.shape) for part, piece in zip(parts, pieces)]


def by_peer(pieces: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Group the parts of arrays by rank, in order."""
    found: dict[int, list[T]] = {}
    for peer, piece in pieces:
        found.setdefault(peer, []).append(piece)
    return found


def places(pieces: list[Any]) -> tuple[list[int], int]:
    """Return the offset of each of `pieces` in a message, and the bytes of the message."""
    starts, end = [], 0
    for piece in pieces:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + piece.nbytes
    return starts, end


def _apart(pieces: Pieces, own: list[Extent], others: list[Extent]) -> dict[int, list[bool]]:
    """Return for the parts of each rank whether they share no memory with `others`, and need no copy."""
    return by_peer((peer, not is_shared) for (peer, _), is_shared in zip(pieces, overlapping(own, others)))


def by_messages(backend: Backend, sends: Pieces, receives: Pieces, adds: bool) -> Work | None:
    """Do `Backend.exchange` by the backend's sends and receives; copy a rank's parts for itself."""
    me, tag = backend.rank, backend.exchange_tag
    unaliased = all_unaliased([piece for _, piece in sends], [piece for _, piece in receives])
    sent = [(peer, piece) for (peer, _), piece in zip(sends, unaliased)]
    own = iter([piece for peer, piece in sent if peer == me])
    came: list[Any] = [next(own) if peer == me else np.empty_like(piece) if adds else piece for peer, piece in receives]
    pairs = [(peer, piece, each) for (peer, piece), each in zip(receives, came)]
    with backend.batch([each for peer, each in [*zip((peer for peer, _ in receives), came), *sent] if peer != me]):
        works = [backend.recv(each, peer, tag, True) for peer, _, each in pairs if peer != me]
        works += [backend.send(piece, peer, tag, True) for peer, piece in sent if peer != me]
    joined = JoinedWork([work for work in works if isinstance(work, Work)])
    if adds:
        joined.finish_with(Once(*(partial(np.add, piece, each, piece) for _, piece, each in pairs)))
    else:
        joined.finish_with(Once(*(partial(setitem, piece, ..., each) for peer, piece, each in pairs if peer == me)))
    return joined
