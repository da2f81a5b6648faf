"""Tags: which ones programs may use, and which are hpccomm's own."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

_upper_bound: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI has it on no other communicator

MONITORED_BARRIER: int = _upper_bound
PAIRWISE: int = _upper_bound - 1
LARGEST: int = _upper_bound - 2
