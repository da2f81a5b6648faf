"""The end of the whole job, from one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection

from .proc import of_process

# Under ULFM, Open MPI 5.0's MPI_Abort leaves other ranks alive, in jobs of four ranks and more.
_left_alive: dict[int, str] = {}  # processes of this node, and when they began
_are_all = False  # whether the job has no others


def note_those_left_alive(processes: Collection[int], size: int) -> None:
    """Note the ranks of this node that MPI_Abort may leave alive, in a job of this size."""
    global _are_all
    _left_alive.update((pid, began) for pid in processes if pid != os.getpid() and (began := _beginning(pid)))
    _are_all = _are_all or len(processes) == size


def abort(status: int) -> None:
    """End every rank with an exit status (MPI_Abort)."""
    from mpi4py import MPI

    for pid, began in _left_alive.items():
        with contextlib.suppress(OSError):
            if _beginning(pid) == began:  # not another process with the number of one that has ended
                os.kill(pid, signal.SIGTERM)
    if _are_all or MPI.Is_finalized():
        # The status is mpirun's then: after MPI_Abort it may be 0, and after MPI_Finalize another one.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, closed, or a stream of the program's
                stream.flush()
        os._exit(status)
    MPI.COMM_WORLD.Abort(status)


def _beginning(pid: int) -> str:
    """Return when a process has begun (in ticks since the boot); "" if it is not there."""
    with contextlib.suppress(OSError, IndexError):
        return of_process(pid)[1][19]
    return ""
