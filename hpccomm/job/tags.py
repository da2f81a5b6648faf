"""Tags: which ones programs may use, and which are hpccomm's own."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

_upper_bound: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI has it on no other communicator

MONITORED_BARRIER: int = _upper_bound
PAIRWISE: int = _upper_bound - 1
# Of MPI_Comm_create_group: its tags have nothing to do with those of messages (MPI-4.1 §7.4.2), but Open MPI 5.0 sends
# messages with them, which a receive of the program with this tag would take.
NEW_GROUP: int = _upper_bound - 2
THREAD: int = _upper_bound - 3
MEETING: int = _upper_bound - 4
NOT_CONNECTED: int = _upper_bound - 5
EXCHANGE: int = _upper_bound - 6
SPARSE_TURNS: int = 1 << 12  # sparse exchanges on, tags are used again
SPARSE: int = EXCHANGE - 3 * SPARSE_TURNS  # and those above, three for each
SPARSE_LARGE: int = SPARSE - 1
LARGEST: int = (SPARSE_LARGE - 2) // 2  # of a program
OBJECTS: int = LARGEST + 1  # is added to a program's tag for objects: so no receive of an array takes their messages
