"""hpccomm on node-shared arrays (`hpccomm.empty_shared`), for which some operations are faster on one node."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Benchmark, Case
from .contender import Unsupported
from .hpccomm_calls import HPCComm

if TYPE_CHECKING:
    from mpi4py import MPI

FASTER = ("all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


class Shared(HPCComm):
    """The functions of hpccomm, on node-shared arrays."""

    name = "shared"
    own_arrays = True

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        self._parent = group

    def arrays(self, benchmark: Benchmark, case: Case) -> Arrays:
        """Return arrays in a group of their own: their memory is freed with their group."""
        if benchmark.name not in FASTER:
            raise Unsupported(f"{benchmark.name} is the same on node-shared arrays")
        group: Any = hc.split_group(self._parent, 0)
        self.group = group
        return benchmark.arrays(replace(case, allocate=partial(hc.empty_shared, group=group)))

    def release(self) -> None:
        if self.group is not self._parent:
            hc.destroy_process_group(self.group)
            self.group = self._parent
