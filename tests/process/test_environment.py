"""What launchers say, from dictionaries like those that they make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hpccomm.process.environment import LAUNCHERS, Seen, disagreements, launcher, placement

pytestmark = pytest.mark.serial

# As they were seen: Open MPI's and MPICH's own mpiexec (MPICH's on two pretended hosts); srun with each --mpi, by its
# manual and its plugins' source; Flux by flux-environment(7).
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_FD": "7"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "node[01-02],gpu5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
PMI2 = {"PMI_SIZE": "5", "PMI_RANK": "4", "PMI_FD": "9", "PMI_JOBID": "7.0"}
PMIX = {"PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
PALS = {
    "PMI_SIZE": "4",
    "PMI_RANK": "3",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
}
FLUX = {
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_RANK": "2",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_NNODES": "2",
    "PMI_SIZE": "4",
    "PMI_RANK": "2",
    "PMI_FD": "5",
}
MVAPICH = {
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PROXY = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}  # of the step in which mpiexec starts its helpers

SRUNS_PLACE = ("srun", 5, 4, 0, 1, 2, 3, ("node01", "node02", "gpu5"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPEN_MPI, ("mpirun (Open MPI)", 4, 3, 1, 2, None, None, None)),
        ({**PROXY, **OPEN_MPI}, ("mpirun (Open MPI)", 4, 3, 1, 2, None, None, None)),
        (HYDRA, ("mpiexec (Hydra)", 3, 2, 0, 1, None, None, None)),
        ({**PROXY, **HYDRA}, ("mpiexec (Hydra)", 3, 2, 0, 1, None, None, None)),
        (MVAPICH, ("mpirun_rsh (MVAPICH)", 4, 2, 0, 2, None, None, None)),
        (SRUN, SRUNS_PLACE),
        ({**SRUN, **PMI2}, SRUNS_PLACE),
        ({**SRUN, **PMIX}, SRUNS_PLACE),
        ({**PALS, **SRUN}, SRUNS_PLACE),  # srun --mpi=cray_shasta
        (PALS, ("mpiexec (Cray PALS)", 4, 3, 1, 2, 1, None, None)),
        (FLUX, ("flux run", 4, 2, 0, None, None, 2, None)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("mpiexec (PMI)", 2, 1, None, None, None, None, None)),
    ],
)
def test_what_each_launcher_says(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    told = placement(environ)
    assert told is not None
    assert (told.launcher.name, *told[1:]) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # inside an sbatch script: one process
        {"PMI_SIZE": "four"},
        {"MPI_LOCALNRANKS": "2"},
    ],
)
def test_processes_started_by_hand(environ: dict[str, str]) -> None:
    assert launcher(environ) is None
    assert placement(environ) is None


# Of `srun --ntasks=5 --pty bash`, as Slurm 22.05 sets them; a step that is started there inherits SLURM_PTY_PORT.
SHELL = {**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_PTY_PORT": "40111"}


@pytest.fixture(scope="module")
def tasks() -> Iterator[dict[str, str]]:
    """Return the numbers of processes that may be the task that Slurm has started."""
    ours, theirs = os.openpty()
    opens = "import os, sys; sys.argv[1:] and os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", opens, *terminal],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the first terminal that it opens is then its own
        )
        for terminal in ([os.ttyname(theirs)], [])
    ]
    for each in started:
        assert each.stdout is not None
        each.stdout.readline()
    shell, step = (str(each.pid) for each in started)
    yield {"a shell": shell, "without a terminal": step, "this process": str(os.getpid()), "has ended": str(2**22 + 1)}
    for each in started:
        each.communicate()
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("task", "more", "expected"),
    [
        ("a shell", {}, None),
        ("a shell", PMI2 | {"PMI_RANK": "0"}, None),
        ("a shell", PMIX | {"PMIX_RANK": "0"}, None),
        ("a shell", PALS, None),
        ("has ended", {}, None),
        ("", {}, None),
        ("a shell", HYDRA, "mpiexec (Hydra)"),  # started in the shell
        ("a shell", OPEN_MPI, "mpirun (Open MPI)"),
        ("this process", {}, "srun"),  # srun in the shell, or srun --pty python
        ("without a terminal", {}, "srun"),  # srun in the shell, and a script that starts Python
        ("a shell", {"SLURM_PROCID": "1"}, "srun"),
    ],
)
def test_processes_started_in_the_shell_of_srun(
    tasks: dict[str, str], task: str, more: dict[str, str], expected: str | None
) -> None:
    found = launcher({**SHELL, **({"SLURM_TASK_PID": tasks[task]} if task else {}), **more})
    assert (found and found.name) == expected


def test_what_makes_no_sense_counts_as_not_told() -> None:
    told = placement({**SRUN, "SLURM_STEP_NODELIST": "node[1-", "SLURM_LOCALID": "zero", "SLURM_NODEID": "9"})
    assert told is not None
    assert (told.local_rank, told.local_size, told.node_list, told.node_count) == (None, None, None, 3)


def test_every_row_has_a_rank_and_a_size() -> None:
    assert all(row.size and row.rank for row in LAUNCHERS)
    assert len({row.name for row in LAUNCHERS}) == len(LAUNCHERS)


# -- beside MPI --------------------------------------------------------------------------------------


def told(**variables: str) -> Any:
    return placement({**HYDRA, **variables})


def test_where_both_agree_nothing_is_said() -> None:
    assert disagreements([Seen(2, 3, 0, 1, placement(HYDRA)), Seen(0, 3, 0, 2, None)]) == []


def test_a_node_that_mpi_sees_as_two() -> None:
    ranks = [
        Seen(
            rank, 4, rank % 2, 2, told(PMI_SIZE="4", PMI_RANK=str(rank), MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="4")
        )
        for rank in range(4)
    ]
    (said,) = disagreements(ranks)
    assert said.startswith(
        "local size of rank 0: 4 says the launcher, 2 says MPI (4 ranks differ): a node of MPI is what"
    )
    assert "/dev/shm" in said


def test_other_ranks_and_sizes() -> None:
    (size,) = disagreements([Seen(2, 6, 0, 1, told())])
    assert size.startswith("size of rank 2: 3 says the launcher, 6 says MPI: the job")
    (rank,) = disagreements([Seen(1, 3, 0, 1, told())])
    assert rank.startswith("rank of rank 1: 2 says the launcher, 1 says MPI: MPI has given the ranks an order")
    (local,) = disagreements([Seen(2, 3, 1, 2, told(MPI_LOCALNRANKS="2"))])
    assert local.startswith("local rank of rank 2: 0 says the launcher, 1 says MPI: MPI counts")
