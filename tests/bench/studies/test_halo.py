"""The halo steps of the benchmark: all contenders fill the same ghosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.bench.studies import halo

from ...launch import launch

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
def test_a_run(tmp_path: Path) -> None:
    document = tmp_path / "halo.json"
    command = [sys.executable, "-m", "hpccomm", "bench", "halo", "-b", "64", "-e", "4K", "-f", "64", "-n", "2"]
    ended = launch(2, *command, "--json", document, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "cut along the middle axis\n      face      hpccomm node-shared    one call  persistent" in ended.stdout
    found = json.loads(document.read_text())["halo"]
    assert [(step["case"], step["nbytes"]) for step in found[::2]] == [
        (f"cut along the {cut} axis", 64) for cut in halo.CUTS
    ]
    assert all(time > 0 for step in found for time in step["times_us"].values())
