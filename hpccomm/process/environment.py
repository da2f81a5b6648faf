"""The launcher's environment variables for this process.

They decide nothing: MPI does. They are compared with MPI, and they select one process to print before MPI starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from .host_list import expand, repeated
from .proc import of_process

T = TypeVar("T")
TERMINAL = 4  # index of tty_nr, counted from the process state


class Launcher(NamedTuple):
    """A family of launchers and its environment variables for a process's place; "" for variables it does not set.

    Sizes are those of a *job step*: a process that an sbatch script starts without srun sees SLURM_NTASKS > 1 but is
    alone.
    """

    name: str
    size: str
    rank: str
    local_rank: str
    local_size: str = ""
    node_rank: str = ""
    node_count: str = ""
    node_list: str = ""  # in Slurm's short form
    tasks_per_node: str = ""  # the local sizes of all nodes, also in Slurm's short form
    mark: str = ""  # a variable that must also be set, if another launcher sets the same others


OF_A_WORLD = "SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"
# The most specific first: launchers start or imitate each other.
LAUNCHERS = (
    # Open MPI, "Environment variables set for MPI applications" (docs.open-mpi.org, v5.0.x). OMPI_COMM_WORLD_NODE_RANK
    # is not the node number but the local rank among all jobs. mpirun may start its daemons by srun.
    Launcher("mpirun (Open MPI)", *(f"OMPI_COMM_WORLD_{each}" for each in OF_A_WORLD)),
    # MVAPICH2, mpirun_rsh (src/pm/mpirun/mpispawn.c). Its mpiexec is Hydra.
    Launcher("mpirun_rsh (MVAPICH)", *(f"MV2_COMM_WORLD_{each}" for each in OF_A_WORLD)),
    # flux-environment(7); it sets PMI_RANK and PMI_SIZE as well.
    Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", node_count="FLUX_JOB_NNODES"),
    # MPICH, src/pm/hydra/proxy/pmip_cb.c; Intel MPI sets the same. Inside a Slurm job Hydra starts its proxies with
    # srun, so srun's variables are also set but describe the proxies.
    Launcher("mpiexec (Hydra)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", mark="MPI_LOCALNRANKS"),
    # srun(1), "OUTPUT ENVIRONMENT VARIABLES", with any --mpi. pmi2 adds PMI_RANK and PMI_SIZE, pmix adds PMIX_*.
    Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        node_rank="SLURM_NODEID",
        node_count="SLURM_STEP_NUM_NODES",
        node_list="SLURM_STEP_NODELIST",
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
    ),
    # Cray's PALS, as imitated by Slurm (src/plugins/mpi/cray_shasta/mpi_cray_shasta.c).
    Launcher(
        "mpiexec (Cray PALS)",
        "PMI_SIZE",
        "PALS_RANKID",
        "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE",
        node_rank="PALS_NODEID",
        mark="PALS_RANKID",
    ),
    # Any other launcher that speaks PMI-1 (described in Flux's RFC 13).
    Launcher("mpiexec (PMI)", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


class Placement(NamedTuple):
    """A process's place according to its launcher; None for values the launcher does not provide."""

    launcher: Launcher
    size: int
    rank: int | None
    local_rank: int | None
    local_size: int | None
    node_rank: int | None
    node_count: int | None
    node_list: tuple[str, ...] | None


def launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this process; None if it was started by hand."""
    for candidate in LAUNCHERS:
        if environ.get(candidate.size, "").isdigit() and (not candidate.mark or candidate.mark in environ):
            return None if candidate.name == "srun" and _is_in_a_shell_of_srun(environ) else candidate
    return None


def _is_in_a_shell_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started by hand in the shell of ``srun --pty bash``.

    Such a process inherits the variables of the shell, which is task 0 of one or more tasks. srun sets SLURM_PTY_PORT
    with --pty only, but a step started in the shell inherits it. So this function also checks that Slurm's task
    (SLURM_TASK_PID, srun(1)) is another process than this one and has a terminal, like a shell.
    """
    task = environ.get("SLURM_TASK_PID", "unknown")
    if "SLURM_PTY_PORT" not in environ or environ.get("SLURM_PROCID") != "0" or task == str(os.getpid()):
        return False
    try:
        return of_process(task)[1][TERMINAL] != "0"
    except (OSError, IndexError):  # the shell has ended, or a container hides it
        return True


def placement(environ: Mapping[str, str] = os.environ) -> Placement | None:
    """Return the place of this process according to its launcher; None if it was started by hand.

    A malformed variable counts as not set.
    """
    names = launcher(environ)
    if names is None:
        return None
    node_rank, local_size = _read(environ, names.node_rank, int), _read(environ, names.local_size, int)
    per_node = _read(environ, names.tasks_per_node, repeated)
    if per_node is not None and node_rank is not None and node_rank < len(per_node):
        local_size = per_node[node_rank]
    return Placement(
        names,
        int(environ[names.size]),
        _read(environ, names.rank, int),
        _read(environ, names.local_rank, int),
        local_size,
        node_rank,
        _read(environ, names.node_count, int),
        _read(environ, names.node_list, expand),
    )


def _read(environ: Mapping[str, str], name: str, convert: Callable[[str], T]) -> T | None:
    try:
        return convert(environ[name])
    except (KeyError, ValueError):
        return None


# -- comparison of the launcher with MPI -------------------------------------------------------------


class Seen(NamedTuple):
    """One rank's place according to MPI, and according to its launcher."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launchers: Placement | None


# Explanations of differences between the launcher and MPI. MPI's local size comes from MPI_COMM_TYPE_SHARED.
MEANINGS = {
    "size": "the job has been put together of several programs, or is a part of what was started (MPI_Comm_spawn)",
    "rank": "MPI has given the ranks an order of its own",
    "local_size": "a node of MPI is what shares memory: processes of one machine with a /dev/shm of their own each "
    "(containers), or with MPIR_CVAR_NUM_CLIQUES set, are several; hosts that only pretend to be several are one",
    "local_rank": "MPI counts the ranks of a node in another order",
}


def disagreements(ranks: Sequence[Seen]) -> list[str]:
    """Return the differences between the launcher and MPI on the ranks of a job, each with an explanation."""
    found = []
    for what, meaning in MEANINGS.items():
        apart = [
            (seen.rank, by_launcher, getattr(seen, what))
            for seen in ranks
            if (by_launcher := getattr(seen.launchers, what, None)) is not None and by_launcher != getattr(seen, what)
        ]
        if apart:
            rank, by_launcher, by_mpi = apart[0]
            more = f" ({len(apart)} ranks differ)" if len(apart) > 1 else ""
            name = what.replace("_", " ")
            found.append(f"{name} of rank {rank}: {by_launcher} says the launcher, {by_mpi} says MPI{more}: {meaning}")
        if apart and what == "local_size":
            break  # local ranks differ for the same reason
    return found
