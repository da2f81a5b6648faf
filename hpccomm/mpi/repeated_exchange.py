"""Blocking exchanges that a program repeats: what is packed, sent and unpacked is worked out once.

Parts of arrays at the same addresses, of the same shapes, strides and dtypes, are the same exchange again. Nothing of
the program's is kept: a part that stays in its place is sent from the address at which the array of the call has it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..core.backend import Pieces
from ..core.overlap import address_of
from ..core.pieces import Messages
from ..job import failures
from ..job.tags import EXCHANGE
from .datatypes import message
from .layout import is_plain
from .works import check_length

Key: TypeAlias = tuple[Any, ...]

MOST = 8  # of a group: the last ones
MOST_BYTES = 512 << 10  # that go and come; beside larger copies the rest is little, and their memory would be kept


class RepeatedExchanges:
    """The blocking exchanges of one group that were done more than once."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._done_once: dict[Key, None] = {}
        self._plans: dict[Key, RepeatedExchange] = {}

    def run(self, sends: Pieces, receives: Pieces, adds: bool) -> bool:
        """Do an exchange and return True; or return False, without having done anything, if it is a new one."""
        both = *sends, *receives
        if sum(part.nbytes for _, part in both) > MOST_BYTES:
            return False
        key = len(sends), adds, *[(peer, address_of(part), part.shape, part.strides, part.dtype) for peer, part in both]
        plan = self._plans.pop(key, None)
        if plan is None:
            if key not in self._done_once:
                _put(self._done_once, key, None)
                return False
            plan = RepeatedExchange(self._comm, sends, receives, adds)
        try:
            plan.run(sends, receives)
        except BaseException:
            failures.kept.append(plan)  # MPI may still write to its memory
            raise
        if (oldest := _put(self._plans, key, plan)) is not None:
            oldest.free()
        return True

    def close(self) -> None:
        """Free the requests."""
        for plan in self._plans.values():
            plan.free()


class RepeatedExchange:
    """One exchange, on persistent requests; they match the messages of ranks that do it for the first time."""

    def __init__(self, comm: MPI.Intracomm, sends: Pieces, receives: Pieces, adds: bool) -> None:
        messages = Messages(comm.Get_rank(), sends, receives, adds, address_of, is_plain, np.empty)
        sent, received = ({id(part): i for i, (_, part) in enumerate(parts)} for parts in (sends, receives))
        self._adds = adds
        self._packs = [(slot, sent[id(part)]) for slot, part in messages.packed]
        self._unpacks = [
            (received[id(part)], None, sent[id(source)]) if id(source) in sent else (received[id(part)], source, -1)
            for part, source in messages.unpacked
        ]
        self._requests = [comm.Recv_init(_unowned(each), peer, EXCHANGE) for peer, each in messages.received.items()]
        self._requests += [comm.Send_init(_unowned(each), peer, EXCHANGE) for peer, each in messages.sent.items()]
        self._sizes = [each.nbytes for each in messages.received.values()]
        self._statuses = [MPI.Status() for _ in self._requests]

    def run(self, sends: Pieces, receives: Pieces) -> None:
        """Do the exchange with the parts of this call."""
        for slot, i in self._packs:
            slot[...] = sends[i][1]
        MPI.Prequest.Startall(self._requests)
        MPI.Request.Waitall(self._requests, self._statuses)
        for status, nbytes in zip(self._statuses, self._sizes):
            check_length("", status, nbytes)
        for i, slot, own in self._unpacks:
            part, source = receives[i][1], sends[own][1] if slot is None else slot
            if self._adds:
                np.add(part, source, part)
            else:
                part[...] = source

    def free(self) -> None:
        """Free the requests."""
        for request in self._requests:
            request.Free()


def _put(kept: dict[Key, Any], key: Key, value: Any) -> Any:
    """Keep a value as the last one; return the one that has to make room for it."""
    kept[key] = value
    return kept.pop(next(iter(kept))) if len(kept) > MOST else None


def _unowned(array: Any) -> Any:
    """Return the mpi4py buffer of a contiguous array's memory, which does not keep the array."""
    return MPI.buffer.fromaddress(address_of(array), array.nbytes), message(array)[1]
