"""The study of checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import checkpoint

from ..launch import ROOT, launch


@pytest.mark.serial
def test_a_run(tmp_path: Path) -> None:
    study = "runpy.run_module('benchmarks.checkpoint', run_name='__main__')"
    program = f"import os, runpy; os.chdir({str(tmp_path)!r}); {study}"
    ended = launch(
        2, sys.executable, "-c", program, "-b", "1M", "-e", "2M", "-f", "2", "-n", "2",
        timeout=100, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    _, _, *tables = ended.stdout.split("\n\n")
    assert [table.splitlines()[0] for table in tables] == [f"{n} MiB on each rank, in 4 arrays" for n in (1, 2)]
    for table in tables:
        _, head, *rows = (line.split() for line in table.splitlines())
        assert head == ["stall", "ms", "/", "copy", "total", "ms", "MB/s", "loop"]
        ours = [row for row in rows if row[0] != "torch"]
        assert [row[0] for row in ours] == ["copy", "save", "save_async"]
        assert [len(row) for row in ours] == [4, 5, 6]  # a copy has no speed, and only one way lets a loop go on
        assert ours[0][2] == "1.00"
        assert all(0 < float(row[1]) <= float(row[3]) for row in ours)
    assert os.listdir(tmp_path) == [], "files are left"


@pytest.mark.serial
def test_the_columns() -> None:
    steps = [
        checkpoint.Step("copy", 1 << 20, 2.0, 1.0, 2.0, 524.3, 0.0),
        checkpoint.Step("save_async", 1 << 20, 2.5, 1.25, 40.0, 26.2, 0.97),
    ]
    assert checkpoint.text(steps).splitlines()[-2:] == [
        "        copy        2.00     1.00        2.00",
        "  save_async        2.50     1.25       40.00       26   0.97",
    ]
