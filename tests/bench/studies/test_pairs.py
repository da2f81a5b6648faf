"""The pairs of a job: the rounds in which they meet, and the pairs that are called slow."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from hpccomm.bench.studies import pairs
from hpccomm.bench.studies.pairs import Pair

from ...launch import launch


@pytest.mark.once
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_each_two_ranks_meet_once_and_none_is_in_two_places(size: int) -> None:
    met = []
    for partners in pairs.rounds(size):
        assert all(partners[partner] == rank for rank, partner in partners.items())
        met += [(rank, partner) for rank, partner in partners.items() if rank < partner]
    assert sorted(met) == list(itertools.combinations(range(size), 2))


@pytest.mark.once
def test_slow_pairs_are_compared_with_their_kind() -> None:
    within = [Pair((a, a + 1), True, 1.0, 8.0) for a in range(0, 8, 2)]
    between = [Pair((0, b), False, 5.0, 2.0) for b in range(2, 8)]
    assert pairs.slow([*within, *between]) == []
    late, thin = Pair((3, 7), False, 12.5, 2.0), Pair((5, 6), True, 1.0, 3.0)
    assert pairs.slow([*within, thin, *between, late]) == [
        "slow: ranks 5 and 6: 3.00 GB/s, the median of those of one node is 8.00",
        "slow: ranks 3 and 7: 12.50 us, 2.5 times the median of those between nodes",
    ]


@pytest.mark.serial
def test_a_run(tmp_path: Path) -> None:
    picture, document = tmp_path / "pairs.png", tmp_path / "pairs.json"
    command = [sys.executable, "-m", "hpccomm", "bench", "pairs"]
    ended = launch(3, *command, "--plot", picture, "--json", document, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "rank        0       1       2\n" in ended.stdout
    assert "3 pairs of one node: " in ended.stdout
    found = json.loads(document.read_text())["pairs"]
    assert [pair["ranks"] for pair in found] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["latency_us"] > 0 and pair["bandwidth_gbs"] > 0 and pair["same_node"] for pair in found)
    assert picture.read_bytes().startswith(b"\x89PNG")
    alone = launch(1, *command, timeout=60)
    assert (alone.returncode, "mpiexec -n 2 hpccomm bench pairs" in alone.stderr) == (2, True)
