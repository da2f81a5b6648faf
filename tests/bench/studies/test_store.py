"""``hpccomm bench store``: a whole run without a launcher, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpccomm.bench.studies import store
from hpccomm.bench.studies.store import Row

from ...launch import ROOT, clean_environment

pytestmark = pytest.mark.once


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpccomm", "bench", "store", *arguments],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_whole_run_needs_no_launcher(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ended = bench("-e", "64", "-n", "3", "--budget", "0.02", "--clients", "2", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    assert "one client, the time of an operation" in ended.stdout
    assert "set and get by 2 clients at once" in ended.stdout
    document = json.loads(file.read_text())
    assert "mpi" not in document["machine"]
    found = {(row["operation"], row["size_bytes"], row["contender"]): row for row in document["store"]}
    for contender in ("TCPStore", "FileStore", "HashStore"):
        for operation, size in (("set", 64), ("get", 64), ("wait", 0), ("add", 0)):
            assert 0 < found[operation, size, contender]["median_us"] <= found[operation, size, contender]["p99_us"]
        assert found["set and get", 64, contender]["per_second"] > 0
        assert found["set and get", 64, contender]["clients"] == 2


def test_sizes_that_are_not_measured_are_refused() -> None:
    ended = bench("-b", "65", "-e", "66")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "with values of (64, 4096, 1048576, 67108864) bytes" in ended.stderr


def row(contender: str, value: float, size: int = 64, **fields: Any) -> Row:
    return Row("get", size, contender, value, value, **fields)


def test_the_table_compares_with_torch_where_it_is_there() -> None:
    with_torch = store.table([row("TCPStore", 30.0), row("torch", 60.0)], 4)
    assert with_torch.splitlines()[3].split() == ["get", "64", "30.00", "60.00", "0.50"]
    assert "not installed" not in with_torch
    without = store.table([row("TCPStore", 30.0)], 4)
    assert without.splitlines()[3].split() == ["get", "64", "30.00"]
    assert without.splitlines()[-1] == "# torch: not installed (pip install torch)"


def test_what_torch_does_not_take_is_said() -> None:
    large = 64 << 20
    text = store.table([row("TCPStore", 30.0), row("torch", 60.0), row("TCPStore", 3e5, large)], 4)
    assert text.splitlines()[4].split() == ["get", str(large), "300000", "-", "-"]
    assert "at most 8388608 bytes" in text
