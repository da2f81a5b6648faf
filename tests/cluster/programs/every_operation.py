"""Every operation in each of its forms, on the world, on the ranks of each node, and on one rank of each node."""

from __future__ import annotations

import numpy as np

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS
from tests.matrix.test_matrix import EVERY, Opposite, goes_to_itself, perform


def large_arrays(group: hc.ProcessGroup) -> None:
    """Reduce what goes in segments, and what ranks of a node copy from each other, from ordinary and shared memory."""
    for array in (np.empty(1 << 20), hc.empty_shared(1 << 20, group=group)):
        array[:] = np.arange(1 << 20) + group.rank
        hc.all_reduce(array, group=group)
        first = sum(range(group.size))
        assert np.array_equal(array, np.arange(1 << 20) * float(group.size) + first)


with hc.init_process_group() as world:
    calls = 0
    of_node = hc.split_group(color=hc.get_node_rank())
    across = hc.split_group(color=hc.get_local_rank())
    for group in (world, of_node, across):
        for name, form in EVERY:
            if goes_to_itself(name, form, group) or (form == "coalescing" and not OPERATIONS[name].is_collected):
                continue
            opposite = Opposite(name, group)
            perform(name, form, group)
            opposite.finish()
            calls += 1
        large_arrays(group)
    told = [0] * world.size
    hc.all_gather_object(told, (hc.get_node_rank(), of_node.size, across.size, hc.get_local_size(), calls))
    if world.rank == 0:
        print(told, flush=True)
