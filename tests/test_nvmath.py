"""hpccomm.nvmath.ProcessGroup: it answers as nvmath's own class over mpi4py does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from .arrays import assert_same

nvmath = pytest.importorskip("nvmath.distributed.process_group")
RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.fixture
def both(process_group: hc.ProcessGroup) -> list[Any]:
    from hpccomm.nvmath import ProcessGroup

    return [ProcessGroup(), nvmath.MPIProcessGroup(MPI.COMM_WORLD)]


def test_ranks(both: list[Any]) -> None:
    for each in both:
        assert isinstance(each, nvmath.ProcessGroup)
        assert (each.rank, each.nranks) == (RANK, SIZE)


@pytest.mark.parametrize("op", nvmath.ReductionOp)
@pytest.mark.parametrize("dtype", ["int8", "int64", "float64"])
def test_reductions_of_arrays(both: list[Any], op: Any, dtype: str) -> None:
    mine, theirs = (np.array([RANK, -RANK, 7], dtype) for _ in both)
    both[0].allreduce_buffer(mine, op=op)
    both[1].allreduce_buffer(theirs, op=op)
    assert_same(mine, theirs)


def test_broadcasts_of_arrays(both: list[Any]) -> None:
    for each in both:
        array = np.full((2, 2), RANK, np.int64)
        each.broadcast_buffer(array, root=SIZE - 1)
        assert_same(array, np.full((2, 2), SIZE - 1))


def test_reductions_of_objects_are_in_the_order_of_the_ranks(both: list[Any]) -> None:
    for each in both:
        assert each.allreduce_object([RANK], op=lambda a, b: a + b) == list(range(SIZE))
        assert each.allreduce_object({"rank": RANK}, op=lambda a, b: {"rank": max(a["rank"], b["rank"])}) == {
            "rank": SIZE - 1
        }


def test_a_group_in_another_order(process_group: hc.ProcessGroup) -> None:
    from hpccomm.nvmath import ProcessGroup

    with hc.new_group(list(range(SIZE))[::-1], sort_ranks=False) as group:
        each = ProcessGroup(group)
        assert (each.rank, each.nranks) == (SIZE - 1 - RANK, SIZE)
        array = np.array([RANK])
        each.broadcast_buffer(array)
        assert array.tolist() == [SIZE - 1]
        assert each.allreduce_object([RANK], op=lambda a, b: a + b) == list(range(SIZE))[::-1]
