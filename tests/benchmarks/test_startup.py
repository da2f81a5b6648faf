"""The steps of a program's start, and their times."""

from __future__ import annotations

import sys

import pytest

from ..launch import launch


@pytest.mark.serial
def test_a_run() -> None:
    ended = launch(2, sys.executable, "-m", "benchmarks.startup")
    assert ended.returncode == 0, ended.stderr
    _, _, _, *steps = ended.stdout.splitlines()
    assert len(steps) == 7
    assert sum("init_process_group" in step for step in steps) == 2
    assert all(float(step.split()[0]) > 0 for step in steps)
