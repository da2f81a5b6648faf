"""Settings: the environment variables HPCCOMM_*, read once and equal on every rank.

Ranks must make equal decisions, but not every launcher passes variables to all nodes (Open MPI's does not). So all
ranks use rank 0's variables. A property of a rank's machine counts as true only if it is true on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import native
from .stderr import log
from .tuning import Tuning, tuning

# docs/reference/variables.md describes each of them.
VARIABLES = {
    *("HPCCOMM_ABORT_ON_EXCEPTION", "HPCCOMM_BLOCKING_WAIT", "HPCCOMM_CUDA_AWARE", "HPCCOMM_DEBUG"),
    *("HPCCOMM_DEBUG_DIR", "HPCCOMM_GPU_PROVIDER", "HPCCOMM_INTRA_NODE", "HPCCOMM_NATIVE", "HPCCOMM_NCCL_LIBRARY"),
    *("HPCCOMM_ON_TIMEOUT", "HPCCOMM_SEGMENT_BYTES", "HPCCOMM_STARTED_BY", "HPCCOMM_STORE_HOST", "HPCCOMM_TIMEOUT"),
    *("HPCCOMM_TRACE", "HPCCOMM_TRACE_SIZE", "HPCCOMM_TUNING", "HPCCOMM_WATCHDOG"),
}
INTRA_NODE_MODES = ("0", "1", "host")
ON_TIMEOUT = ("abort", "raise", "warn")
GPU_PROVIDER = "HPCCOMM_GPU_PROVIDER"


class Settings(NamedTuple):
    """The settings of a job, from the variables of docs/reference/variables.md."""

    tuning: Tuning = Tuning()  # HPCCOMM_TUNING, HPCCOMM_SEGMENT_BYTES
    cuda_aware: bool = False  # whether MPI gets GPU pointers: HPCCOMM_CUDA_AWARE, or MPI's own answer on all ranks
    intra_node: str = "0"  # HPCCOMM_INTRA_NODE
    blocking_wait: bool = False  # HPCCOMM_BLOCKING_WAIT
    debug: str = "OFF"  # HPCCOMM_DEBUG
    timeout: float | None = None  # HPCCOMM_TIMEOUT: seconds, unless the program sets a timeout
    on_timeout: str = "abort"  # HPCCOMM_ON_TIMEOUT, unless the program sets it
    trace: str = "0"  # HPCCOMM_TRACE
    trace_size: int = 2000  # HPCCOMM_TRACE_SIZE
    debug_dir: str = ""  # this run's own folder in HPCCOMM_DEBUG_DIR
    watchdog: bool = True  # HPCCOMM_WATCHDOG
    gpu_provider: str = ""  # HPCCOMM_GPU_PROVIDER
    keeps_reports: bool = False  # whether HPCCOMM_DEBUG_DIR is set: ranks killed by a signal also write reports


def read(environ: Mapping[str, str] = os.environ, folder: str = "") -> Settings:
    """Return the settings of this process's environment; ValueError names a malformed variable."""
    _one_of(environ, "HPCCOMM_ABORT_ON_EXCEPTION", ("1", "0"))  # each rank reads it later
    return Settings(
        tuning=tuning(environ),
        cuda_aware=_one_of(environ, "HPCCOMM_CUDA_AWARE", ("0", "1")) == "1",
        intra_node=_one_of(environ, "HPCCOMM_INTRA_NODE", INTRA_NODE_MODES),
        blocking_wait=_one_of(environ, "HPCCOMM_BLOCKING_WAIT", ("0", "1")) == "1",
        debug=_one_of(environ, "HPCCOMM_DEBUG", ("OFF", "INFO", "DETAIL")),
        timeout=_seconds(environ, "HPCCOMM_TIMEOUT"),
        on_timeout=_one_of(environ, "HPCCOMM_ON_TIMEOUT", ON_TIMEOUT),
        trace=_one_of(environ, "HPCCOMM_TRACE", ("0", "1", "stack")),
        trace_size=_size(environ, "HPCCOMM_TRACE_SIZE", Settings().trace_size),
        debug_dir=folder or folder_at_start(environ),
        watchdog=_one_of(environ, "HPCCOMM_WATCHDOG", ("1", "0")) == "1",
        gpu_provider=gpu_provider(environ),
        keeps_reports=bool(environ.get("HPCCOMM_DEBUG_DIR", "").strip()),
    )


