"""Processes that a rank starts: MPI must not mistake them for the rank itself.

mpi4py finalises MPI at the very end of every process that has loaded it. In a forked process this breaks the rank's
connections (MPICH) or waits forever (Open MPI). So a forked process ends by os._exit, as those of `multiprocessing`
do: functions that its parent has registered with atexit do not run.

A new program inherits the rank's environment. If it starts MPI (importing mpi4py does), it answers the launcher as if
it were the rank: MPICH then ends it, and Open MPI hangs. Without the variables of the rank's connection, both MPIs
start with a world of one process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import sys
from collections.abc import Callable
from typing import Any

# MPI finds the launcher by these variables: PMI-1 and PMI-2 (a file descriptor or a port), PMIx. MPI reads them only
# when it starts; programs do not read them.
CONNECTION = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE")
STARTED_BY = "HPCCOMM_STARTED_BY"  # the rank and its process number

is_child = False  # whether this process was forked after MPI had started
_is_watching = False
_status = 0  # the exit status of a child


def spare_mpi() -> None:
    """Make processes forked from now on end without finalising MPI."""
    global _is_watching
    if not _is_watching:
        os.register_at_fork(after_in_child=_begin)
        _is_watching = True


def hide_launcher(rank: int) -> None:
    """Remove this rank's connection to the launcher from the environment that new programs inherit.

    MPI must have been started. `rank` is the rank in MPI.COMM_WORLD.
    """
    if [name for name in CONNECTION if os.environ.pop(name, None) is not None]:
        os.environ[STARTED_BY] = f"rank {rank} (process {os.getpid()})"


def _begin() -> None:
    """Take over the end of this process, and note its exit status, which Python does not provide."""
    global _status, is_child
    _status, is_child = 0, True
    sys.exit = _noting(sys.exit, _status_of)
    sys.excepthook = _noting(sys.excepthook, lambda *_: 1)
    atexit.register(_end)  # runs after all functions registered later


def _noting(function: Callable[..., Any], status_of: Callable[..., int]) -> Any:
    @functools.wraps(function)
    def noting(*arguments: Any) -> Any:
        global _status
        _status = status_of(*arguments)
        return function(*arguments)

    return noting


def _status_of(code: object = None) -> int:
    """Return the exit status for an argument of sys.exit."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _end() -> None:
    """Flush open files, as Python would, and end the process."""
    for file in gc.get_objects():
        if isinstance(file, io.IOBase):
            with contextlib.suppress(Exception):  # it is closed, or open for reading
                file.flush()
    os._exit(_status)
