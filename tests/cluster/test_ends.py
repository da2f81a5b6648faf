"""Jobs that end early: cancelled, preempted, at their time limit, with their node; and jobs that hang."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from .slurm import HERE, MPI_TYPE, PROGRAMS, ROOT, Job, eventually, processes, run, sbatch, succeeded

ENDLESS = PROGRAMS / "endless.py"
EPOCHS = ["--epochs", "12", "--save-weights", "weights.npz"]


@pytest.fixture
def slow(folder: Path) -> list[str]:
    """Return the arguments for a training that takes 20 ms a step, and put it into the folder."""
    text = (ROOT / "jobs" / "train_digits.py").read_text()
    assert "time.sleep(1e-3)" in text
    (folder / "jobs").unlink()
    (folder / "jobs").mkdir()
    (folder / "jobs" / "train_digits.py").write_text(text.replace("time.sleep(1e-3)", "time.sleep(20e-3)"))
    return [*EPOCHS, "--every", "1", "--straggler", "0"]


def started(folder: Path, launcher: str, *arguments: str, nodes: int = 2) -> Job:
    """Submit the endless program on four ranks, and wait until it communicates."""
    script = folder / "endless"
    script.write_text(f"#!/bin/bash\n{launcher} {sys.executable} {ENDLESS} {' '.join(arguments)}\n")
    job = sbatch(f"--nodes={nodes}", f"--ntasks-per-node={4 // nodes}", script, cwd=folder)
    job.says("ten done")
    return job


LAUNCHERS = [f"srun --mpi={MPI_TYPE}", "mpirun"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scancel_in_the_middle_of_a_collective_leaves_no_process_on_any_node(launcher: str, folder: Path) -> None:
    job = started(folder, launcher)
    assert len(processes(f"{sys.executable} {ENDLESS}")) >= 4
    succeeded(run("scancel", job.number))
    assert job.becomes("CANCELLED") == "CANCELLED"
    eventually(lambda: not processes(str(ENDLESS)), says=lambda: "\n".join(processes(str(ENDLESS))))


def weights(file: Path) -> bytes:
    return bytes(np.load(file)["weights"].tobytes())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights of a training that nobody stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    shape = ["--nodes=2", "--ntasks-per-node=2", f"--mpi={MPI_TYPE}"]
    succeeded(run("srun", *shape, sys.executable, ROOT / "jobs" / "train_digits.py", "--quiet", *EPOCHS, cwd=folder))
    return weights(folder / "weights.npz")


def begun(slow: list[str], folder: Path) -> Job:
    """Submit a training that may be stopped, and wait for its first checkpoint."""
    job = sbatch("slurm/requeue.sbatch", *slow, cwd=folder)
    eventually(lambda: list(folder.glob("checkpoints-*/step-*.json")), says=job.describe)
    return job


def goes_on(job: Job) -> str:
    """Wait until the job is in the queue again, start it without Slurm's delay of 2 minutes, and return its output."""
    eventually(lambda: job.state() == "PENDING" and job.field("Restarts") == "1", says=job.describe)
    # not at once: Slurm refuses a job that starts in the second in which it has ended
    succeeded(run("scontrol", "update", f"JobId={job.number}", "StartTime=now+2"))
    said = job.succeeds()
    assert "going on after step" in said
    return said


def test_a_preempted_job_saves_goes_back_to_the_queue_and_ends_with_the_same_weights(
    uninterrupted: bytes, slow: list[str], folder: Path
) -> None:
    job = begun(slow, folder)
    urgent = sbatch("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder)
    assert "stopped by a signal after step" in goes_on(job)
    urgent.succeeds()
    assert weights(folder / "weights.npz") == uninterrupted


def test_a_job_that_is_told_that_its_time_is_over_does_the_same(
    uninterrupted: bytes, slow: list[str], folder: Path
) -> None:
    job = begun(slow, folder)
    succeeded(run("scancel", "--signal=USR1", job.number))  # what --signal=USR1@60 lets Slurm do
    assert "stopped by a signal after step" in goes_on(job)
    assert weights(folder / "weights.npz") == uninterrupted


def test_a_job_whose_node_goes_down_is_queued_again_and_goes_on_from_the_last_checkpoint(
    uninterrupted: bytes, slow: list[str], folder: Path
) -> None:
    job = begun(slow, folder)
    os.kill(int(Path("/run/hpccomm-cluster/nodes/node2").read_text()), signal.SIGKILL)
    try:
        job.becomes("PENDING")  # by the script, or when Slurm has noticed
    finally:
        succeeded(run(HERE / "boot", "node2"))
        states = ["sinfo", "--noheader", "--Node", "--partition=normal", "--format=%t"]
        eventually(lambda: run(*states).stdout == "idle\nidle\n", says=lambda: run(*states).stdout)
    goes_on(job)
    assert weights(folder / "weights.npz") == uninterrupted


@pytest.mark.parametrize(("launcher", "nodes"), [(LAUNCHERS[0], 2), (LAUNCHERS[1], 2), (LAUNCHERS[1], 1)])
def test_hpccomm_debug_names_the_rank_that_a_hung_job_waits_for(launcher: str, nodes: int, folder: Path) -> None:
    job = started(folder, launcher, "2", nodes=nodes)
    said = ""

    def the_culprit_is_named() -> bool:  # as soon as all ranks are where they stay
        nonlocal said
        asked = run(Path(sys.executable).parent / "hpccomm", "debug", "--job", job.number, cwd=folder)
        said = f"{asked.stdout}{asked.stderr}"
        is_named = re.search(r"rank 2 never reached all_reduce #\d+ .*endless.py", asked.stdout)
        return asked.returncode == 1 and asked.stdout.startswith("4 of 4 ranks") and is_named is not None

    eventually(the_culprit_is_named, says=lambda: said)
    eventually(the_culprit_is_named, says=lambda: said)  # again: the job goes on
    assert job.state() == "RUNNING"
