"""hpccomm on GPU arrays: over NCCL, and over MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ...cuda import seam
from .. import gpu
from ..registry import Arrays, Case
from .contender import Call, Unsupported, idle
from .hpccomm_calls import HPCComm, InAnotherGroup, batch

if TYPE_CHECKING:
    from mpi4py import MPI


class OverNCCL(HPCComm):
    """The functions of hpccomm; messages that cross each other go in one group of NCCL's."""

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        try:
            hc.all_reduce(gpu.empty((1,), "float32"), group=self._group)  # connects
        except hc.DistBackendError as error:
            raise Unsupported(str(error)) from error

    @classmethod
    def missing(cls) -> str | None:
        try:
            seam.nccl()
        except ImportError as error:
            return str(error)
        return None

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if not async_op:
            return super().sendrecv(case, arrays, async_op)
        return batch([self.receiver(arrays.receive, case.left, True), self.sender(arrays.send, case.right, True)])

    def bidirectional(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of one batch: on a stream, a receive behind an unmatched send would wait for ever."""
        if case.peer is None:
            return idle
        starts: list[Any] = [self.receiver(array, case.peer, True) for array in arrays.receive]
        return batch(starts + [self.sender(arrays.send, case.peer, True)] * case.window)


class OverMPI(InAnotherGroup):
    """The functions of hpccomm, in a group whose GPU arrays go over MPI."""

    name = "cuda:mpi"
    configuration = "cpu:mpi,cuda:mpi"
