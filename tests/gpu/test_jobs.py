"""The jobs on GPUs: on real ones, or with NumPy under CuPy's name and the stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ..launch import IMITATED_GPU, launch
from . import gpus

pytestmark = pytest.mark.serial


def run_job(ranks: int, job: str, *arguments: str | Path) -> str:
    """Run a job that has to succeed, and return its output."""
    environment = {} if gpus.is_real() else IMITATED_GPU
    ended = launch(ranks, sys.executable, f"jobs/{job}.py", *arguments, timeout=gpus.PATIENCE, env=environment)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.endswith("OK\n")
    return ended.stdout


def numbers_of_ranks() -> list[int]:
    if not gpus.is_real():
        return [2, 4]
    import cupy

    return [n for n in (1, 2, 4) if n <= cupy.cuda.runtime.getDeviceCount()]


def trained(ranks: int, device: str, folder: Path) -> np.ndarray:
    """Return the weights after a short training."""
    file = folder / f"{device}-{ranks}.npz"
    arguments = ["--quiet", "--epochs", "3", "--require-accuracy", "0", "--device", device, "--save-weights", file]
    run_job(ranks, "train_digits", *arguments)
    weights: np.ndarray = np.load(file)["weights"]
    return weights


def test_training_on_gpus_gives_the_weights_of_the_host(tmp_path: Path) -> None:
    expected = trained(1, "cpu", tmp_path)
    assert expected.any()
    for ranks in numbers_of_ranks()[: None if gpus.is_real() else 1]:
        np.testing.assert_allclose(trained(ranks, "cuda", tmp_path), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", numbers_of_ranks())
def test_heat_on_gpus_equals_the_serial_answer(ranks: int, tmp_path: Path) -> None:
    printed = run_job(
        ranks, "heat2d", "--device", "cuda", "--size", "37", "--steps", "50", "--output", tmp_path / "heat.png"
    )
    assert "equals the serial answer bit for bit" in printed


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
@pytest.mark.parametrize("ranks", numbers_of_ranks()[:1])
def test_both_devices_in_one_group(ranks: int, transport: str) -> None:
    printed = run_job(ranks, "mixed_devices", "--points", "100000", "--transport", transport)
    assert "host cpu: 2.0000000" in printed
    assert "GPU cuda: 2.0000000" in printed
    assert f"cpu:mpi,cuda:{transport}" in printed
