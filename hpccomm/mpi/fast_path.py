"""The fast path of host arrays: in C with the extension (`compiled.py`); without it every operation is checked."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ..core.backend import FastPath
from ..native import fastpath
from ..process.tuning import Tuning

# A run of coalesced arrays of this size stays in the cache while it is packed, reduced and unpacked.
RUN_BYTES = 1 << 20
KEPT_BYTES = 16 * RUN_BYTES  # most memory that is kept for them; the same as in the compiled extension


class MPIFastPath(FastPath):
    """The fast path of one group without the extension: it leaves all operations to the checks and MPI."""

    is_in_thread = False  # in the communication thread
    tries = False  # times memory of the node and MPI, and takes the faster

    def _not_in_node(self, *_: Any) -> bool:
        return False

    # Operations in memory of the node (`native/node.pxi`), only of the compiled path; each returns whether it did it
    node_broadcast = node_all_reduce = node_all_gather = node_reduce_scatter = node_barrier = _not_in_node
    reduces_narrow = is_node_open = node_all_to_all = node_move = node_reduce = node_reduce_scatter_list = _not_in_node

    def close_node(self) -> None:
        """Free its memory; called once, by every rank, when the group is destroyed."""


def make_fast_path(comm: MPI.Intracomm, windows: dict[int, Any], tuning: Tuning, thread_bytes: int) -> MPIFastPath:
    """Return the fast path of a group: the compiled one if available.

    It takes arrays of up to a segment's bytes, asynchronous ones below `thread_bytes`. `windows` is empty until the
    program makes a node-shared array; then the checks take reductions of at least `shared_bytes`.
    """
    if fastpath is None:
        return MPIFastPath()
    from .compiled import CompiledFastPath

    return CompiledFastPath(comm, windows, tuning, thread_bytes)
