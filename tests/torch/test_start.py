"""The start of a job of torch.distributed: refused arguments, and the environment afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ..launch import ROOT, clean_environment, launch

pytestmark = pytest.mark.serial

BEGINNINGS = """
    import os
    import torch.distributed as dist
    import hpccomm.torch
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.Get_rank()

    def begin(how, *arguments, **environment):
        os.environ |= environment
        try:
            how(*arguments)
            print(f"{rank}: began {dist.get_backend()}\\n", end="")
            MPI.COMM_WORLD.Barrier()  # gloo fails on a rank that still connects when the other one leaves
            dist.destroy_process_group()
        except Exception as error:
            print(f"{rank}: {type(error).__name__}: {error}\\n", end="")

    ours, by_environment = hpccomm.torch.init_process_group, dist.init_process_group
    begin(ours, RANK="5" if rank else "0")
    os.environ["RANK"] = str(rank)
    begin(ours, WORLD_SIZE="2" if rank else "3")
    os.environ["WORLD_SIZE"] = "2"
    hpccomm.torch.register()
    hpccomm.torch.set_environment()
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    begin(by_environment, "hpccomm", RANK=str(1 - rank))
    for backend in ("hpccomm", "gloo"):
        del os.environ["MASTER_ADDR"]
        os.environ["RANK"] = str(rank)
        hpccomm.torch.set_environment()
        begin(by_environment, backend)

    def group_of_hpccomm():
        dist.init_process_group("gloo")
        dist.new_group(backend="hpccomm")

    del os.environ["MASTER_ADDR"]
    hpccomm.torch.set_environment()
    begin(group_of_hpccomm, RANK=str(1 - rank))
    """
REMEDY = "Let MPI number the ranks: hpccomm.torch.init_process_group(), or init_method='mpi://', with RANK and "
REMEDY += "WORLD_SIZE unset"


def test_an_environment_that_disagrees_with_mpi_is_refused_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(BEGINNINGS))
    ended = launch(2, sys.executable, file, timeout=100)
    assert ended.returncode == 0, ended.stderr
    refusals = [
        "on rank 1 of MPI RANK is 5, MPI says 1",
        "on rank 0 of MPI WORLD_SIZE is 3, MPI says 2",
        "on rank 0 of MPI RANK is 1, MPI says 0",
    ]
    for rank in "01":
        *lines, last = [line[3:] for line in ended.stdout.splitlines() if line[0] == rank]
        expected = [f"ValueError: torch.distributed: {refusal}. {REMEDY}" for refusal in refusals]
        assert lines == [*expected, "began hpccomm", "began gloo"]
        assert f"ValueError: torch.distributed: rank {1 - int(rank)} is rank {rank} of MPI. Let MPI number" in last


def test_the_name_of_the_backend_is_enough(tmp_path: Path) -> None:
    if not entry_points(group="torch.distributed.backends", name="hpccomm"):
        pytest.skip("hpccomm is not installed here, only on the path")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    file = tmp_path / "program.py"
    file.write_text("import torch.distributed as dist; dist.init_process_group('hpccomm'); print(dist.get_backend())")
    ended = launch(1, sys.executable, file, timeout=100, env=environment)
    assert ended.stdout == "hpccomm\n", ended.stderr


def alone(program: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean_environment(), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr.strip().splitlines()[-1]


def test_torchrun_is_refused() -> None:
    program = """
import torch.distributed as dist, hpccomm.torch
try:
    hpccomm.torch.init_process_group()
except hpccomm.DistError as error:
    assert "torchrun started 2 processes" in str(error)
hpccomm.torch.register()
dist.init_process_group("hpccomm", init_method="mpi://")
"""
    last = alone(program, TORCHELASTIC_RUN_ID="none", WORLD_SIZE="2", RANK="0")
    assert "torchrun started 2 processes, but MPI says that this one is alone" in last
    assert "`mpiexec -n 2 " in last


def test_an_older_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('__version__ = "2.13.0+cpu"')
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    last = alone("import hpccomm.torch; hpccomm.torch.init_process_group()", PYTHONPATH=path)
    assert last == "ImportError: hpccomm.torch needs PyTorch 2.14 or newer: pip install 'hpccomm[torch]'"
