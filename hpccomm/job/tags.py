"""Tags: the range for programs, and hpccomm's own."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

_upper_bound: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # only MPI.COMM_WORLD has it in Open MPI

MONITORED_BARRIER: int = _upper_bound
PAIRWISE: int = _upper_bound - 1
# For MPI_Comm_create_group: its tags are separate from those of messages (MPI-4.1 §7.4.2), but Open MPI 5.0 sends
# messages with them, which the program's receives with an equal tag would take.
NEW_GROUP: int = _upper_bound - 2
THREAD: int = _upper_bound - 3
MEETING: int = _upper_bound - 4
NOT_CONNECTED: int = _upper_bound - 5
EXCHANGE: int = _upper_bound - 6
SPARSE_TURNS: int = 1 << 12  # sparse exchanges until tags are reused
SPARSE: int = EXCHANGE - 3 * SPARSE_TURNS  # the first of three tags for each exchange
SPARSE_LARGE: int = SPARSE - 1
LARGEST: int = (SPARSE_LARGE - 2) // 2  # for programs
OBJECTS: int = LARGEST + 1  # added to a program's tag for objects, so that receives of arrays don't take them
