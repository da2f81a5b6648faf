"""The programs in jobs/: each gives the right answer on several ranks, and notices a wrong one.

They are started with an mpiexec of their own, so the 1-rank run of the suite tests them on all numbers of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from .job_checks import assert_failure_on_every_rank, assert_help_shows_the_command_to_type
from .launch import IMITATED_GPU, ROOT, launch

pytestmark = pytest.mark.serial

# those of PyTorch are in tests/torch
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if not path.stem.startswith("torch_"))


def run_job(ranks: int, job: str, *arguments: str | Path) -> str:
    """Run a job that has to end well, and return what it printed."""
    ended = launch(ranks, sys.executable, f"jobs/{job}.py", *arguments)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.endswith("OK\n")
    assert f"ranks {ranks} " in ended.stdout.splitlines()[-1]
    return ended.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    """Return the weights after a short training, by number of ranks."""
    folder = tmp_path_factory.mktemp("weights")
    weights = {}
    for ranks in (1, 2, 4):
        file = folder / f"{ranks}.npz"
        # 1437 images in batches of 41: uneven shares, and a last batch of 2, of which two of four ranks get nothing
        run_job(ranks, "train_digits", "--quiet", "--epochs", "6", "--batch", "41", "--save-weights", file)
        weights[ranks] = np.load(file)["weights"]
    return weights


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_on_several_ranks_gives_the_weights_of_one(trained: dict[int, np.ndarray], ranks: int) -> None:
    assert trained[1].any()
    np.testing.assert_allclose(trained[ranks], trained[1], rtol=0, atol=1e-6)


# The job in a program that gives rank 1 a signal in the middle of its 30th step.
STOPPING = """
import os, runpy, signal, sys
import hpccomm as hc
steps, whole = [], hc.GradientBuckets.wait
def wait(self):
    steps.append(self)
    if len(steps) == 30 and hc.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    whole(self)
