"""The redistributions of the benchmark: all contenders bring the array from one layout to the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from benchmarks import redistribute
from benchmarks.redistribute import Change

from .runs import run

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def with_numbers(change: Change) -> Any:
    """Number the cells of the array before, empty the one after, and return its expected contents."""
    whole = np.arange(np.prod(change.shape), dtype=float).reshape(change.shape)
    change.arrays[0][...], change.arrays[1][...] = whole[change.boxes[0]], -1
    return whole[change.boxes[1]]


@pytest.mark.parametrize("nbytes", [8, 3000])
def test_each_way_gives_the_same_layout(nbytes: int) -> None:
    for name in redistribute.possible(SIZE):
        change = redistribute.change_of(name, nbytes, SIZE, RANK)
        row = MPI.COMM_WORLD.Split(RANK // change.grid[1])
        ways = redistribute.by_hand(row, change) | redistribute.installed(MPI.COMM_WORLD, row, change)
        for way, call in ways.items():
            expected = with_numbers(change)
            made = call()
            found = made.local if way == "mpiarray" else change.arrays[1]
            assert np.array_equal(found, expected), (name, way)
        row.Free()


def test_hpccomm_gives_it_too() -> None:
    with hc.init_process_group() as world:
        for name in redistribute.possible(SIZE):
            change = redistribute.change_of(name, 500, SIZE, RANK)
            expected = with_numbers(change)
            with hc.redistribute_init(*change.arrays[::-1], *change.boxes[::-1], world) as persistent:
                persistent.run()
            assert np.array_equal(change.arrays[1], expected), name


@pytest.mark.serial
@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 64), (2, 1 << 20), (3, 5000), (6, 64 << 10)])
def test_all_ranks_have_as_much_of_the_array(ranks: int, nbytes: int) -> None:
    for name in redistribute.possible(ranks):
        changes = [redistribute.change_of(name, nbytes, ranks, rank) for rank in range(ranks)]
        for index in (0, 1):
            covered = np.zeros(changes[0].shape, int)
            for change in changes:
                covered[change.boxes[index]] += 1
                assert change.arrays[index].nbytes == changes[0].arrays[0].nbytes
            assert (covered == 1).all()
        assert 0.5 < changes[0].arrays[0].nbytes / nbytes < 2


@pytest.mark.serial
def test_pencils_need_ranks_that_make_a_grid() -> None:
    assert [len(redistribute.possible(ranks)) for ranks in (1, 2, 3, 4, 5, 6)] == [2, 2, 2, 3, 2, 3]


@pytest.mark.serial
def test_a_run() -> None:
    found = run(4, "redistribute", "-b", "64", "-e", "4K", "-f", "64")
    assert list(found) == list(redistribute.CHANGES)
    for columns, sizes in found.values():
        assert (columns[:4], columns[-1]) == (["hpccomm", "one call", "subarrays", "packed"], "ratio")
        assert len(sizes) == 2
