"""The end of a process that a rank has forked: without MPI, which would take it for the rank itself.

mpi4py finalises MPI at the very end of every process that has it. In a forked one that breaks the rank's connections
(MPICH), or waits for ever (Open MPI). So it ends as the processes of `multiprocessing` do, by os._exit: functions that
its parent has registered with atexit do not run.
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

_is_watching = False
_status = 0  # the exit status of a child


def spare_mpi() -> None:
    """Make the processes that this one forks from now on end without MPI."""
    global _is_watching
    if not _is_watching:
        os.register_at_fork(after_in_child=_begin)
        _is_watching = True


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
