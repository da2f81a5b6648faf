"""hpccomm info: what it says of this machine, and of others that are imitated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

import tests
from hpccomm.cli import info
from hpccomm.cli import main as cli
from hpccomm.cuda import seam
from hpccomm.job import cuda_aware
from hpccomm.job.mpi_library import path_of_library

from ..launch import clean_environment, launch


def facts(gpu: bool = False) -> dict[str, str]:
    return {name: text for name, text, *_ in info.collect(gpu) if text}


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.fixture
def fake_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of CuPy's name; it is forgotten after the test."""
    package = tmp_path / "cupy"
    (package / "cuda").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '14.0.0'\nfrom . import cuda\n")
    (package / "cuda" / "__init__.py").write_text("from . import runtime\n")
    (package / "cuda" / "runtime.py").write_text(
        "def getDeviceCount(): return 2\ndef getDeviceProperties(device): return {'name': b'H200 %d' % device}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl", "cupy.cuda.runtime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        del sys.modules[name]


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module with an NCCL, behind the seam."""
    module = tmp_path / "provider_of_test_info.py"
    module.write_text("class NCCL:\n    bindings = 'nccl4py'\n    def version(self): return 22703\n")
    monkeypatch.setattr(tests, "__path__", [str(tmp_path), *tests.__path__])
    monkeypatch.setenv("HPCCOMM_GPU_PROVIDER", f"tests.{module.stem}")
    monkeypatch.delitem(sys.modules, f"tests.{module.stem}", raising=False)
    seam.nccl.cache_clear()
    yield module
    seam.nccl.cache_clear()


def test_mpi_is_described_as_it_is(no_cupy: None) -> None:
    found = facts()
    assert found["MPI"].split()[0] in ("MPICH", "Open")
    assert found["MPI standard"] == ".".join(map(str, MPI.Get_version()))
    assert found["thread level"] == "multiple"
    assert found["ranks"] == str(MPI.COMM_WORLD.Get_size())
    assert Path(found["MPI library"]).name.startswith("libmpi")
    assert found["CUDA-aware MPI"] == "no: MPIX_Query_cuda_support() says so"  # the wheels are built without CUDA


@pytest.mark.serial
def test_without_cupy_it_says_what_to_install(no_cupy: None) -> None:
    found = facts()
    assert found["CuPy"] == "no: it is not installed; for GPU arrays pip install 'hpccomm[cuda13]' (or [cuda12])"
    assert found["NCCL"].startswith("no: ")


@pytest.mark.serial
@pytest.mark.usefixtures("fake_cupy", "provider")
def test_cupy_nccl_and_gpus() -> None:
    found = facts()
    assert found["CuPy"] == "14.0.0"
    assert found["NCCL"].startswith("2.27.3, called by nccl4py")  # and its file, if another test has loaded one
    assert found["GPUs"] == "not looked at; hpccomm info --gpu does"
    assert facts(gpu=True)["GPUs"] == "H200 0, H200 1"


@pytest.mark.serial
def test_each_part_may_be_missing(fake_cupy: Path, provider: Path) -> None:
    provider.write_text("raise ImportError('there is no NCCL library: pip install it')\n")
    (fake_cupy / "cuda" / "runtime.py").write_text("def getDeviceCount(): raise RuntimeError('no driver')\n")
    found = facts(gpu=True)
    assert found["NCCL"] == "no: there is no NCCL library: pip install it"
    assert found["GPUs"] == "no: no driver"


@pytest.mark.serial
def test_a_cupy_that_can_not_be_imported(fake_cupy: Path) -> None:
    (fake_cupy / "__init__.py").write_text("raise ImportError('no libcudart')\n")
    assert facts()["CuPy"] == "no: it can't be imported: no libcudart"


@pytest.mark.serial
def test_the_variable_decides_over_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_aware.cuda_awareness({"HPCCOMM_CUDA_AWARE": "1"}) == (True, "HPCCOMM_CUDA_AWARE=1")
    assert cuda_aware.cuda_awareness({"HPCCOMM_CUDA_AWARE": "0"}) == (False, "HPCCOMM_CUDA_AWARE=0")
    with pytest.raises(ValueError, match="HPCCOMM_CUDA_AWARE is 'yes'; expected 0 or 1"):
        cuda_aware.cuda_awareness({"HPCCOMM_CUDA_AWARE": "yes"})
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "yes")
    assert facts()["CUDA-aware MPI"] == "no: HPCCOMM_CUDA_AWARE is 'yes'; expected 0 or 1"


@pytest.mark.serial
def test_a_library_that_does_not_tell_counts_as_not_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_aware, "path_of_library", lambda name: None)
    assert cuda_aware.cuda_awareness({}).is_proven is False
    monkeypatch.setattr(cuda_aware, "path_of_library", lambda name: path_of_library("libc"))
    awareness = cuda_aware.cuda_awareness({})
    assert not awareness.is_proven
    assert awareness.reason.startswith("the library has no MPIX_Query_cuda_support")


@pytest.mark.serial
def test_libraries_are_found_by_their_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/libmpicxx.so.12\n"
        "7f02-7f03 r-xp 00000000 fe:00 2 /a place/libmpi.so.40.1\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
    )
    assert path_of_library("libmpi", str(maps)) == "/a place/libmpi.so.40.1"
    assert path_of_library("libnccl", str(maps)) is None
    assert path_of_library("libmpi", str(tmp_path / "none")) is None


def test_the_command(capsys: pytest.CaptureFixture[str], no_cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "is_first_process", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cli.main(["info"]) == 0
    assert "\nCUDA-aware MPI   no: " in capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["thread level"] == "multiple"
    assert (found["ranks"], len(found["bindings"])) == (MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_size())
    assert found["nodes"] == [MPI.Get_processor_name()]
    assert found["bindings"][MPI.COMM_WORLD.Get_rank()]["cpus"] == sorted(os.sched_getaffinity(0))
    assert found["bindings"][0]["threads"] == 3
    assert isinstance(found["odd"], list)
    assert not [name for name in found if name.startswith("rank ") or found[name] == ""]


@pytest.mark.serial
@pytest.mark.usefixtures("fake_cupy", "provider")
def test_the_gpus_in_json_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--gpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["GPUs"] == ["H200 0", "H200 1"]


@pytest.mark.serial
def test_one_process_of_a_job_prints() -> None:
    done = launch(2, sys.executable, "-m", "hpccomm", "info")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MPI standard") == 1
    assert "ranks            2" in done.stdout
    assert "launcher         mp" in done.stdout
    assert "rank 0 of 2, local rank 0 of 2" in done.stdout
    assert f"nodes            1: {MPI.Get_processor_name()}\n" in done.stdout
    assert "placement        launcher and MPI agree" in done.stdout
    assert re.search(r"^ranks? [-\d]+ +\S+: (all|CPUs) .*OMP_NUM_THREADS", done.stdout, re.MULTILINE)


@pytest.mark.serial
def test_a_pipe_that_ends_early_is_no_error() -> None:
    command = [sys.executable, "-m", "hpccomm", "bench", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.serial
@pytest.mark.skipif("MPICH" not in MPI.Get_library_version(), reason="only MPICH can pretend")
def test_where_launcher_and_mpi_differ_it_says_what_that_means() -> None:
    done = launch(2, sys.executable, "-m", "hpccomm", "info", env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert done.returncode == 0, done.stderr
    host = MPI.Get_processor_name()
    assert f"nodes            2, 1 rank each: {host},{host}\n" in done.stdout
    assert "placement        launcher and MPI differ, and hpccomm goes by MPI. local size of rank 0: 2" in done.stdout


@pytest.mark.serial
@pytest.mark.parametrize(
    ("variables", "placement"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "wrong: srun started 4 processes, but MPI says that"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "this Slurm job has 4 tasks, but the program was started without"),
    ],
)
def test_a_process_that_is_alone_is_told_what_to_type(variables: dict[str, str], placement: str) -> None:
    command = [sys.executable, "-m", "hpccomm", "info", "--json"]
    environment = {**clean_environment(), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = json.loads(done.stdout)["placement"]
    assert said.startswith(placement)
    assert re.search(r"`srun --mpi=(pmi2|pmix) .* -m hpccomm info --json`", said)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("nodes", "hosts", "words"),
    [
        ([0], ["a"], "1: a"),
        ([0, 0], ["a", "a"], "1: a"),
        ([0, 1], ["n1", "n2"], "2, 1 rank each: n[1-2]"),
        ([0, 1, 0, 1], ["n1", "n2"] * 2, "2, 2 ranks each: n[1-2]"),
        ([0, 0, 1], ["n1", "n1", "gpu7"], "2, 1 to 2 ranks each: n1,gpu7"),
    ],
)
def test_nodes_in_words(nodes: list[int], hosts: list[str], words: str) -> None:
    assert info.describe_nodes(nodes, hosts) == words


@pytest.mark.serial
def test_what_srun_says_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert facts()["launcher"] == "srun, rank 2 of 4, local rank 0 of 2, node 1 of 2, node[01-02]"