hc.GradientBuckets.wait = wait
sys.argv = ["train_digits.py", *{arguments!r}]
runpy.run_path("jobs/train_digits.py", run_name="__main__")
"""


def test_a_training_that_was_stopped_by_a_signal_gives_bitwise_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    small = ["--quiet", "--epochs", "4", "--batch", "101", "--require-accuracy", "50"]
    run_job(2, "train_digits", *small, "--save-weights", tmp_path / "whole.npz")
    small += ["--checkpoint", str(tmp_path / "checkpoints"), "--save-weights", str(tmp_path / "resumed.npz")]
    stopped = launch(2, sys.executable, "-c", STOPPING.format(arguments=small))
    assert stopped.returncode == 75, f"{stopped.stdout}\n{stopped.stderr}"
    assert "stopped by a signal after step 30" in stopped.stdout
    assert not (tmp_path / "resumed.npz").exists()
    assert "going on after step 30" in run_job(2, "train_digits", *small)
    whole, resumed = (np.load(tmp_path / f"{name}.npz")["weights"] for name in ("whole", "resumed"))
    assert whole.tobytes() == resumed.tobytes()
    other = launch(1, sys.executable, "jobs/train_digits.py", *small, "--seed", "1")
    assert other.returncode != 0
    assert "is of a training with" in other.stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_training_shows_its_progress_on_stderr_of_one_rank_and_only_if_wanted(quiet: bool) -> None:
    arguments = ["--epochs", "3", "--require-accuracy", "0", *["--quiet"] * quiet]
    ended = launch(2, sys.executable, "jobs/train_digits.py", *arguments)
    assert ended.stderr.count("0/3") == (0 if quiet else 1)
    assert len(ended.stdout.splitlines()) == 3


@pytest.mark.parametrize("ranks", [1, 4])  # and on 2 below
def test_heat_equals_the_serial_answer_and_writes_a_png(ranks: int, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "heat.png"  # the folder is made
    run_job(ranks, "heat2d", "--size", "61", "--steps", "100", "--output", picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_heat_on_blocks_of_a_single_row(tmp_path: Path) -> None:
    run_job(3, "heat2d", "--size", "5", "--steps", "20", "--output", tmp_path / "heat.png")


@pytest.mark.parametrize("ranks", [1, 4])
def test_sample_sort_equals_numpy(ranks: int) -> None:
    run_job(ranks, "sample_sort", "--size", "100003")


@pytest.mark.parametrize("size", [0, 2])
def test_sample_sort_of_fewer_numbers_than_ranks(size: int) -> None:
    run_job(3, "sample_sort", "--size", str(size))


@pytest.mark.parametrize("ranks", [1, 4])
def test_conjugate_gradient_agrees_with_the_direct_solver(ranks: int) -> None:
    assert "off the direct solver by" in run_job(ranks, "conjugate_gradient", "--side", "41")


def test_reproducible_conjugate_gradients_print_the_same_iterates_on_any_number_of_ranks() -> None:
    printed = {}
    for ranks in (1, 2, 3, 4):
        printed[ranks] = run_job(ranks, "conjugate_gradient", "--side", "23", "--reproducible").splitlines()[:-1]
    iterates = [line.split()[-1] for line in printed[1] if line.startswith("iteration")]
    assert len(iterates) > 20
    assert all(repr(float(each)) == each for each in iterates)  # to the last bit
    assert any(line.startswith("checksum of the solution") for line in printed[1])
    assert printed[1] == printed[2] == printed[3] == printed[4]


def test_conjugate_gradient_on_more_ranks_than_unknowns() -> None:
    run_job(3, "conjugate_gradient", "--side", "1")


@pytest.mark.parametrize("ranks", [1, 4])
def test_fft_on_axes_that_the_ranks_do_not_divide_finds_the_solution_and_writes_a_png(
    ranks: int, tmp_path: Path
) -> None:
    picture = tmp_path / "new" / "fft.png"  # the folder is made
    printed = run_job(ranks, "fft_pencils", "--shape", "11", "13", "7", "--repeat", "2", "--output", picture)
    assert "off the known one by" in printed
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_fft_with_ranks_that_get_no_cells(tmp_path: Path) -> None:
    run_job(3, "fft_pencils", "--shape", "1", "3", "2", "--output", tmp_path / "fft.png")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    """Return where the particles are in the end, by number of ranks."""
    folder = tmp_path_factory.mktemp("particles")
    places = {}
    for ranks in (1, 3, 4):
        file = folder / f"{ranks}.npz"
        run_job(ranks, "particles", "--size", "20", "--output", folder / f"{ranks}.png", "--save", file)
        assert (folder / f"{ranks}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        places[ranks] = np.load(file)["places"]
    return places


@pytest.mark.parametrize("ranks", [3, 4])
def test_particles_on_several_ranks_move_as_on_one(moved: dict[int, np.ndarray], ranks: int) -> None:
    apart = np.abs(moved[ranks] - moved[1])
    assert np.minimum(apart, 20 - apart).max() < 1e-9  # 0 and 20 are the same place
    assert moved[1].std() > 1


def test_particles_on_blocks_of_a_single_cell(tmp_path: Path) -> None:
    run_job(4, "particles", "--size", "2", "--steps", "50", "--output", tmp_path / "particles.png")


@pytest.mark.parametrize("ranks", [1, 4])
def test_dummy_backend(ranks: int) -> None:
    assert "WRONG" not in run_job(ranks, "dummy_backend")


@pytest.mark.skipif(MPI.get_vendor()[0] != "Open MPI", reason="only Open MPI survives dead ranks")
def test_training_goes_on_from_the_last_checkpoint_when_ranks_die(tmp_path: Path) -> None:
    arguments = ["--steps", "300", "--kill", "0@60", "--kill", "2@140", "--folder", tmp_path]
    ended = launch(4, sys.executable, "jobs/elastic_training.py", *arguments, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    *_, first, second, last = ended.stdout.splitlines()
    assert first.endswith(": 3 ranks are left; back to step 50"), f"{ended.stdout}\n{ended.stderr}"
    assert second.endswith(": 2 ranks are left; back to step 125")
    assert last.startswith("ranks 2 ")
    assert last.endswith(" OK")
    assert (tmp_path / "DONE").read_text().startswith("step 300")


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        ("train_digits", ["--quiet", "--epochs", "1", "--require-accuracy", "101"]),
        ("conjugate_gradient", ["--side", "20", "--max-iterations", "3"]),
    ],
)
def test_a_goal_that_is_missed_is_a_failure_on_every_rank(job: str, arguments: list[str]) -> None:
    assert_failure_on_every_rank(job, arguments)


# What to break in hpccomm, so that the job loses data and has to notice.
BREAKAGES = {
    "train_digits": """
        hc.GradientBuckets.ready = lambda self, index: None  # gradients stay as they are
        hc.GradientBuckets.wait = lambda self: None
    """,
    "heat2d": """
        hc.PersistentWork.start = lambda self: None  # the frames keep their first temperatures
        hc.halo_exchange_init = lambda *arguments, **options: hc.PersistentWork()
    """,
    "sample_sort": """
        whole = hc.all_to_all_single
        hc.all_to_all_single = lambda output, input, **splits: output.fill(0) if splits else whole(output, input)
    """,
    "fft_pencils": """
        hc.PersistentWork.start = lambda self: None  # the pencils stay as they are: zeros
        hc.redistribute_init = lambda *arguments, **options: hc.PersistentWork()
    """,
    "particles": """
        hc.PersistentWork.start = lambda self: None  # what is deposited into ghosts is lost
        hc.halo_accumulate_init = hc.halo_exchange_init = lambda *arguments: hc.PersistentWork()
    """,
    "conjugate_gradient": """
        whole = hc.all_gather
        def forget(parts, mine, async_op):
            for part in parts:
                part[:] = 0
            return hc.CompletedWork()
        hc.all_gather = forget
    """,
    "dummy_backend": """
        whole = hc.all_reduce  # arrays "on the GPU" never get to the dummy
        hc.all_reduce = lambda array, *more, **named: (
            whole(array, *more, **named) if isinstance(array, np.ndarray) else hc.CompletedWork())
    """,
    "elastic_training": """
        hc.all_reduce = lambda array, op: array.fill(0)  # no gradient
    """,
    "mixed_devices": """
        whole = hc.all_reduce
        hc.all_reduce = lambda array, **named: (
            hc.CompletedWork() if hc.device_of(array) == "cuda" else whole(array, **named))
    """,
}
SMALL = {
    "train_digits": ["--quiet", "--epochs", "2", "--require-accuracy", "50"],
    "heat2d": ["--size", "40", "--steps", "100", "--output", "{folder}/heat.png"],
    "sample_sort": ["--size", "1000"],
    "fft_pencils": ["--shape", "9", "8", "7", "--output", "{folder}/fft.png"],
    "particles": ["--size", "16", "--steps", "100", "--output", "{folder}/particles.png"],
    "conjugate_gradient": ["--side", "20"],
    "dummy_backend": [],
    "elastic_training": ["--steps", "300", "--kill", "none"],
    "mixed_devices": ["--points", "100000"],
}
ENVIRONMENT = {"mixed_devices": IMITATED_GPU}


def test_every_job_is_tested_for_failure() -> None:
    assert sorted(BREAKAGES) == sorted(SMALL) == JOBS


@pytest.mark.parametrize("job", JOBS)
def test_a_wrong_answer_is_a_failure_on_every_rank(job: str, tmp_path: Path) -> None:
    arguments = [argument.format(folder=tmp_path) for argument in SMALL[job]]
    assert_failure_on_every_rank(job, arguments, BREAKAGES[job], ENVIRONMENT.get(job))


# What to break in hpccomm, and what the job says of it.
LOSSES = {
    "particles are lost": "hc.exchange_sparse = lambda leaving, group: {}",
    "do not hold the particles' water": "hc.halo_accumulate_init = lambda *arguments: Nothing()",
    "the energy has changed": "hc.halo_exchange_init = lambda *arguments: Nothing()",
}
NOTHING = """
class Nothing(hc.PersistentWork):
    def start(self):
        pass
"""


@pytest.mark.parametrize("said", LOSSES)
def test_particles_say_which_communication_has_lost_something(said: str, tmp_path: Path) -> None:
    arguments = [argument.format(folder=tmp_path) for argument in SMALL["particles"]]
    assert said in assert_failure_on_every_rank("particles", arguments, NOTHING + LOSSES[said])


@pytest.mark.parametrize("job", JOBS)
def test_the_same_command_without_the_fault_succeeds(job: str, tmp_path: Path) -> None:
    arguments = [argument.format(folder=tmp_path) for argument in SMALL[job]]
    ended = launch(2, sys.executable, f"jobs/{job}.py", *arguments, env=ENVIRONMENT.get(job))
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.mark.parametrize("job", JOBS)
def test_help_shows_the_command_to_type(job: str) -> None:
    assert_help_shows_the_command_to_type(job)
