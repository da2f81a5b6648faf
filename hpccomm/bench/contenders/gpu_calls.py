"""hpccomm on GPU arrays, over NCCL and over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import hpccomm as hc

from ...cuda import seam
from .. import gpu
from .contender import Call, Unsupported
from .hpccomm_calls import HPCComm, InAnotherGroup, batch

if TYPE_CHECKING:
    from mpi4py import MPI


class OverNCCL(HPCComm):
    """The functions of hpccomm; messages in both directions go in one NCCL group."""

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

    def together(self, starts: Sequence[Call]) -> Call:
        """Return a call of one batch, because on a stream a receive after an unmatched send would wait forever."""
        return batch(starts)


class OverMPI(InAnotherGroup):
    """The functions of hpccomm, in a group whose GPU arrays go over MPI."""

    name = "cuda:mpi"
    configuration = "cpu:mpi,cuda:mpi"
