"""all_reduce in the shape of the machine: inside the nodes, between them on a part each, inside them again.

With k ranks on each node, an Allreduce that knows nothing of nodes may send every array across the network several
times. Here rank i of each node first receives the i-th part of the node's sum (reduce-scatter) and reduces it with the
ranks i of the other nodes, all k parts at the same time; then the parts are collected inside the nodes (all-gather).
Across the network goes one array per node, not one per rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from .segments import segments

# From which size on it is used where it can be; None: never. Measured on 2 nodes of 2 ranks (network namespaces of one
# machine with 2 cores, float32, 1 to 16 MiB), against segments of MPI's Allreduce: MPICH 0.9 to 1.3 times as fast;
# Open MPI 1.4 to 5 times over a fast virtual network, but 0.5 to 0.8 times over one of 1 Gbit/s. No clear winner.
SMALLEST_BYTES: int | None = None


def choose(nbytes: int, ranks_per_node: int, nodes: int, smallest: int | None = None) -> bool:
    """Whether to reduce hierarchically: `nbytes` on each of `ranks_per_node` ranks (0: it varies) of `nodes` nodes."""
    smallest = SMALLEST_BYTES if smallest is None else smallest
    return smallest is not None and nbytes >= smallest and ranks_per_node > 1 and nodes > 1


class HierarchicalAllReduce:
    """all_reduce of contiguous arrays over a group with the same number of ranks on each of several nodes.

    Parameters
    ----------
    comm, node : mpi4py.MPI.Intracomm
        The group's, and that of its ranks on this node (MPI_Comm_split_type).

    Attributes
    ----------
    ranks_per_node : int
        0 if the nodes have different numbers of ranks, which it can't serve.
    nodes : int
    """

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm) -> None:
        self._node = node
        self._across = comm.Split(node.rank, comm.rank)  # the ranks of this number on all nodes
        sizes = comm.allgather(node.size)
        self.ranks_per_node = sizes[0] if len(set(sizes)) == 1 else 0
        self.nodes = comm.allreduce(node.rank == 0)

    def __call__(self, array: Any, datatype: MPI.Datatype, op: MPI.Op) -> None:
        """Reduce a contiguous array in place, with a commutative operation; every rank of the group calls it."""
        for segment in segments(array):
            self._all_reduce(segment.reshape(-1), datatype, op)

    def _all_reduce(self, array: Any, datatype: MPI.Datatype, op: MPI.Op) -> None:
        counts = part_sizes(array.size, self.ranks_per_node)
        part = np.empty(counts[self._node.rank], array.dtype)
        self._node.Reduce_scatter((array, datatype), (part, datatype), counts, op)
        self._across.Allreduce(MPI.IN_PLACE, (part, datatype), op)
        self._node.Allgatherv((part, datatype), (array, counts, datatype))

    def free(self) -> None:
        """Free the communicator between the nodes; every rank of the group calls it."""
        self._across.Free()


def part_sizes(count: int, parts: int) -> list[int]:
    """Return the sizes of `parts` nearly equal parts of `count` elements."""
    return [count // parts + (part < count % parts) for part in range(parts)]
