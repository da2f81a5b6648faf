from __future__ import annotations

import itertools
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.overlap import address_of
from hpccomm.mpi.shared_memory import share
from hpccomm.native import fastpath
from hpccomm.process.tuning import Tuning

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 448, 449, 10_000])
def test_the_shares_are_the_whole_and_do_not_meet_in_a_cache_line(ranks: int, count: int) -> None:
    shares = [share(rank, ranks, count) for rank in range(ranks)]
    assert shares[0][0] == 0
    assert shares[-1][1] == count
    for (_, stop), (start, _) in itertools.pairwise(shares):
        assert stop == start
        assert stop % 64 == 0 or stop == count


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce"])
def test_it_needs_no_more_memory_than_chunks(process_group: hc.ProcessGroup, dtype: Any, operation: str) -> None:
    array = hc.empty_shared(64 * Tuning().shared_chunk_bytes, np.uint8).view(dtype)
    array[...] = 1
    call = {"all_reduce": lambda: hc.all_reduce(array), "reduce": lambda: hc.reduce(array, 0)}[operation]
    call()
    if process_group.size > 1:  # one rank leaves it to MPI
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * Tuning().shared_chunk_bytes + 100_000


def test_ranks_on_several_nodes_leave_collectives_to_mpi(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = hc.empty_shared(1 << 20)
    array[...] = 1
    shared: Any = process_group.dispatcher.backends["cpu"]._shared  # type: ignore[attr-defined]
    monkeypatch.setattr(shared, "_is_on_one_node", False)
    monkeypatch.setattr(shared, "_meet", None)
    hc.all_reduce(array)
    assert (array == process_group.size).all()


@pytest.mark.skipif(fastpath is None, reason="without the compiled extension")
@pytest.mark.mpi(min_size=2)
def test_a_rank_touches_its_own_part_of_the_nodes_memory(process_group: hc.ProcessGroup) -> None:
    """Pages lie in the NUMA domain of the rank that touches them first, and count for its limit of memory."""
    with hc.new_group() as group:
        for _ in range(20):
            hc.barrier(group)
        memory: Any = group.dispatcher.fast_path._memory  # type: ignore[union-attr]
        start, touched, is_there = address_of(memory.parts[0]), 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                first, last = (int(each, 16) for each in found.groups())
                is_there = first < start + sum(part.nbytes for part in memory.parts) and start < last
            elif is_there and line.startswith("Rss:"):
                touched += 1024 * int(line.split()[1])
        own = memory.parts[group.rank].nbytes  # type: ignore[union-attr]
    assert own <= touched < own + (256 << 10)
