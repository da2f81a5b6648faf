"""Start a program on several ranks from a test, which may itself run under mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpccomm.process.forked import STARTED_BY

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
WATCHED = ("-m", "hpccomm", "run")

# What one mpiexec tells its ranks would make another one, or a program started by it, believe that it is a rank.
LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "HYDI_", "HYDRA_")
LAUNCHER_VARIABLES += ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")  # hpccomm.torch sets them
# NumPy under CuPy's name, and the stand-in for CUDA and NCCL to go with it.
IMITATED_GPU = {
    "HPCCOMM_GPU_PROVIDER": "tests.gpu.stand_in",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "gpu" / "numpy_as_cupy"), str(ROOT)]),
}

# Unbuffered, print writes a line's end on its own, and a line of another rank can come in between.
LAUNCHER_VARIABLES += ("PYTHONUNBUFFERED",)
SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_")

# For programs of tests: no thread starts while Python exits, as since Python 3.12.
NO_THREAD_AT_THE_END = """\
import atexit, threading
def refuse(self): raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(setattr, threading.Thread, "start", refuse)
"""

# For programs of tests. MPI computes while it waits, and Python does not compute that long in one instruction.
UNTIL_IN_MPI = """\
def until_in_mpi():
    import sys, threading, time
    main = threading.main_thread().ident
    def place(): return sys._current_frames()[main].f_code, sys._current_frames()[main].f_lasti
    def computed(): return time.clock_gettime(time.pthread_getcpuclockid(main))
    at, since = place(), computed()
    while computed() < since + 0.1:
        time.sleep(0.01)
        if place() != at:
            at, since = place(), computed()
"""


def launch(
    ranks: int, *command: str | Path, timeout: float = 60, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` on `ranks` ranks in the repository's root and return its exit status, stdout and stderr.

    `env` is added to the environment. A program that takes longer than `timeout` seconds, on an idle machine, is ended,
    with status 124.
    """
    timeout = time_limit(timeout)
    return subprocess.run(
        [ROOT / "tools" / "run-mpi", mpiexec_folder(), str(ranks), *command],
        cwd=ROOT,
        env={**clean_environment(), "TIME_LIMIT": str(timeout), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout + 30,  # run-mpi ends the program earlier, and all of its ranks with it
        check=False,
    )


def run_program(
    program: str, folder: Path, ranks: int, *arguments: str | Path, by: Sequence[str | Path] = (),
    status: int | None = None, **options: Any,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program's text, as `program.py` of the folder; require its exit status where one is given.

    `by` stands between Python and the program: WATCHED.
    """
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program), encoding="utf-8")
    ended = launch(ranks, sys.executable, *by, file, *arguments, **options)
    assert status in (None, ended.returncode), f"{ended.stdout}\n{ended.stderr}"
    return ended


def time_limit(seconds: float) -> float:
    """Return the time limit, on this machine as busy as it is, of what may take `seconds` on an idle one."""
    return seconds * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 10.0)


def until(condition: Callable[[], T], what: str, seconds: float = 60) -> T:
    """Return what `condition` returns as soon as that is true; `what` names it where it never is."""
    deadline, pause = time.monotonic() + time_limit(seconds), 0.001
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return found


def mpiexec_folder() -> Path:
    """Return where the mpiexec is that belongs to this Python."""
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert mpiexec, "there is no mpiexec beside this Python or on the PATH"
    return Path(mpiexec).parent


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what its own launcher, and its world, put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != STARTED_BY and (name.startswith(SETTINGS) or not name.startswith(LAUNCHER_VARIABLES))
    }
