"""The host's time for calls on GPU arrays, over the libnccl that does nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hpccomm.bench.studies import gpu_overhead
from hpccomm.bench.studies.gpu_overhead import GPUOverhead

from ...launch import launch

pytestmark = pytest.mark.once
ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = [
    "all_reduce",
    "all_reduce, async + wait",
    "broadcast",
    "reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "sendrecv",
    "batch of isend + irecv + wait_all",
    "all_reduce_coalesced, 10 arrays",
    "all_reduce, strided",
    "all_reduce_init, start + wait",
    "all_reduce_init, run",
    "all_reduce, on_timeout='raise'",
]
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")


def run(ranks: int, *arguments: str | Path, **environment: str) -> Any:
    # on a machine with a GPU this is over the fake as well
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **environment}
    return launch(ranks, sys.executable, "-m", "tests.gpu.fake_nccl", *arguments, env=environment)


@needs_cupy
@needs_compiler
@pytest.mark.parametrize("ranks", [1, 2])
def test_over_a_fake_nccl_each_operation_is_measured_and_the_fake_is_named(ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    ended = run(ranks, "-n", "2", "--batch", "2", "--json", file)
    assert ended.returncode == 0, ended.stderr
    assert (
        "over a fake libnccl: host time only, no GPU, nothing is communicated\nsubstituted: libnccl.so.2"
        in ended.stdout
    )
    rows = json.loads(file.read_text())["overhead"]
    assert [row["operation"] for row in rows] == OPERATIONS
    for row in rows:
        assert row["added_ns"] == pytest.approx(row["hpccomm_ns"] - row["cupy_ns"])
        assert f"\n{row['operation']:<34} {row['cupy_ns']:>9.0f} " in ended.stdout


@needs_cupy
def test_without_a_compiler_it_says_what_to_install() -> None:
    ended = run(2, CC="no-such-compiler")
    assert ended.returncode != 0
    assert ended.stderr.count("install one, or name it: CC=gcc") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.serial
def test_the_table_has_a_row_for_each_operation() -> None:
    text = gpu_overhead.table([GPUOverhead("all_reduce", 1000.0, 3500.0)], 2)
    title, columns, units, row = text.splitlines()
    assert title.endswith("CuPy's own call of NCCL: 2 ranks, 8 bytes, median of the repetitions")
    assert columns.split() == ["operation", "cupy", "hpccomm", "added"]
    assert units.split() == ["(ns)"] * 3
    assert row.split() == ["all_reduce", "1000", "3500", "2500"]
