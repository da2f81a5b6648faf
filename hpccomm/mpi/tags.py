"""Tags: which ones programs may use, and which are hpccomm's own."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ..errors import here

_upper_bound: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI has it on no other communicator

MONITORED_BARRIER: int = _upper_bound
PAIRWISE: int = _upper_bound - 1
LARGEST: int = _upper_bound - 2


def checked(operation: str, argument: str, tag: int) -> int:
    """Return `tag`, if a program may use it."""
    if not 0 <= tag <= LARGEST:
        raise ValueError(f"{operation}: {argument} is {tag}; this MPI allows 0 to {LARGEST}{here()}")
    return tag
