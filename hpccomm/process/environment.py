"""What the launcher says about this process, read from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """One family of launchers and the variables in which it tells a process its place.

    Only sizes that are counted per *job step* are listed: a process started inside an sbatch script without
    srun sees SLURM_NTASKS > 1 and is alone all the same.
    """

    name: str
    size: str
    rank: str
    local_rank: str


# The most specific first: mpiexec inside a Slurm job sets its own variables beside those of the step.
LAUNCHERS = (
    Launcher("mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    Launcher("mpiexec (PMI)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this process, or None for a process started by hand."""
    for candidate in LAUNCHERS:
        if environ.get(candidate.size, "").isdigit():
            return candidate
    return None


def silent_singleton(mpi_size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what to do about it if a launcher started N processes that each see a world of one; otherwise None.

    This happens when the launcher and the MPI library do not speak the same protocol: every process then runs
    the whole job alone, and N of them overwrite each other's results.
    """
    started_by = launcher(environ)
    if mpi_size != 1 or started_by is None or int(environ[started_by.size]) <= 1:
        return None
    if started_by.name == "srun":
        remedy = (
            "srun has to speak the MPI library's protocol: try `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` "
            "(MPICH); `srun --mpi=list` shows what there is. mpiexec inside sbatch or salloc works without it"
        )
    else:
        remedy = (
            "mpiexec and mpi4py use different MPI libraries: start the job with the mpiexec of the MPI that "
            "`python -m mpi4py --mpi-library` shows (`which mpiexec` tells which one runs now)"
        )
    return (
        f"{started_by.name} started {environ[started_by.size]} processes, but MPI says that this one is alone "
        f"(world size 1). {remedy}. If separate worlds of one rank are what you want, "
        f"pass comm=MPI.COMM_SELF"
    )
