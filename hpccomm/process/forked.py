"""Processes that a rank starts: MPI must not take them for the rank itself.

mpi4py finalises MPI at the very end of every process that has it. In a forked one that breaks the rank's connections
(MPICH), or waits for ever (Open MPI). So it ends as the processes of `multiprocessing` do, by os._exit: functions that
its parent has registered with atexit do not run.

A new program inherits the rank's environment. If it starts MPI, as an import of mpi4py does, it would answer the
launcher as the rank: MPICH then ends it, Open MPI hangs. Without the variables of the rank's connection both start MPI
with a world of one process.
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

# The variables by which MPI finds the launcher: PMI-1 and PMI-2 (a file descriptor or a port), PMIx. Programs do not
# read them, and MPI only when it starts.
CONNECTION = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE")
STARTED_BY = "HPCCOMM_STARTED_BY"  # the rank, and its process number

_is_watching = False
_status = 0  # the exit status of a child


def spare_mpi() -> None:
    """Make the processes that this one forks from now on end without MPI."""
    global _is_watching
    if not _is_watching:
        os.register_at_fork(after_in_child=_begin)
        _is_watching = True


def hide_launcher(rank: int) -> None:
    """Take the variables of this rank's connection to the launcher out of the environment, for the programs it starts.

    MPI has been started. `rank` is that in MPI.COMM_WORLD.
    """
    if [name for name in CONNECTION if os.environ.pop(name, None) is not None]:
        os.environ[STARTED_BY] = f"rank {rank} (process {os.getpid()})"


def _begin() -> None:
    """Take over the end of this process; note its exit status on the way, which Python does not tell."""
    global _status
    _status = 0
    sys.exit = _noting(sys.exit, _status_of)
    sys.excepthook = _noting(sys.excepthook, lambda *_: 1)
    atexit.register(_end)  # the last that runs of those registered from now on


def _noting(function: Callable[..., Any], status_of: Callable[..., int]) -> Any:
    @functools.wraps(function)
    def noting(*arguments: Any) -> Any:
        global _status
        _status = status_of(*arguments)
        return function(*arguments)

    return noting


def _status_of(code: object = None) -> int:
    """Return the exit status that sys.exit makes of its argument."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _end() -> None:
    """Flush open files, as Python would, and end."""
    for file in gc.get_objects():
        if isinstance(file, io.IOBase):
            with contextlib.suppress(Exception):  # it is closed, or open for reading
                file.flush()
    os._exit(_status)
