"""hpccomm, in a group whose reductions are in rank order (``cpu:ordered``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Unsupported
from .hpccomm_calls import HPCComm

if TYPE_CHECKING:
    from mpi4py import MPI


class Ordered(HPCComm):
    """The functions of hpccomm that reduce."""

    name = "ordered"

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        made: Any = hc.new_group(group.ranks, backend="cpu:ordered", use_local_synchronization=True)
        super().__init__(made, comm)

    def close(self) -> None:
        """Destroy the group."""
        hc.destroy_process_group(self.group)

    def _call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if not benchmark.reduces:
            raise Unsupported(f"{benchmark.name} reduces nothing: it is the same")
        return super()._call(benchmark, case, arrays, async_op)
