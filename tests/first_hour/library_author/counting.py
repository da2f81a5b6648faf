"""A package with a backend of its own: MPI's, and it counts what it reduces."""

from __future__ import annotations

from typing import Any

import hpccomm as hc


class Counting(hc.Backend):
    """It has all_reduce and barrier, and hands them to MPI."""

    name = "counting"

    def __init__(self, options: hc.BackendOptions) -> None:
        super().__init__(options.rank, options.size)
        self.comm = options.comm
        self.reduced_bytes = 0

    def all_reduce(self, array: Any, op: hc.ReduceOp, async_op: bool) -> hc.Work | None:
        """Add to the count."""
        from mpi4py import MPI

        self.reduced_bytes += array.nbytes
        self.comm.Allreduce(MPI.IN_PLACE, array)
        return hc.CompletedWork() if async_op else None

    def barrier(self, async_op: bool) -> hc.Work | None:
        """Wait for the others."""
        self.comm.Barrier()
        return hc.CompletedWork() if async_op else None


def create(options: hc.BackendOptions, _: Any) -> Counting:
    """Make one, for hpccomm."""
    return Counting(options)
