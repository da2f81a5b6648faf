"""Large parts of arrays in a persistent exchange, copied directly from one rank's array to another's.

Memory of `empty_shared` is mapped on all ranks of the node. Other memory is read and written run by run, by the system
calls that copy between processes, if the kernel permits them (`process_memory.py`) and the runs are long. Either of the
two ranks may copy a part, so each must be able to access the other's array.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..core.overlap import address_of, extent
from ..process.tuning import Tuning
from .process_memory import can_access, processes_of
from .shared_memory import Place, mapped, names, place_of

MAPPED_BYTES = 64
RUN_BYTES = 8 << 10  # of another process's memory; shorter runs are packed: each run costs time in the system call
MAPPED_RUN_BYTES = 256  # of mapped memory; shorter runs share cache lines with cells that their owner writes
HARD = 1000  # the most work for NumPy to find out whether two arrays share memory

PartsOf = Mapping[int, Sequence[Any]]  # of arrays, by the rank of the node that they go to or come from


class Location(NamedTuple):
    """The place of a part in the memory of its rank."""

    strides: tuple[int, ...]
    address: int  # in that process
    is_reachable: bool  # by the kernel's system calls
    place: Place | None  # in a node-shared array


class Copy(NamedTuple):
    """The other end of a part that is not packed."""

    strides: tuple[int, ...]
    address: int
    pid: int  # of the process in which that is an address; 0: this one

    def of(self, piece: Any) -> Any:
        """Return the description for `native/_pieces.pyx`."""
        return address_of(piece), piece.shape, piece.itemsize, piece.strides, *self


Copies = dict[int, dict[int, Copy]]  # by the rank of the node, and the number of the part among those for that rank


class DirectCopies:
    """The agreement of a node's ranks about copies between their arrays."""

    def __init__(self, node: MPI.Intracomm, tuning: Tuning) -> None:
        self._node = node
        self._least = tuning.direct_bytes
        self._pids: list[int] | None = None  # None: not known yet; []: the kernel refuses
        self._windows: list[frozenset[bytes]] = []  # of node-shared arrays, which each rank has mapped

    def agree(
        self, outgoing: PartsOf, incoming: PartsOf, sent: Sequence[Any], received: Sequence[Any]
    ) -> tuple[Copies, Copies]:
        """Return the outgoing and the incoming parts that are copied directly; every rank of the node calls it.

        Other ranks access these arrays at any time: outgoing parts must not overlap `received`, and incoming parts must
        not overlap `sent`, on this node or on others.
        """
        offers = {
            peer: {
                number: self._location(piece)
                for number, piece in enumerate(pieces)
                if self._is_large(piece) and _is_apart(piece, received)
            }
            for peer, pieces in outgoing.items()
        }
        offered = self._all_gathered(offers)
        if not any(offered):
            return {}, {}
        self._windows = self._node.allgather(names())
        if self._pids is None:
            self._pids = processes_of(self._node)
        come: Copies = {}
        answers: dict[int, dict[int, Location]] = {}
        for peer, pieces in incoming.items():
            come[peer], answers[peer] = {}, {}
            for number, offer in offered[peer].get(self._node.rank, {}).items():
                answer = self._location(pieces[number])
                copy = self._copy(peer, pieces[number], answer, offer)
                if copy is not None and _is_apart(pieces[number], sent):
                    come[peer][number], answers[peer][number] = copy, answer
        answered = self._all_gathered(answers)
        gone: Copies = {}
        for peer in outgoing:
            taken = answered[peer].get(self._node.rank, {})
            gone[peer] = {number: self._there(peer, answer) for number, answer in taken.items()}
        return gone, come

    def _all_gathered(self, parts: dict[int, dict[int, Location]]) -> list[dict[int, dict[int, Location]]]:
        return self._node.allgather({peer: each for peer, each in parts.items() if each})

    def _is_large(self, piece: Any) -> bool:
        return bool(piece.nbytes >= (self._least if place_of(piece) is None else MAPPED_BYTES))

    def _location(self, piece: Any) -> Location:
        start, end = extent(piece, address_of(piece))
        is_reachable = all(can_access(os.getpid(), each, 1, piece.flags.writeable) for each in (start, end - 1))
        return Location(piece.strides, address_of(piece), is_reachable, place_of(piece))

    def _copy(self, peer: int, target: Any, answer: Location, offer: Location) -> Copy | None:
        """Return the copy that fills `target` from the offered part; None: the part has to be packed."""
        from ..native._pieces import walk

        run, _ = walk(target.shape, target.itemsize, target.strides, offer.strides)
        if self._is_mapped(self._node.rank, peer, offer) and self._is_mapped(peer, self._node.rank, answer):
            is_worth_it = run >= MAPPED_RUN_BYTES
        else:
            is_worth_it = run >= RUN_BYTES and bool(self._pids) and answer.is_reachable and offer.is_reachable
        return self._there(peer, offer) if is_worth_it else None

    def _is_mapped(self, by: int, owner: int, location: Location) -> bool:
        return by == owner or (location.place is not None and location.place[0] in self._windows[by])

    def _there(self, peer: int, location: Location) -> Copy:
        """Return the copy by which this process accesses a part of rank `peer`."""
        if not self._is_mapped(self._node.rank, peer, location):
            assert self._pids
            return Copy(location.strides, location.address, self._pids[peer])
        if peer == self._node.rank:
            return Copy(location.strides, location.address, 0)
        assert location.place is not None
        return Copy(location.strides, mapped(location.place), 0)


def _is_apart(piece: Any, others: Sequence[Any]) -> bool:
    """Return whether a part has no cell in common with others; False if that is hard to find out."""
    try:
        return not any(np.shares_memory(piece, other, max_work=HARD) for other in others)  # type: ignore[arg-type]
    except RuntimeError:  # NumPy's TooHardError
        return False
