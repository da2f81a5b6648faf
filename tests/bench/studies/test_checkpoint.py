"""The study of checkpoints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpccomm.bench.studies import checkpoint

from ...launch import ROOT, launch


@pytest.mark.serial
def test_a_run(tmp_path: Path) -> None:
    document = tmp_path / "checkpoint.json"
    program = f"import os, sys; os.chdir({str(tmp_path)!r}); from hpccomm.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "bench", "checkpoint", "-b", "1M", "-e", "2M", "-f", "2", "-n", "2"]
    ended = launch(2, *command, "--json", document, timeout=100, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    assert (
        "1 MiB on each rank, in 4 arrays\n                stall ms   / copy    total ms     MB/s   loop" in ended.stdout
    )
    found = json.loads(document.read_text())["checkpoint"]
    kinds = [(step["nbytes"], step["way"]) for step in found if not step["way"].startswith("torch")]
    assert kinds == [(nbytes, way) for nbytes in (1 << 20, 2 << 20) for way in ("copy", "save", "save_async")]
    for step in found:
        assert 0 < step["stall_ms"] <= step["total_ms"]
        assert (step["pace"] > 0) == ("async" in step["way"])
        assert step["ratio"] == 1 or step["way"] != "copy"
    assert os.listdir(tmp_path) == ["checkpoint.json"], "files are left"


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
