"""The sparse exchanges of the benchmark: all contenders bring the same arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from benchmarks import sparse

from ..launch import launch
from .runs import run

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def assert_has_come(received: dict[int, Any], number: int, cells: int) -> None:
    expected = {(RANK - step) % SIZE: step for step in range(1, number + 1)}
    assert received.keys() == expected.keys()
    for source, step in expected.items():
        assert np.array_equal(received[source], np.full(cells, 100.0 * source + step))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cells", [1, 20000])
def test_each_way_brings_the_same_arrays(cells: int) -> None:
    with hc.init_process_group() as world:
        hand = sparse.ByHand(MPI.COMM_WORLD)
        for number in sparse.partners(SIZE):
            arrays = sparse.outgoing(number, 8 * cells, SIZE, RANK)
            assert_has_come(hc.exchange_sparse(arrays, world), number, cells)
            for call in hand.calls().values():
                for _ in range(3):  # one after the other, without a barrier
                    assert_has_come(call(arrays), number, cells)
                MPI.COMM_WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_without_arrays_take_part() -> None:
    for call in sparse.ByHand(MPI.COMM_WORLD).calls().values():
        received = call({SIZE - 1: np.full(3, 7.0)} if RANK == 0 else {})
        assert {source: array.tolist() for source, array in received.items()} == (
            {0: [7.0] * 3} if RANK == SIZE - 1 else {}
        )
        MPI.COMM_WORLD.Barrier()


@pytest.mark.serial
def test_the_numbers_of_partners() -> None:
    found = [sparse.partners(ranks) for ranks in (2, 3, 4, 9, 10)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9]]


@pytest.mark.serial
def test_a_run() -> None:
    table = ["hpccomm", "isend", "alltoallv", "consensus", "ratio"], ["64 B", "4 KiB"]
    found = run(3, "sparse", "-b", "64", "-e", "4K", "-f", "64")
    assert found == dict.fromkeys(("partners: 1", "partners: 2"), table)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("ranks", "arguments", "error"),
    [
        (1, [], "this needs at least 2 ranks: mpiexec -n 2"),
        (2, ["-b", "16", "-e", "8"], "error: the sizes begin with 16 and end with 8; expected 0 < begin <= end"),
        (2, ["-f", "1"], "error: argument -f/--factor: '1' is not an integer of 2 or more"),
    ],
)
def test_what_cannot_be_measured_is_said_once(ranks: int, arguments: list[str], error: str) -> None:
    ended = launch(ranks, sys.executable, "-m", "benchmarks.sparse", *arguments)
    assert ended.returncode == 2
    assert ended.stderr.count(f"python -m benchmarks.sparse: {error}\n") == 1
