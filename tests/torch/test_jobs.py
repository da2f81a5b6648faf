"""The jobs of PyTorch: as right as one process is, whatever the backend; wrong answers and dying ranks end them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ..job_checks import assert_failure_on_every_rank, assert_help_shows_the_command_to_type
from ..launch import ROOT, launch

pytestmark = pytest.mark.serial

JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("torch_*.py"))


def run_job(ranks: int, job: str, *arguments: str | Path) -> str:
    """Run a job that has to succeed, and return its output."""
    ended = launch(ranks, sys.executable, f"jobs/{job}.py", *arguments, timeout=120)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.endswith("OK\n")
    assert f"ranks {ranks} " in ended.stdout.splitlines()[-1]
    return ended.stdout


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return the weights that train_digits.py ends with, on one rank and without PyTorch."""
    file = tmp_path_factory.mktemp("weights") / "weights.npz"
    run_job(1, "train_digits", "--quiet", *SHORT, "--save-weights", file)
    weights: np.ndarray = np.load(file)["weights"]
    return weights


# 1437 images in batches of 41: uneven shares, and a last batch of 2, of which one of three ranks gets nothing
SHORT = ["--epochs", "3", "--batch", "41", "--require-accuracy", "85"]


@pytest.mark.parametrize(("ranks", "backends"), [(3, ["hpccomm", "gloo"]), (2, ["gloo"])])
def test_ddp_learns_the_same_as_numpy_over_each_backend(
    ranks: int, backends: list[str], without_torch: np.ndarray, tmp_path: Path
) -> None:
    file = tmp_path / "weights.npz"
    *lines, _ = run_job(ranks, "torch_ddp", *SHORT, "--backend", *backends, "--save-weights", file).splitlines()
    assert [line.partition(":")[0] for line in lines] == backends
    assert len({line.rpartition("test accuracy")[2] for line in lines}) == 1
    np.testing.assert_allclose(np.load(file)["weights"], without_torch, rtol=0, atol=1e-9)


SMALL = ["--width", "16", "--layers", "1", "--require-loss", "6"]


def test_fsdp_goes_on_from_a_checkpoint_on_fewer_ranks_as_one_process_would(tmp_path: Path) -> None:
    run_job(3, "torch_fsdp", *SMALL, "--steps", "10", "--save", tmp_path)
    loaded, last = run_job(2, "torch_fsdp", *SMALL, "--steps", "20", "--load", tmp_path).splitlines()
    at_10, at_20 = losses_of_one_process([10, 20])
    assert float(loaded.split()[5].rstrip(",")) == pytest.approx(at_10, abs=1e-3)
    assert float(last.split()[5]) == pytest.approx(at_20, abs=1e-3)
    assert at_20 < at_10 - 0.1


def losses_of_one_process(steps: list[int]) -> list[float]:
    """Return the losses after these steps of a model that is not sharded."""
    specification = importlib.util.spec_from_file_location("torch_fsdp", ROOT / "jobs" / "torch_fsdp.py")
    assert specification is not None
    assert specification.loader is not None
    job: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(job)
    learned, tested = job.read(sorted(job.DOCS.glob("*.md")))
    torch.manual_seed(0)
    model = job.Transformer(width=16, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.STEP_LENGTH)
    losses = []
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        (job.loss_of(model, job.random_pieces(learned, 32, seed=step)) / 32).backward()
        optimizer.step()
        if step in steps:
            losses.append(job.loss_of(model, tested).item() / len(tested))
    return losses


# Defects to plant in hpccomm: the job loses data (the gradients' sums are wrong) and has to notice.
BREAKAGES = {
    "torch_ddp": """
whole = ProcessGroup.all_reduce
def all_reduce(self, array, *more):
    return whole(self, array if array.size == 1 else array.copy(), *more)
ProcessGroup.all_reduce = all_reduce
""",
    "torch_fsdp": """
whole = ProcessGroup.reduce_scatter_single
def reduce_scatter_single(self, output, *more):
    output[:] = 0
    return whole(self, output.copy(), *more)
ProcessGroup.reduce_scatter_single = reduce_scatter_single
""",
}
ARGUMENTS = {"torch_ddp": ["--epochs", "1", "--require-accuracy", "1"], "torch_fsdp": ["--steps", "10"]}


def test_every_job_is_tested_for_failure() -> None:
    assert sorted(BREAKAGES) == sorted(ARGUMENTS) == JOBS


@pytest.mark.parametrize("job", JOBS)
def test_a_wrong_answer_is_a_failure_on_every_rank(job: str) -> None:
    assert_failure_on_every_rank(job, ARGUMENTS[job], f"ProcessGroup = hc.ProcessGroup\n{BREAKAGES[job]}", timeout=120)


@pytest.mark.parametrize("job", JOBS)
def test_help_shows_the_command_to_type(job: str) -> None:
    assert_help_shows_the_command_to_type(job)


# Rank 1 raises in the backward pass of the third step, when the gradients of the last layers are on their way.
RAISES = """
import torch
from torch.nn import Linear, Sequential
import hpccomm.torch
{init}
layers = Sequential(*[Linear(512, 512) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)
for step in range(3):
    if step == 2 and torch.distributed.get_rank() == 1:
        layers[1].weight.register_hook(lambda gradient: 1 / 0)
    model(torch.ones(2, 512)).sum().backward()
"""
OURS = "hpccomm.torch.init_process_group()"
TORCHS = "hpccomm.torch.register(); torch.distributed.init_process_group('hpccomm', init_method='mpi://')"


AGAIN = f"{OURS}; torch.distributed.destroy_process_group(); {OURS}"


@pytest.mark.parametrize("init", [OURS, TORCHS, AGAIN], ids=["ours", "torch's", "again"])
def test_a_rank_that_raises_in_the_middle_of_backward_ends_the_job_with_its_traceback(init: str) -> None:
    ended = launch(3, sys.executable, "-c", RAISES.format(init=init), timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("ZeroDivisionError: division by zero") == 1
    assert "ZeroDivisionError on rank 1 ends the job" in ended.stderr
