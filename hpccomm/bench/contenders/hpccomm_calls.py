"""hpccomm, called as in a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Case
from .contender import Call
from .torch_model import MEASURED, TorchModel, operation

if TYPE_CHECKING:
    from mpi4py import MPI


class HPCComm(TorchModel):
    """The functions of hpccomm: those of torch.distributed's model, and more."""

    name = "hpccomm"
    library = hc

    def wait_all(self, handles: Iterable[Any]) -> None:
        hc.wait_all(list(handles))

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if async_op:
            return super().sendrecv(case, arrays, async_op)
        right, left = self._rank(case.right), self._rank(case.left)
        return partial(hc.sendrecv, arrays.send, right, arrays.receive, left, self._group)

    @property
    def _group(self) -> hc.ProcessGroup | None:
        return None if self.group is hc.GroupMember.WORLD else self.group

    def _rank(self, rank: int) -> int:
        return self.group.ranks[rank]


for _name in MEASURED:
    setattr(HPCComm, _name, operation(_name))


class InAnotherGroup(HPCComm):
    """The functions of hpccomm in a new group of the same ranks, usually with other backends."""

    configuration: str | None = None  # None: the world's

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        made: Any = hc.new_group(group.ranks, backend=self.configuration, use_local_synchronization=True)
        super().__init__(made, comm)

    def close(self) -> None:
        hc.destroy_process_group(self.group)


def batch(starts: Sequence[Any]) -> Call:
    """Return a call of batch_isend_irecv with the isends and irecvs of `starts`; their list is made only once."""
    operations = [hc.P2POp(start.func, *start.args) for start in starts]

    def call() -> None:
        hc.wait_all(hc.batch_isend_irecv(operations))

    return call
