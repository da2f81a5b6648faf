"""The reductions of mpi4py in the benchmark, with and without hpccomm: the same arrays."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm.mpi4py as hm
from benchmarks import accelerate
from hpccomm.mpi4py.calls import SMALLEST

from .runs import run

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
def test_a_run() -> None:
    table = ["hpccomm", "mpi4py", "ratio"], ["64 B", "256 KiB"]
    assert run(2, "accelerate", "-b", "64", "-e", "256K", "-f", "4096") == dict.fromkeys(accelerate.METHODS, table)
