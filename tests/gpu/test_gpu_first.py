"""tools/gpu-first, rehearsed on the stand-in: whatever happens to a step, the summary says it, and nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from ..launch import ROOT, clean_environment, time_limit
from . import gpus

pytestmark = [pytest.mark.once, pytest.mark.skipif(gpus.is_real(), reason="it would be no rehearsal")]


@pytest.fixture
def tool() -> Any:
    loader = SourceFileLoader("gpu_first_tool", str(ROOT / "tools" / "gpu-first"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


def run(folder: Path, *arguments: str, seconds: float = 570) -> subprocess.CompletedProcess[str]:
    patience = time_limit(1)  # more on a busy machine
    limits = "--patience", str(patience), "--seconds", str(seconds * patience)
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "gpu-first", folder, *limits, *arguments],
        env={**clean_environment(), "GPU_TESTS_ON": ""}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300 * patience, check=False,
    )  # fmt: skip


def outcomes(folder: Path) -> dict[str, str]:
    """Return the outcome of each step, by its name."""
    lines = (folder / "summary.txt").read_text().splitlines()
    found = (re.fullmatch(r" *[\d.]+ s  (\S.*?)  +(\S.*?) \([\d.]+ s\): .*", line) for line in lines)
    return {match[2]: match[1].strip() for match in found if match}


def marked() -> list[int]:
    """Return the processes of steps that are left."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"HPCCOMM_GPU_FIRST=" in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def test_a_rehearsal(tmp_path: Path) -> None:
    steps = ("ground", "devices", "arrays_of_torch", "hangs", "fails", "crashes", "persistent")
    ended = run(tmp_path, "--rehearse", "--at-once", "2", "--only", *steps)
    said = outcomes(tmp_path)
    assert said["ground"] == said["smoke: devices"] == said["smoke: persistent"] == "passed"
    assert said["smoke: arrays_of_torch"] == "skipped"
    assert said["smoke: hangs"] == said["smoke: hangs, 2 rank(s)"] == "hung"
    assert said["smoke: fails"] == "failed (1)"
    assert said["smoke: crashes"] == "crashed (SIGSEGV)"
    assert said["persistent, 1 rank(s)"] == "passed"
    assert ended.returncode == 1
    last = (tmp_path / "summary.txt").read_text().splitlines()[-1]
    assert "1 skipped" in last
    assert "hung: smoke: hangs, smoke: hangs, 2 rank(s)" in last
    with tarfile.open(tmp_path / "logs.tgz") as packed:
        assert "logs/smoke-hangs.txt" in packed.getnames()
    assert marked() == []


def test_no_step_is_begun_that_does_not_fit(tmp_path: Path) -> None:
    ended = run(tmp_path, "--rehearse", "--only", "devices", "fails", seconds=12)
    assert outcomes(tmp_path) == {"smoke: devices": "did not fit", "smoke: fails": "failed (1)"}, ended.stderr


def test_without_a_gpu_nothing_is_run_or_written(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 2
    assert "there is no GPU" in ended.stderr
    before = (ROOT / "docs" / "gpu-results.md").read_text()
    (tmp_path / "summary.txt").write_text("on the stand-in (no GPU here); 2026-01-01\n")
    assert run(tmp_path, "--write-page").returncode == 2
    assert (ROOT / "docs" / "gpu-results.md").read_text() == before


def test_the_page_is_written_from_the_summary(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "page.md")
    (tmp_path / "summary.txt").write_text(
        "on some GPU, NCCL 23000; 2026-01-01\n   1.0 s  passed  ground (0.9 s): yes\n"
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "bench-x.txt").write_text("$ bench\n1 us\n")
    assert tool.write_page(tmp_path) == 0
    page = (tmp_path / "page.md").read_text()
    assert "on some GPU, NCCL 23000" in page
    assert "passed  ground" in page
    assert "1 us" in page


def test_mpi_comes_out_of_a_wheel(tool: Any, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "mpich-5.0.2-py3-none-any.whl", "w") as file:
        file.writestr("mpich-5.0.2.data/data/bin/mpiexec", "#!/bin/sh\n")
        file.writestr("mpich-5.0.2.data/data/lib/libmpi.so.12", "")
    with zipfile.ZipFile(wheels / "package-1-py3-none-any.whl", "w") as file:
        file.writestr("package.py", "")
    machine = tool.Machine(tmp_path / "out", 1, wheels)
    mpiexec = machine.environment["PATH"].split(os.pathsep)[0] + "/mpiexec"
    assert os.access(mpiexec, os.X_OK)
    assert Path(machine.environment["MPI4PY_LIBMPI"]).is_file()
    assert (Path(machine.environment["PYTHONPATH"].split(os.pathsep)[0]) / "package.py").is_file()
