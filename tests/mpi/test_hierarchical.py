from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.mpi import hierarchical, reductions, segments
from hpccomm.mpi.hierarchical import HierarchicalAllReduce, choose, part_sizes

from ..arrays import NUMERIC, REDUCTIONS, assert_same, dtype_name, reduced, reductions_of, values

pytestmark = pytest.mark.usefixtures("process_group")


def test_it_is_chosen_for_large_arrays_on_several_nodes_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(1000, 2, 2, smallest=1000)
    assert not choose(999, 2, 2, smallest=1000)
    assert not choose(1000, 1, 4, smallest=1000)
    assert not choose(1000, 4, 1, smallest=1000)
    assert not choose(1000, 0, 2, smallest=1000), "different numbers of ranks"
    assert not choose(1 << 40, 8, 8), "off, unless somebody has measured that it is faster"
    monkeypatch.setattr(hierarchical, "SMALLEST_BYTES", 10)
    assert choose(10, 8, 8)


def test_the_parts_are_nearly_equal() -> None:
    assert part_sizes(10, 4) == [3, 3, 2, 2]
    assert part_sizes(2, 3) == [1, 1, 0]
    assert part_sizes(0, 2) == [0, 0]
    for count in range(20):
        assert sum(part_sizes(count, 3)) == count


PRETENDED = {
    "one node": lambda rank, size: 0,
    "a node each": lambda rank, size: rank,
    "halves": lambda rank, size: 2 * rank // size,
    "round robin": lambda rank, size: rank % 2,
}


@pytest.fixture(params=PRETENDED)
def all_reduce(request: pytest.FixtureRequest, process_group: hc.ProcessGroup) -> Iterator[HierarchicalAllReduce]:
    comm: Any = process_group.comm
    color = PRETENDED[request.param](comm.rank, comm.size)
    node = comm.Split(color, comm.rank)
    made = HierarchicalAllReduce(comm, node)
    assert made.nodes == len({PRETENDED[request.param](rank, comm.size) for rank in range(comm.size)})
    yield made
    made.free()
    node.Free()


def reduce_with(all_reduce: HierarchicalAllReduce, array: Any, op: Any, ranks: int) -> None:
    buffer, datatype, mpi_op, finish = reductions.in_place(array, op, ranks)
    all_reduce(buffer, datatype, mpi_op)
    if finish is not None:
        finish()


@pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
def test_all_reduce(
    all_reduce: HierarchicalAllReduce, process_group: hc.ProcessGroup, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 128)
    n = process_group.size
    if all_reduce.ranks_per_node == 0:
        assert n % all_reduce.nodes
        return
    for name in reductions_of(dtype):
        for shape in [(), (0,), (1,), (7,), (5, 20)]:
            given = [values(dtype, shape, rank) for rank in range(n)]
            array = np.array(given[process_group.rank])
            reduce_with(all_reduce, array, REDUCTIONS[name][0], n)
            assert_same(array, reduced(name, given), name, shape)


def test_all_ranks_get_the_same_bits(all_reduce: HierarchicalAllReduce, process_group: hc.ProcessGroup) -> None:
    if all_reduce.ranks_per_node == 0:
        return
    given = [np.random.default_rng(rank).normal(size=100_001) for rank in range(process_group.size)]
    array = np.array(given[process_group.rank])
    all_reduce(array, MPI.DOUBLE, MPI.SUM)
    assert np.allclose(array, sum(given), rtol=0, atol=1e-13)
    everyone = np.empty((process_group.size, array.size))
    hc.all_gather_single(everyone, array)
    assert (everyone == array).all()
