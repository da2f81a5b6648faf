"""hpccomm bench: torch.distributed over hpccomm and over gloo, beside each other in one run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ..launch import launch

pytestmark = pytest.mark.serial

TORCHS = ["torch-hpccomm", "torch-gloo"]


@pytest.mark.parametrize(
    ("ranks", "arguments", "missing"),
    [
        (3, ["collectives", "ping_pong"], {"scan", "exscan"}),
        (2, ["all_reduce", "reduce_scatter_single", "--async", "--dtype", "bfloat16"], set()),
        (2, ["all_reduce", "--op", "avg"], set()),
    ],
)
def test_both_give_what_numpy_computes_in_one_run(
    ranks: int, arguments: list[str], missing: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    arguments += ["-b", "8", "-e", "4000", "-f", "500", "-n", "2", "--batch", "2", "--check", "--json", str(file)]
    ended = launch(
        ranks, sys.executable, "-m", "hpccomm", "bench", *arguments, "--against", ",".join(TORCHS), timeout=120
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        if row["contender"] == "torch-hpccomm" and row["benchmark"] not in missing:
            assert row["wrong"] == 0, row
        if row["contender"] == "torch-gloo" and row["median_us"] is not None:
            assert row["wrong"] == 0, row
    gloos = [row for row in rows if row["contender"] == "torch-gloo" and row["benchmark"] == "all_reduce"]
    assert all((row["median_us"] is None) == ("avg" in arguments) for row in gloos)  # it has no AVG
