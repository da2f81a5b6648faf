"""hpccomm, called as a program calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Case
from .contender import Call
from .torch_model import TorchModel

if TYPE_CHECKING:
    from mpi4py import MPI


class HPCComm(TorchModel):
    """The functions of hpccomm: those of the model, and more."""

    name = "hpccomm"
    library = hc

    def scan(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.scan, arrays.receive, self._op(case), self._group, async_op)

    def exscan(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.exscan, arrays.receive, self._op(case), self._group, async_op)

    def all_reduce_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(hc.all_reduce_coalesced, arrays.receive, self._op(case), self._group, async_op)

    def broadcast_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """From the root."""
        return partial(hc.broadcast_coalesced, arrays.receive, self._rank(case.root), self._group, async_op)

    def all_gather_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Each array into one of its own."""
        return partial(hc.all_gather_single_coalesced, arrays.receive, arrays.send, self._group, async_op)

    def all_gather_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """All arrays into one list for each rank."""
        received, count = arrays.receive, len(arrays.send)
        lists = [received[start : start + count] for start in range(0, len(received), count)]
        return partial(hc.all_gather_coalesced, lists, arrays.send, self._group, async_op)

    def reduce_scatter_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Each array into one of its own."""
        operation, op = hc.reduce_scatter_single_coalesced, self._op(case)
        return partial(operation, arrays.receive, arrays.send, op, self._group, async_op)

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """To the right, from the left."""
        if async_op:
            return super().sendrecv(case, arrays, async_op)
        right, left = self._rank(case.right), self._rank(case.left)
        return partial(hc.sendrecv, arrays.send, right, arrays.receive, left, self._group)

    @property
    def _group(self) -> hc.ProcessGroup | None:
        return None if self.group is hc.GroupMember.WORLD else self.group

    def _rank(self, rank: int) -> int:
        return self.group.ranks[rank]


class InAnotherGroup(HPCComm):
    """The functions of hpccomm, in a group of the same ranks with other backends, which it makes."""

    configuration = ""

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        made: Any = hc.new_group(group.ranks, backend=self.configuration, use_local_synchronization=True)
        super().__init__(made, comm)

    def close(self) -> None:
        """Destroy the group."""
        hc.destroy_process_group(self.group)


def batch(starts: Sequence[Any]) -> Call:
    """Return a call of batch_isend_irecv, of calls of isend and irecv; the list is made once."""
    operations = [hc.P2POp(start.func, *start.args) for start in starts]

    def call() -> None:
        for work in hc.batch_isend_irecv(operations):
            work.wait()

    return call
