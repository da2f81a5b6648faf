"""Persistent exchanges within a node, without messages: through shared memory, or directly from array to array.

`native/pieces.h` describes the protocol; ranks of other nodes get messages, in the same operation. Each exchange has
its own window. A rank's part of it holds flags and two slots for each rank of the node to which it sends or from which
it receives. When an exchange is set up, windows of exchanges that all ranks of the node have released are freed. Large
parts are not packed: one of the two ranks copies them from array to array (`direct.py`).
"""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.backend import Pieces
from ..core.calls import Call
from ..core.dispatcher import Dispatcher
from ..core.overlap import address_of
from ..core.persistent_work import PersistentWork
from ..core.pieces import by_peer, places
from ..core.work import Once
from ..errors import DistBackendError, on_rank
from ..job.mpi_library import release
from ..native import fastpath
from ..process.tuning import Tuning
from .direct import Copies, DirectCopies
from .exchange import set_up
from .persistent import MPIPersistentWork
from .shared_memory import Window, has_room_to_spare, on_all, split_by_node

LINE_BYTES = 64

sched_yield = getattr(os, "sched_yield", partial(time.sleep, 1e-6))


class NodeExchange(PersistentWork):
    """An exchange with the ranks of this node, and through `rest` with other ranks."""

    _ended_turn = 0

    def __init__(
        self,
        comm: MPI.Intracomm,
        patience: tuple[int, int],
        pieces: Any,
        adds: tuple[Once, Once] | None,
        rest: MPIPersistentWork | None,
        alive: Any,
    ) -> None:
        self._comm = comm
        self._pieces = pieces
        self._looks, self._yields = patience
        self._adds = adds
        self._rest = rest
        self._alive = alive

    def belong_to(self, dispatcher: Dispatcher, call: Call, number: int) -> None:
        """Belong to a dispatcher as PersistentWork does."""
        super().belong_to(dispatcher, call, number)
        first = self.call.arguments[0]
        first = first[0] if isinstance(first, list) else first
        self._shown = self.call.name, first.dtype, first.nbytes  # in reports

    # As in persistent all_reduces, `start` calls `begin` itself: one more call would add a twentieth to a microsecond.

    def start(self) -> None:
        """Start as PersistentWork does, without the dispatcher while the fast path is open."""
        if self.is_active or self._freed:
            self.refuse_to_start()
        dispatcher: Any = self.dispatcher
        fast = dispatcher.fast
        if not fast.is_open or dispatcher.hooks or dispatcher.check is not None:
            super().start()
            return
        self.begin()
        self.is_active = True
        fast.count += 1
        dispatcher.recent.append((dispatcher.collectives + fast.count, *self._shown))

    def begin(self) -> None:
        """Pack, announce it to the ranks of the node, and send to the other ranks."""
        if self._pieces.number == self._ended_turn:  # not if a signal handler has raised in an earlier start
            self._pieces.start()
        if self._adds is not None:
            self._adds[self._pieces.number & 1].arm()
        if self._rest is not None:
            self._rest.begin()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait as PersistentWork does."""
        if timeout is not None or self._timeout is not None or not self.is_active:
            return super().wait(timeout)
        try:
            self.block()
        except (MPI.Exception, DistBackendError) as error:
            self.fail(error)
        self.is_active = False
        if self.operation is not None:
            self._ended(None)
        return True

    def block(self) -> None:
        """Wait for the ranks of the node and for messages of other nodes; unpack."""
        yields = self._yields
        while not self._pieces.go_on(self._looks):
            self._comm.Iprobe()  # MPI makes progress and reports dead ranks
            if yields:
                sched_yield()
                yields -= 1
            else:
                self._pieces.sleep()
        if self._rest is not None:  # first, as in `poll`: sums have one order
            self._rest.block()
        self._unpack()

    def poll(self) -> bool:
        """Advance as far as possible now, and unpack at the end; return whether the exchange is complete."""
        if not self._pieces.go_on(1):
            self._comm.Iprobe()
            return False
        if self._rest is not None and not self._rest.poll():  # it unpacks its own messages
            return False
        self._unpack()
        return True

    def _unpack(self) -> None:
        self._ended_turn = self._pieces.number
        if self._adds is not None:
            self._adds[self._pieces.number & 1]()
        elif code := self._pieces.unpack():
            raise DistBackendError(
                f"copying between the memories of two ranks failed ({os.strerror(code)}); "
                f"HPCCOMM_TUNING with a large direct_bytes does without{on_rank()}"
            )

    def release(self) -> None:
        """Drop the memory."""
        self._pieces = self._adds = self._alive = None
        if self._rest is not None:
            self._rest.release()
            self._rest = None  # this is called again when the group is destroyed


class NodeExchanges:
    """The exchanges of one group, and their windows."""

    def __init__(self, comm: MPI.Intracomm, tuning: Tuning) -> None:
        from .compiled import patience

        self._comm = comm
        self._node = split_by_node(comm)
        self._ranks = {rank: number for number, rank in enumerate(self._node.allgather(comm.Get_rank()))}
        self._patience = patience(self._node)
        self._direct = DirectCopies(self._node, tuning)
        self._windows: dict[int, tuple[Window, weakref.ref[NodeExchange]]] = {}  # the dispatcher keeps active exchanges
        self._made = 0

    def set_up(self, sends: Pieces, receives: Pieces, adds: bool) -> PersistentWork:
        """Return an exchange; every rank of the group calls it."""
        from ..native._pieces import Pieces as Compiled

        outgoing, incoming = (
            by_peer((self._ranks[peer], piece) for peer, piece in pieces if peer in self._ranks)
            for pieces in (sends, receives)
        )
        all_sent, all_received = ([piece for _, piece in pieces] for pieces in (sends, receives))
        copies = ({}, {}) if adds else self._direct.agree(outgoing, incoming, all_sent, all_received)
        packed, gives = _parted(outgoing, copies[0])
        _, takes = _parted(incoming, copies[1])
        peers = sorted(outgoing.keys() | incoming.keys())
        starts, end = {}, LINE_BYTES if peers else 0  # of flags and slots for each rank, behind this rank's Sleepers
        for peer in peers:
            starts[peer] = end
            end += LINE_BYTES + 2 * _slot_bytes(packed.get(peer, []))
        freed = {number for number, (_, made) in self._windows.items() if (work := made()) is None or work._freed}
        told = self._node.allgather((starts, end, freed))
        for number in sorted(set.intersection(*(each for _, _, each in told))):
            self._windows.pop(number)[0].free()
        needed = sum(each for _, each, _ in told)
        if not needed or not on_all(self._node, has_room_to_spare(needed)):
            return set_up(self._comm, sends, receives, adds)
        window = Window(self._node, end)
        window.parts[self._node.rank][:] = 0
        self._node.Barrier()
        others = [[each for each in pieces if each[0] not in self._ranks] for pieces in (sends, receives)]
        rest = set_up(self._comm, others[0], others[1], adds) if others[0] or others[1] else None
        on_node = [(self._ranks[peer], piece) for peer, piece in receives if peer in self._ranks]
        side = _Side(window, self._node.rank, [each for each, _, _ in told])
        sleepers = [address_of(part) if self._patience[1] >= 0 else 0 for part in window.parts]
        unpacked = side.unpacked(on_node, copies[1])
        compiled = Compiled(
            side.packed(packed),
            [] if adds else [_described(piece, *slots) for piece, slots in unpacked],
            [(*side.flags(peer), sleepers[peer], gives.get(peer, []), takes.get(peer, [])) for peer in peers],
            sleepers[self._node.rank],
        )
        sums = (_sum(unpacked, 0), _sum(unpacked, 1)) if adds else None
        work = NodeExchange(self._comm, self._patience, compiled, sums, rest, (sends, receives))
        self._windows[self._made] = window, weakref.ref(work)
        self._made += 1
        return work

    def close(self) -> None:
        """Free the windows; called once, by every rank, when the group is destroyed."""
        for window, made in self._windows.values():
            if (work := made()) is not None:
                work.release()
            window.free()
        release(self._node)


class _Side:
    """One rank's side of an exchange in a window; `starts[r][s]`: offset, in r's part, of its flags and slots for s."""

    def __init__(self, window: Window, rank: int, starts: list[dict[int, int]]) -> None:
        self._parts, self._rank, self._starts = window.parts, rank, starts

    def flags(self, peer: int) -> tuple[int, int]:
        """Return the addresses of this rank's flags for another rank, and of that rank's flags for this one."""
        me = self._rank
        mine, theirs = (
            address_of(self._parts[owner]) + self._starts[owner][other] for owner, other in ((me, peer), (peer, me))
        )
        return mine, theirs

    def packed(self, outgoing: dict[int, list[Any]]) -> list[Any]:
        """Return the descriptions of the parts that are packed for other ranks."""
        return [
            _described(piece, *slots)
            for peer, pieces in outgoing.items()
            for piece, slots in zip(pieces, self._slots(self._rank, peer, pieces))
        ]

    def unpacked(self, receives: Pieces, copies: Copies) -> list[tuple[Any, tuple[Any, Any]]]:
        """Return the parts that arrive in slots, in the order of `receives`, each with its two slots."""
        packed, _ = _parted(by_peer(receives), copies)
        slots = {peer: iter(self._slots(peer, self._rank, pieces)) for peer, pieces in packed.items()}
        numbers = {peer: count() for peer in packed}
        return [
            (piece, next(slots[peer])) for peer, piece in receives if next(numbers[peer]) not in copies.get(peer, ())
        ]

    def _slots(self, owner: int, peer: int, pieces: list[Any]) -> list[tuple[Any, Any]]:
        """Return the two slots of each piece that a rank packs for another one, in the piece's shape."""
        found = []
        offsets, _ = places(pieces)
        for offset, piece in zip(offsets, pieces):
            both = []
            for number in (0, 1):
                at = self._starts[owner][peer] + LINE_BYTES + number * _slot_bytes(pieces) + offset
                part = self._parts[owner][at : at + piece.nbytes]
                both.append(part.view(piece.dtype).reshape(piece.shape))
            found.append((both[0], both[1]))
        return found


def _parted(parts: dict[int, list[Any]], copies: Copies) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    """Return, by rank, the parts that are packed, and the descriptions of the direct copies."""
    packed, copied = {}, {}
    for peer, pieces in parts.items():
        of_peer = copies.get(peer, {})
        packed[peer] = [piece for number, piece in enumerate(pieces) if number not in of_peer]
        copied[peer] = [copy.of(pieces[number]) for number, copy in of_peer.items()]
    return packed, copied


def _sum(unpacked: list[tuple[Any, tuple[Any, Any]]], turn: int) -> Once:
    return Once(*(partial(np.add, piece, slots[turn], piece) for piece, slots in unpacked))


def _slot_bytes(pieces: list[Any]) -> int:
    return -(-places(pieces)[1] // LINE_BYTES) * LINE_BYTES


def _described(piece: Any, *slots: Any) -> Any:
    addresses = tuple(map(address_of, slots))
    return address_of(piece), piece.shape, piece.itemsize, piece.strides, slots[0].strides, addresses


def is_compiled() -> bool:
    """Return whether this process has the compiled modules for it."""
    if fastpath is None:
        return False
    try:
        import hpccomm.native._pieces  # noqa: F401
    except ImportError:
        return False
    return True
