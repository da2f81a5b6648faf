"""No array stays when a call of mpi4py has ended under `hpccomm run`: every call, made by tests/run/every_call.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpccomm.mpi4py.calls import REDUCTIONS, SMALLEST

from ..launch import launch

pytestmark = pytest.mark.serial
PROGRAM = Path(__file__).parent / "every_call.py"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], ["4"]),
        (["--trace", "--detail"], ["4"]),
        (["--accelerate"], [str(SMALLEST // 8), *sorted(REDUCTIONS)]),  # which hpccomm does from this size on
        (None, ["4"]),  # by python: what mpi4py itself keeps is none of ours
    ],
    ids=["run", "--trace --detail", "--accelerate", "python"],
)
def test_no_array_stays_when_a_call_has_ended(options: list[str] | None, arguments: list[str], tmp_path: Path) -> None:
    run = [] if options is None else ["-m", "hpccomm", "run", *options]
    ended = launch(2, sys.executable, *run, PROGRAM, *arguments, env={"HPCCOMM_DEBUG_DIR": str(tmp_path)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.split("\n")[:2] == ["not tried: []"] * 2, ended.stdout
