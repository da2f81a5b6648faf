"""hpccomm, called as a program calls it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import hpccomm as hc

from ..registry import Arrays, Case
from .contender import Call, Contender


class HPCComm(Contender):
    """The functions of hpccomm."""

    name = "hpccomm"

    def wait(self, handle: hc.Work) -> Any:
        """Wait for a Work."""
        return handle.wait()

    def poll(self, handle: hc.Work) -> bool:
        """Whether a Work is done."""
        return handle.is_completed()

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of send or isend."""
        return partial(hc.isend if async_op else hc.send, array, *self._peer(peer))

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of recv or irecv."""
        return partial(hc.irecv if async_op else hc.recv, array, *self._peer(peer))

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.all_reduce, arrays.receive, self._op(case), self._group, async_op)

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place on the root."""
        return partial(hc.reduce, arrays.receive, self._root(case), self._op(case), self._group, async_op)

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """From the root."""
        return partial(hc.broadcast, arrays.receive, self._root(case), self._group, async_op)

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into one."""
        return partial(hc.all_gather_single, arrays.receive, arrays.send, self._group, async_op)

    def all_gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into a list of rows."""
        return partial(hc.all_gather, list(arrays.receive), arrays.send, self._group, async_op)

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into one."""
        return partial(hc.reduce_scatter_single, arrays.receive, arrays.send, self._op(case), self._group, async_op)

    def reduce_scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows into one array."""
        return partial(hc.reduce_scatter, arrays.receive, list(arrays.send), self._op(case), self._group, async_op)

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into one, equal parts."""
        return partial(hc.all_to_all_single, arrays.receive, arrays.send, None, None, self._group, async_op)

    def all_to_all(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows into another."""
        return partial(hc.all_to_all, list(arrays.receive), list(arrays.send), self._group, async_op)

    def gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into a list of rows on the root."""
        rows = None if arrays.receive is None else list(arrays.receive)
        return partial(hc.gather, arrays.send, rows, self._root(case), self._group, async_op)

    def scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows on the root into one array."""
        rows = list(arrays.send) if case.rank == case.root else None
        return partial(hc.scatter, arrays.receive, rows, self._root(case), self._group, async_op)

    def scan(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.scan, arrays.receive, self._op(case), self._group, async_op)

    def exscan(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.exscan, arrays.receive, self._op(case), self._group, async_op)

    def barrier(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Without arrays."""
        return partial(hc.barrier, self._group, async_op)

    def all_reduce_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.all_reduce_coalesced, arrays.receive, self._op(case), self._group, async_op)

    def broadcast_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """From the root."""
        return partial(hc.broadcast_coalesced, arrays.receive, self._root(case), self._group, async_op)

    def all_gather_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Each array into one of its own."""
        return partial(hc.all_gather_single_coalesced, arrays.receive, arrays.send, self._group, async_op)

    def all_gather_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """All arrays into one list for each rank."""
        return partial(
            hc.all_gather_coalesced, list(_rows(arrays.receive, len(arrays.send))), arrays.send, self._group, async_op
        )

    def reduce_scatter_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Each array into one of its own."""
        return partial(
            hc.reduce_scatter_single_coalesced, arrays.receive, arrays.send, self._op(case), self._group, async_op
        )

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """To the right, from the left."""
        right, left = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
        if async_op:
            send, receive = self.sender(arrays.send, right, True), self.receiver(arrays.receive, left, True)
            return lambda: self.wait_all([receive(), send()])
        ranks = self.group.ranks
        return partial(hc.sendrecv, arrays.send, ranks[right], arrays.receive, ranks[left], self._group)

    @property
    def _group(self) -> hc.ProcessGroup | None:
        """What a program passes as `group`: nothing for the world."""
        return None if self.group is hc.GroupMember.WORLD else self.group

    def _peer(self, peer: int) -> tuple[Any, ...]:
        return (self.group.ranks[peer],) if self._group is None else (self.group.ranks[peer], self._group)

    def _root(self, case: Case) -> int:
        return self.group.ranks[case.root]

    def _op(self, case: Case) -> Any:
        return getattr(hc.ReduceOp, case.op.upper())


def _rows(arrays: list[Any], length: int) -> Iterator[list[Any]]:
    for start in range(0, len(arrays), length):
        yield arrays[start : start + length]
