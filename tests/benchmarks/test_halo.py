"""The halo steps of the benchmark: all contenders fill the same ghosts."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from benchmarks import halo

from .runs import run

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.mark.parametrize("cut", halo.CUTS)
def test_each_way_fills_the_same_ghosts(cut: str) -> None:
    axis = halo.CUTS[cut]
    with hc.init_process_group() as world:
        assert world.comm is not None
        cart = world.comm.Create_cart([SIZE], [True])
        block = halo.blocks(cut, 800)
        own = np.random.default_rng(RANK).random(block.shape)
        grid = hc.new_grid(0, periodic=True)
        expected = own.copy()
        hc.halo_exchange(expected, grid, axes=(axis,))
        assert not np.array_equal(expected, own)
        for name, call in halo.by_hand(cart, block, axis).items():
            block[...] = own
            call()
            assert np.array_equal(block, expected), name
        cart.Free()


@pytest.mark.serial
def test_a_run() -> None:
    found = run(2, "halo", "-b", "64", "-e", "4K", "-f", "64")
    columns = ["hpccomm", "node-shared", "one call", "persistent", "isend", "subarrays", "ratio"]
    last = {"first": "4 KiB", "middle": "3.953 KiB", "last": "4 KiB"}
    assert found == {f"cut along the {cut} axis": (columns, ["64 B", last[cut]]) for cut in halo.CUTS}
