"""tools/gpu-first, rehearsed on the stand-in: the summary has the outcome of each step, and no process is left."""

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

from ..launch import IMITATED_GPU, ROOT, clean_environment, launch, time_limit
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


def left(folder: Path) -> list[int]:
    """Return the processes that are left of the steps whose logs are in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"GPU_FIRST_PROGRESS={folder}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def test_a_rehearsal(tmp_path: Path) -> None:
    steps = (
        "compiled",
        "ground",
        "devices",
        "arrays_of_torch",
        "hangs",
        "fails",
        "crashes",
        "a context",
        "persistent,",
    )
    ended = run(tmp_path, "--rehearse", "--at-once", "3", "--only", *steps, "host arrays")
    said = outcomes(tmp_path)
    assert said["ground"] == said["smoke: devices"] == "passed"
    assert said["smoke: arrays_of_torch"] == "skipped"
    assert said["smoke: hangs"] == said["smoke: hangs, 2 rank(s)"] == "hung"
    assert said["smoke: fails"] == "failed (1)"
    assert said["smoke: crashes"] == "crashed (SIGSEGV)"
    assert said["persistent, 1 rank(s)"] == "passed"
    assert said["a context dies, 2 rank(s)"] == "failed (3 processes)"
    assert said["compiled extension"] == "passed"
    assert said.popitem() == (f"bench: host arrays on all cores, {len(os.sched_getaffinity(0))} rank(s)", "passed")
    assert ended.returncode == 1
    last = (tmp_path / "summary.txt").read_text().splitlines()[-1]
    assert "1 skipped" in last
    assert "2 hung" in last
    assert "; hung: smoke: hangs, " in last
    with tarfile.open(tmp_path / "logs.tgz") as packed:
        assert "logs/smoke-hangs.txt" in packed.getnames()
    assert left(tmp_path) == []
    log = tmp_path / "logs" / "a-context-dies-2-rank-s.txt"
    assert "the CUDA context has died: cudaErrorMisalignedAddress" in log.read_text()
    lines = log.with_suffix(".tests").read_text().replace("tests/gpu/a_context_dies.py::test_that_", "").splitlines()
    assert [line for line in lines if line.startswith(("begun", "passed"))] == [
        *("begun ends_the_context_of_one_rank", "begun needs_the_context", "passed needs_the_context"),
        *("begun fails_on_one_rank_while_the_others_wait", "begun comes_last", "passed comes_last"),
    ]


@pytest.mark.parametrize("nccl", [22703, 23000])
@pytest.mark.parametrize("gpus", [1, 4, 16])
@pytest.mark.parametrize("is_rehearsed", [False, True])
def test_each_step_has_a_log_of_its_own_and_benchmarks_come_before_tests(
    tool: Any, is_rehearsed: bool, gpus: int, nccl: int
) -> None:
    steps = [step for wave in tool.waves(["devices"], is_rehearsed, gpus, nccl) for step in wave]
    assert len({step.log for step in steps}) == len(steps)
    assert steps[0].name == "compiled extension"
    host = steps.pop()
    assert host.name.startswith("bench: host arrays on all cores")
    assert host.ranks == len(os.sched_getaffinity(0))
    kinds = [
        "tests" if step.is_of_tests else "bench" for step in steps if "mpi4py" in step.command or "bench" in step.name
    ]
    if gpus == 1 and not is_rehearsed:
        assert kinds == ["bench"] * 2 + ["tests"] * (len(kinds) - 2)
    for step in steps:
        for argument in step.command:
            assert not argument.startswith("tests/") or (ROOT / argument).exists()
    names = [step.name for step in steps]
    assert ("all files, ranks that share a GPU, 2 rank(s)" in names) == (nccl >= 23000)
    assert ("all files, a GPU for each rank, 8 rank(s)" in names) == (gpus == 16)
    assert ("all files, a GPU for each rank, 4 rank(s)" in names) == (gpus == 4)


def test_the_command_of_the_benchmark_runs(tool: Any) -> None:
    arguments = ["4K" if each == "64M" else each for each in tool.ALL_REDUCE]
    command = (sys.executable, "-m", "hpccomm", "bench", *arguments, "-n", "1")
    ended = launch(2, *command, timeout=gpus.PATIENCE, env=IMITATED_GPU)
    assert ended.returncode == 0, ended.stderr
    assert "# hpccomm takes" in ended.stdout


def test_a_step_that_does_not_fit_is_not_begun_or_ends_with_the_time(tool: Any, tmp_path: Path) -> None:
    machine = tool.Machine(tmp_path, 1, None)
    machine.run(tool.Step("long", ("-c", ""), seconds=1000))
    machine.run(tool.Step("longer than it was", ("-c", "import time; time.sleep(1000)"), seconds=0.1))
    assert machine.outcomes == {"did not fit": ["long", "longer than it was"]}
    assert [log.name for log in machine.logs.iterdir()] == ["longer-than-it-was.txt"]


def test_without_a_gpu_nothing_is_run_or_written(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 2
    assert "there is no GPU" in ended.stderr
    before = (ROOT / "docs" / "gpu-results.md").read_text()
    (tmp_path / "summary.txt").write_text("on the stand-in (no GPU here); 2026-01-01\n")
    assert run(tmp_path, "--write-page").returncode == 2
    assert "results of another run" in run(tmp_path, "--rehearse").stderr
    assert (ROOT / "docs" / "gpu-results.md").read_text() == before


def test_the_page_is_written_from_the_summary(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "page.md")
    monkeypatch.setattr(tool, "INTRODUCTION", tmp_path / "page.txt")
    (tmp_path / "page.txt").write_text("By hand.\n")
    (tmp_path / "summary.txt").write_text(
        "on some GPU, NCCL 23000; 2026-01-01\n   1.0 s  passed  ground (0.9 s): yes\n"
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "bench-x.txt").write_text("$ bench\n1 us\n")
    assert tool.write_page(tmp_path) == 0
    page = (tmp_path / "page.md").read_text()
    assert "on some GPU, NCCL 23000" in page
    assert "By hand." in page
    assert "passed  ground" in page
    assert "1 us" in page
    by_hand = (ROOT / "docs" / "gpu-results.txt").read_text().strip()
    assert by_hand in (ROOT / "docs" / "gpu-results.md").read_text()


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
