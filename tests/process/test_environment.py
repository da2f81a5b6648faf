from __future__ import annotations

import pytest

from hpccomm.process.environment import launcher, silent_singleton

pytestmark = pytest.mark.serial


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun (Open MPI)"),
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, "mpiexec (PMI)"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # inside an sbatch script: one process
        ({"FLUX_JOB_SIZE": "4"}, "flux run"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "MVAPICH"),
        ({"PMI_SIZE": "four"}, None),
    ],
)
def test_who_started_this_process(environ: dict[str, str], name: str | None) -> None:
    found = launcher(environ)
    assert (found.name if found else None) == name


def test_srun_without_the_right_pmi_is_told_what_to_type() -> None:
    said = silent_singleton(1, {"SLURM_STEP_NUM_TASKS": "4"})
    assert said is not None
    assert "srun started 4 processes, but MPI says that this one is alone" in said
    assert "--mpi=pmix" in said
    assert "--mpi=pmi2" in said
    assert "comm=MPI.COMM_SELF" in said


def test_the_mpiexec_of_another_mpi_is_told_what_to_look_at() -> None:
    said = silent_singleton(1, {"OMPI_COMM_WORLD_SIZE": "2"})
    assert said is not None
    assert "mpiexec and mpi4py use different MPI libraries" in said


@pytest.mark.parametrize(
    ("size", "environ"),
    [(4, {"PMI_SIZE": "4"}), (1, {}), (1, {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}), (1, {"PMI_SIZE": "1"})],
)
def test_launches_that_are_in_order(size: int, environ: dict[str, str]) -> None:
    assert silent_singleton(size, environ) is None
