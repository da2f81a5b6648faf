"""The scripts of slurm/ as a user submits them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ..launch import launch
from .slurm import IS_OPEN_MPI, ROOT, eventually, run, sbatch, succeeded

SCRIPTS = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))
GPU = {"mixed_devices.sbatch", "train_digits_gpu.sbatch"}
# What keeps a job short.
SMALL = {
    "benchmark.sbatch": ["--end", "4K", "--budget", "0.01"],
    "conjugate_gradient.sbatch": ["--side", "40"],
    "elastic_training.sbatch": ["--steps", "150", "--kill", "3@60"],
    "fft_pencils.sbatch": ["--shape", "20", "21", "22"],
    "heat2d.sbatch": ["--size", "60", "--steps", "100"],
    "particles.sbatch": ["--size", "16", "--steps", "50"],
    "sample_sort.sbatch": ["--size", "100000"],
    "seeds.sbatch": ["--epochs", "6", "--require-accuracy", "50"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_would_run_it(script: str) -> None:
    ended = run("sbatch", "--test-only", f"slurm/{script}")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Job \d+ to start at", ended.stderr)


@pytest.mark.once
def test_shellcheck_finds_nothing() -> None:
    cluster = [ROOT / "tests" / "cluster" / name for name in ("test", "up", "boot", "node", "down")]
    succeeded(run("shellcheck", "--external-sources", *cluster, *(ROOT / "slurm").glob("*.s*")))


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_states_its_resources_and_shows_the_environment(script: str) -> None:
    text = (ROOT / "slurm" / script).read_text()
    for option in ("--job-name=", "--nodes=", "--ntasks", "--cpus-per-task=", "--mem-per-cpu=", "--time=", "--output="):
        assert f"#SBATCH {option}" in text
    assert "hpccomm info" in text
    assert "mpirun" in text


def test_train_digits_on_two_nodes_prints_the_accuracy_of_make_demo(folder: Path) -> None:
    demo = launch(4, sys.executable, "jobs/train_digits.py", "--quiet")
    expected = demo.stdout.splitlines()[-1]
    assert "test accuracy 98.9 %  OK" in expected
    said = sbatch("slurm/train_digits.sbatch", cwd=folder).succeeds()
    assert said.splitlines()[-1] == expected
    assert re.search(r"^ranks +4$", said, re.M)  # hpccomm info


@pytest.mark.parametrize("script", ["train_digits.sbatch", "heat2d.sbatch"])
def test_the_other_way_that_the_script_names_works_too(script: str, folder: Path) -> None:
    text = (ROOT / "slurm" / script).read_text()
    assert "# or: mpirun " in text
    copied = folder / script
    copied.write_text(text.replace("\nsrun", "\n#srun").replace("# or: mpirun", "mpirun"))
    said = sbatch(script, *SMALL.get(script, ["--epochs", "20"]), cwd=folder).succeeds()
    assert said.endswith("OK\n")
    assert "ranks 4 " in said.splitlines()[-1]


@pytest.mark.parametrize(
    "script",
    ["heat2d.sbatch", "sample_sort.sbatch", "conjugate_gradient.sbatch", "fft_pencils.sbatch", "particles.sbatch"],
)
def test_it_ends_well(script: str, folder: Path) -> None:
    said = sbatch(f"slurm/{script}", *SMALL[script], cwd=folder).succeeds()
    assert said.endswith("OK\n")
    if script == "heat2d.sbatch":
        assert len(list(folder.glob("heat-*.png"))) == 1
    if script == "fft_pencils.sbatch":
        assert len(list(folder.glob("fft-*.png"))) == 1
    if script == "particles.sbatch":
        assert {path.name for path in folder.glob("particles-*/*")} == {"water.png", "places.npz"}
    if script == "conjugate_gradient.sbatch":
        assert "4 threads in each task" in said
        assert "ranks 2 " in said


@pytest.mark.once
def test_the_job_array_trains_with_every_seed(folder: Path) -> None:
    job = sbatch("slurm/seeds.sbatch", *SMALL["seeds.sbatch"], cwd=folder)
    outputs = [folder / f"seeds-{job.number}_{seed}.out" for seed in range(4)]
    eventually(lambda: not run("squeue", "--noheader").stdout, timeout=120)
    assert [output.read_text().splitlines()[-1].rpartition(" ")[2] for output in outputs] == ["OK"] * 4
    weights = [np.load(folder / f"weights-{seed}.npz")["weights"].tobytes() for seed in range(4)]
    assert len(set(weights)) == 4


@pytest.mark.once
def test_the_chain_goes_on_job_by_job_and_ends_like_one_training(folder: Path) -> None:
    said = succeeded(run("bash", "slurm/chain.sh", cwd=folder))
    eventually(lambda: not run("squeue", "--noheader").stdout, timeout=150)
    outputs = [(folder / f"train_digits-{number}.out").read_text() for number in re.findall(r"\d+", said)]
    assert "going on" not in outputs[0]
    assert "going on after step 230" in outputs[1]
    assert "going on after step 460" in outputs[2]
    assert "loss 0.0301  test accuracy 98.9 %" in outputs[2]


@pytest.mark.skipif(not IS_OPEN_MPI, reason="only Open MPI survives dead ranks")
def test_elastic_training_goes_on_when_a_rank_of_another_host_dies(folder: Path) -> None:
    said = sbatch("slurm/elastic_training.sbatch", *SMALL["elastic_training.sbatch"], cwd=folder).succeeds()
    assert "3 ranks are left" in said
    assert re.search(r"^ranks 3 .* OK$", said, re.M)


@pytest.mark.once
def test_the_benchmark_measures_every_shape(folder: Path) -> None:
    job = sbatch("slurm/benchmark.sbatch", *SMALL["benchmark.sbatch"], cwd=folder)
    said = job.succeeds(timeout=200)
    assert said.count("== ") == 6
    names = {path.name.removeprefix(f"benchmark-{job.number}-") for path in folder.glob("benchmark-*.json")}
    assert names == {f"{nodes}x{tasks}.json" for nodes in (1, 2) for tasks in (1, 2, 4)}
