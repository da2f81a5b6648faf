"""Random programs: legal sequences of operations on random groups give what NumPy gives."""

from __future__ import annotations

import sys

import pytest

from ..launch import launch

pytestmark = pytest.mark.serial

RANKS = 4
TIMEOUT = {"HPCCOMM_TIMEOUT": "30"}


@pytest.mark.parametrize("seed", [1, 101, 201])
def test_a_random_program(seed: int) -> None:
    arguments = "--seed", str(seed), "--seeds", "2", "--operations", "150"
    outcome = launch(RANKS, sys.executable, "tests/faults/fuzz.py", *arguments, timeout=90, env=TIMEOUT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("150 operations are right") == 2


def test_a_wrong_result_is_found_and_can_be_had_again() -> None:
    arguments = "--seed", "1", "--operations", "60", "--falsify"
    outcome = launch(RANKS, sys.executable, "tests/faults/fuzz.py", *arguments, timeout=90, env=TIMEOUT)
    assert outcome.returncode != 0
    assert "AssertionError: step" in outcome.stderr
    assert "again: mpiexec -n 4 python tests/faults/fuzz.py --seed 1 --operations 60" in outcome.stderr
