"""Random programs: legal sequences of operations on random groups give NumPy's results."""

from __future__ import annotations

import sys

import pytest

from ..launch import launch

pytestmark = pytest.mark.serial

RANKS = 4
TIMEOUT = {"HPCCOMM_TIMEOUT": "30"}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seeds", [pytest.param(4, id="quick"), pytest.param(170, id="slow", marks=pytest.mark.slow)])
def test_random_programs(seeds: int, ranks: int) -> None:
    arguments = "--seed", str(1000 * ranks), "--seeds", str(seeds), "--operations", "200"
    outcome = launch(ranks, sys.executable, "tests/faults/fuzz.py", *arguments, timeout=30 * seeds, env=TIMEOUT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("200 operations are right") == seeds


def test_a_wrong_result_is_found_and_can_be_had_again() -> None:
    arguments = "--seed", "1", "--operations", "60", "--falsify"
    outcome = launch(RANKS, sys.executable, "tests/faults/fuzz.py", *arguments, timeout=90, env=TIMEOUT)
    assert outcome.returncode != 0
    assert "AssertionError: step" in outcome.stderr
    assert "again: mpiexec -n 4 python tests/faults/fuzz.py --seed 1 --operations 60" in outcome.stderr