def agreed(comm: Any, is_cuda_aware: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> Settings:
    """Return rank 0's settings on every rank of an MPI communicator; collective.

    An error of rank 0 is raised on every rank. Each rank also reports whether it has the compiled extension and, if
    ``HPCCOMM_CUDA_AWARE`` is not set on rank 0, the result of `is_cuda_aware`.
    """
    global _run
    found: Settings | Exception | None = None
    if comm.Get_rank() == 0:
        if not _run:  # the first call
            for text in unknown(environ):
                log(text)
        try:
            folder = os.path.join(debug_dir(environ), _run or f"run-{os.urandom(4).hex()}")
            found = read(environ, folder)
        except Exception as error:  # any error: the other ranks are waiting
            found = error
    agreed_on, asks = comm.bcast((found, not environ.get("HPCCOMM_CUDA_AWARE", "").strip()))
    if isinstance(agreed_on, Exception):
        raise agreed_on
    settings: Settings = agreed_on
    _run = os.path.basename(settings.debug_dir)
    if settings.gpu_provider != environ.get(GPU_PROVIDER, "").strip():
        os.environ[GPU_PROVIDER] = settings.gpu_provider  # read at the first GPU array
    compiled, cuda_aware = zip(*comm.allgather((native.fastpath is not None, asks and is_cuda_aware())), strict=True)
    if not all(compiled):
        settings = settings._replace(tuning=settings.tuning._replace(node_bytes=0))
    return settings._replace(cuda_aware=all(cuda_aware)) if asks else settings


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each unknown variable whose name begins with HPCCOMM_."""
    found = sorted(name for name in environ if name.startswith("HPCCOMM_") and name not in VARIABLES)
    if not found:
        return []
    from difflib import get_close_matches

    nearest = {name: get_close_matches(name, sorted(VARIABLES), 1, 0.0)[0] for name in found}
    return [f"{name} is none of hpccomm's variables, and is ignored; the nearest is {nearest[name]}" for name in found]


def gpu_provider(environ: Mapping[str, str] = os.environ) -> str:
    """Return the module that replaces CuPy, or ""; ValueError if it belongs neither to hpccomm nor to its tests."""
    said = environ.get(GPU_PROVIDER, "").strip()
    if said and not said.startswith(("hpccomm.", "tests.")):
        raise ValueError(
            f"{GPU_PROVIDER} is {said!r}; expected a module of hpccomm or of its tests: tests.gpu.stand_in"
        )
    return said


def _one_of(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    said = environ.get(name, "").strip() or values[0]
    for value in values:
        if said.lower() == value.lower():
            return value
    raise ValueError(f"{name} is {said!r}; expected {', '.join(values[:-1])} or {values[-1]}")


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    said = environ.get(name, "").strip()
    if not said:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{name} is {said!r}; expected a positive number of seconds")
    return seconds


def _size(environ: Mapping[str, str], name: str, default: int) -> int:
    said = environ.get(name, "").strip() or str(default)
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"{name} is {said!r}; expected a number, 1 or more")
    return int(said)


HERE = ""  # the working directory at the start of the program
with contextlib.suppress(OSError):  # it has been removed
    HERE = os.getcwd() + os.sep

_run = ""  # the name of this run's folder, drawn at random by rank 0


def from_here(path: str) -> str:
    """Return a path relative to the working directory at the start, if it is below that."""
    return path.removeprefix(HERE)


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the job id of Slurm, Flux or PBS; "" outside of them."""
    return environ.get("SLURM_JOB_ID") or environ.get("FLUX_JOB_ID") or environ.get("PBS_JOBID") or ""


def debug_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder for reports of all runs: ``HPCCOMM_DEBUG_DIR``, or a folder named after the job."""
    try:
        here = os.getcwd()
    except OSError:  # the folder has been removed
        from tempfile import gettempdir

        here = gettempdir()
    said = environ.get("HPCCOMM_DEBUG_DIR", "").strip()
    return os.path.join(here, os.path.normpath(said or f"hpccomm-debug-{job_id(environ) or _launcher()}"))


def folder_at_start(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder for reports of this run; before the ranks have agreed on its name, a guess."""
    step, restart = environ.get("SLURM_STEP_ID"), environ.get("SLURM_RESTART_COUNT", "0")
    return os.path.join(debug_dir(environ), _run or f"run-{f'{step}-{restart}' if step else _launcher()}")


LAUNCHERS = ("hydra", "mpiexec", "mpirun", "prte", "orted", "pmi_proxy", "slurmstepd", "flux-shell", "pbs_mom")


def _launcher() -> str:
    """Name the launcher's process, common to the ranks of a node, by its start time and number."""
    from .proc import of_process

    pid, began = os.getppid(), time.time()
    with contextlib.suppress(OSError, ValueError, IndexError):  # only Linux has it
        name, fields = of_process(pid)
        above, the_other = name, fields
        while not above.startswith(LAUNCHERS) and int(the_other[1]) > 1:  # skip a shell, numactl or container
            number = int(the_other[1])
            above, the_other = of_process(number)
            if above.startswith(LAUNCHERS):
                pid, fields = number, the_other
        ticks, boot = int(fields[19]), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        began = boot + ticks / os.sysconf("SC_CLK_TCK")
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(round(began)))}-{pid}"
