"""Persistent exchanges within a node: packed into memory that both ranks see, and unpacked from it, without messages.

The protocol is that of `native/pieces.h`; ranks of other nodes get messages, in the same operation. Each exchange has
a window of its own, in which a rank's part holds what it sends: for each rank of the node a flag and two slots. Windows
of exchanges that all ranks of the node have freed are given back when the next one is set up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.backend import Pieces
from ..core.calls import Call
from ..core.door import Door
from ..core.overlap import address_of
from ..core.persistent_work import PersistentWork
from ..core.work import Once
from ..job.mpi_library import private, release
from ..native import room
from .exchange import by_peer, places, set_up
from .persistent import MPIPersistentWork
from .shared_memory import Window, free_bytes, why_no_room

LINE_BYTES = 64
LOOKS = 2000  # at the flags, before other processes get the core, and MPI makes progress
LOOKS_OF_MANY = 20  # likewise, where there are more ranks than cores

sched_yield = getattr(os, "sched_yield", partial(time.sleep, 1e-6))


class NodeExchange(PersistentWork):
    """An exchange with the ranks of this node, and by `rest` with others."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        looks: int,
        pieces: Any,
        adds: tuple[Once, Once] | None,
        rest: MPIPersistentWork | None,
        alive: Any,
    ) -> None:
        self._comm = comm
        self._pieces = pieces
        self._looks = looks
        self._adds = adds
        self._rest = rest
        self._alive = alive

    def belong_to(self, door: Door, call: Call, number: int) -> None:
        """As PersistentWork."""
        super().belong_to(door, call, number)
        first = self.call.arguments[0]
        first = first[0] if isinstance(first, list) else first
        self._shown = self.call.name, first.dtype, first.nbytes  # in reports

    # As of persistent all_reduces: of a microsecond, one call more from `start` to `begin` takes a twentieth.

    def start(self) -> None:
        """Start as PersistentWork does, without the door while the fast path is open."""
        if self.is_active or self._freed:
            self.refuse_to_start()
        door: Any = self.door
        fast = door.fast
        if not fast.is_open or door.hooks or door.check is not None:
            super().start()
            return
        fast.count += 1
        door.recent.append((door.collectives + fast.count, *self._shown))
        self.begin()
        self.is_active = True

    def begin(self) -> None:
        """Pack, show that to the ranks of the node, and send to the others."""
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
        except MPI.Exception as error:
            self.fail(error)
        self.is_active = False
        if self.operation is not None:
            self._ended(None)
        return True

    def block(self) -> None:
        """Wait until all have begun, and for those of other nodes; unpack."""
        while not self._pieces.has_come(self._looks):
            self._comm.Iprobe()  # MPI makes progress, and tells of dead ranks
            sched_yield()
        if self._rest is not None:  # first, as in `poll`: sums have one order
            self._rest.block()
        self._unpack()

    def poll(self) -> bool:
        """Unpack if all have begun; return whether they have."""
        if not self._pieces.has_come(1):
            self._comm.Iprobe()
            return False
        if self._rest is not None and not self._rest.poll():  # which unpacks its own
            return False
        self._unpack()
        return True

    def _unpack(self) -> None:
        if self._adds is None:
            self._pieces.unpack()
        else:
            self._adds[self._pieces.number & 1]()

    def release(self) -> None:
        """Let the memory go."""
        self._pieces = self._adds = self._alive = None
        if self._rest is not None:
            self._rest.release()
            self._rest = None  # this is called again when the group is destroyed


