"""The reductions of mpi4py in the benchmark, with and without hpccomm: the same arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm.mpi4py as hm
from hpccomm.bench.studies import accelerate
from hpccomm.mpi4py.calls import SMALLEST

from ...launch import launch

SIZE = MPI.COMM_WORLD.Get_size()


@pytest.mark.parametrize("method", accelerate.METHODS)
def test_both_give_the_same(method: str) -> None:
    comm = hm.Comm(MPI.COMM_WORLD.Dup(), accelerate=True)
    sent, received = accelerate.buffers(method, SMALLEST, SIZE)
    sent[:] = np.arange(sent.size)
    expected = np.zeros_like(received)
    received[:] = 0
    getattr(MPI.COMM_WORLD, method)(sent, expected)
    getattr(comm, method)(sent, received)
    assert np.array_equal(received, expected)
    assert expected.any() or (method == "Reduce" and MPI.COMM_WORLD.Get_rank())
    comm.Free()


@pytest.mark.serial
def test_a_run(tmp_path: Path) -> None:
    document = tmp_path / "accelerate.json"
    command = [
        sys.executable,
        "-m",
        "hpccomm",
        "bench",
        "accelerate",
        "-b",
        "64",
        "-e",
        "256K",
        "-f",
        "4096",
        "-n",
        "2",
    ]
    ended = launch(2, *command, "--json", document, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "Reduce_scatter_block\n     array      hpccomm      mpi4py       ratio" in ended.stdout
    found = json.loads(document.read_text())["accelerate"]
    sizes = [(step["case"], step["nbytes"]) for step in found]
    assert sizes == [(method, nbytes) for method in accelerate.METHODS for nbytes in (64, 1 << 18)]
    assert all(time > 0 for step in found for time in step["times_us"].values())
