"""The sparse exchanges of the benchmark: all contenders bring the same arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.bench.studies import sparse

from ...launch import launch

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
            assert_has_come(hc.all_to_all_sparse(arrays, world), number, cells)
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
def test_a_run(tmp_path: Path) -> None:
    document = tmp_path / "sparse.json"
    command = [sys.executable, "-m", "hpccomm", "bench", "sparse", "-b", "64", "-e", "4K", "-f", "64", "-n", "2"]
    ended = launch(3, *command, "--json", document, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "partners: 2\n     array      hpccomm       isend" in ended.stdout
    found = json.loads(document.read_text())["sparse"]
    sizes = [(step["case"], step["nbytes"]) for step in found]
    assert sizes == [(f"partners: {number}", nbytes) for number in (1, 2) for nbytes in (64, 4096)]
    assert all(time > 0 for step in found for time in step["times_us"].values())


@pytest.mark.serial
def test_one_rank_has_no_partner() -> None:
    ended = launch(1, sys.executable, "-m", "hpccomm", "bench", "sparse")
    assert ended.returncode == 2
    assert ended.stderr == "hpccomm bench: sparse needs at least 2 ranks: mpiexec -n 2 hpccomm bench sparse\n"