class NodeExchanges:
    """The exchanges of one group, and their windows."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from .compiled import cores_of

        self._comm = comm
        self._node = private(comm.Split_type(MPI.COMM_TYPE_SHARED), comm)
        self._ranks = {rank: number for number, rank in enumerate(self._node.allgather(comm.Get_rank()))}
        self._looks = LOOKS if self._node.size <= cores_of(self._node) else LOOKS_OF_MANY
        self._windows: dict[int, tuple[Window, NodeExchange]] = {}
        self._made = 0

    def set_up(self, sends: Pieces, receives: Pieces, adds: bool) -> PersistentWork:
        """Return an exchange; every rank of the group calls it."""
        outgoing, incoming = (
            by_peer(each for each in pieces if each[0] in self._ranks) for pieces in (sends, receives)
        )
        starts, end = {}, 0  # of the flag for each rank, in this rank's part
        for peer in sorted(outgoing.keys() | incoming.keys()):
            starts[peer] = end
            end += LINE_BYTES + 2 * _slot_bytes(outgoing.get(peer, []))
        freed = {number for number, (_, work) in self._windows.items() if work._freed}
        told = self._node.allgather((starts, end, freed))
        for number in sorted(set.intersection(*(each for _, _, each in told))):
            self._windows.pop(number)[0].free()
        needed = sum(each for _, each, _ in told)
        if not needed or not self._has_room(needed):
            return set_up(self._comm, sends, receives, adds)
        window = Window(self._node, end)
        window.parts[self._node.rank][:] = 0
        self._node.Barrier()
        others = [[each for each in pieces if each[0] not in self._ranks] for pieces in (sends, receives)]
        rest = set_up(self._comm, others[0], others[1], adds) if others[0] or others[1] else None
        work = self._made_in(window, outgoing, receives, [each for each, _, _ in told], adds, rest)
        self._windows[self._made] = window, work
        self._made += 1
        return work

    def _made_in(
        self,
        window: Window,
        outgoing: dict[int, list[Any]],
        receives: Pieces,
        starts: list[dict[int, int]],
        adds: bool,
        rest: MPIPersistentWork | None,
    ) -> NodeExchange:
        """Return the exchange in a window, where each rank has the flags for others at its `starts`."""
        from ..native._pieces import Pieces as Compiled

        me, own = self._comm.Get_rank(), window.parts[self._node.rank]
        sent = []
        for peer, pieces in outgoing.items():
            slots = _slots(own, starts[self._node.rank][peer], pieces)
            sent += [_described(piece, *each) for piece, each in zip(pieces, slots)]
        incoming = by_peer(each for each in receives if each[0] in self._ranks)
        slots_of = {
            peer: iter(_slots(window.parts[self._ranks[peer]], starts[self._ranks[peer]][me], pieces))
            for peer, pieces in incoming.items()
        }
        pairs = [(piece, next(slots_of[peer])) for peer, piece in receives if peer in self._ranks]
        sums = None
        if adds:
            steps: list[list[Callable[[], Any]]] = [
                [partial(np.add, piece, each[number], piece) for piece, each in pairs] for number in (0, 1)
            ]
            sums = Once(*steps[0]), Once(*steps[1])
        received = [] if adds else [_described(piece, *each) for piece, each in pairs]
        partners = starts[self._node.rank]
        mine = [address_of(own) + start for start in partners.values()]
        theirs = [address_of(window.parts[self._ranks[peer]]) + starts[self._ranks[peer]][me] for peer in partners]
        compiled = Compiled(sent, received, mine, theirs)
        return NodeExchange(self._comm, self._looks, compiled, sums, rest, (outgoing, receives))

    def _has_room(self, nbytes: int) -> bool:
        """Return whether there is memory for another window; the answer is the same on all ranks of the node."""
        free = free_bytes()  # which others need too
        has_room = free is None or (2 * nbytes <= free and not why_no_room(nbytes))
        return bool(self._node.allreduce(has_room, MPI.LAND))

    def close(self) -> None:
        """Free the windows; called once, by every rank, when the group is destroyed."""
        for window, work in self._windows.values():
            work.release()
            window.free()
        release(self._node)


def _slot_bytes(pieces: list[Any]) -> int:
    return -(-places(pieces)[1] // LINE_BYTES) * LINE_BYTES


def _slots(part: Any, start: int, pieces: list[Any]) -> list[tuple[Any, Any]]:
    """Return for each of the pieces that a rank sends to another where it is in the two sets, in its shape."""
    found = []
    offsets, _ = places(pieces)
    for offset, piece in zip(offsets, pieces):
        both = []
        for number in (0, 1):
            at = start + LINE_BYTES + number * _slot_bytes(pieces) + offset
            both.append(part[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape))
        found.append((both[0], both[1]))
    return found


def _described(piece: Any, *slots: Any) -> Any:
    addresses = tuple(map(address_of, slots))
    return address_of(piece), piece.shape, piece.strides, piece.itemsize, addresses


def is_compiled() -> bool:
    """Return whether this process has what it takes."""
    if room is None:
        return False
    try:
        import hpccomm.native._pieces  # noqa: F401
    except ImportError:
        return False
    return True
