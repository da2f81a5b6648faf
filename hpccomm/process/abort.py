"""The end of the whole job, from one rank."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Collection, Mapping

from .environment import launcher
from .proc import of_process

# Under ULFM, Open MPI 5.0's MPI_Abort leaves other ranks alive, in jobs of four ranks and more.
_left_alive: dict[int, str] = {}  # processes of this node, and when they began
_survives = False  # whether MPI is to go on without ranks that have died
LONGEST_START = 30.0  # seconds that the others may take to come to MPI_Init; a program without MPI never does
_are_all = False  # whether the job has no others


def note_those_left_alive(processes: Collection[int], size: int) -> None:
    """Note the ranks of this node that MPI_Abort may leave alive, in a job of this size."""
    global _are_all, _survives
    _survives = True
    _left_alive.update((pid, began) for pid in processes if pid != os.getpid() and (began := _beginning(pid)))
    _are_all = _are_all or len(processes) == size


def abort(status: int) -> None:
    """End every rank with an exit status (MPI_Abort); first meet those that wait for this one in MPI_Init."""
    if "mpi4py.MPI" not in sys.modules or not sys.modules["mpi4py.MPI"].Is_initialized():
        with open(os.devnull, "w") as nowhere:  # kept by faulthandler, whose thread needs no GIL
            faulthandler.dump_traceback_later(LONGEST_START, exit=True, file=nowhere)
            _initialise()
            faulthandler.cancel_dump_traceback_later()
    from mpi4py import MPI

    for pid, began in _left_alive.items():
        with contextlib.suppress(OSError):
            if _beginning(pid) == began:  # not another process with the number of one that has ended
                os.kill(pid, signal.SIGTERM)
    if _are_all or MPI.Is_finalized() or (_ends_all_of(os.environ) and not _survives):
        # The status is mpirun's then: after MPI_Abort it may be 0, and after MPI_Finalize another one.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, closed, or a stream of the program's
                stream.flush()
        os._exit(status)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPICH's own sentence would be the last that is read
    MPI.COMM_WORLD.Abort(status)


def _ends_all_of(environ: Mapping[str, str]) -> bool:
    """Whether the launcher ends the job, with less to read, as soon as one rank has ended with a status: prterun."""
    names = launcher(environ)
    return names is not None and "Open MPI" in names.name and "PRTE_LAUNCHED" in environ


def _initialise() -> None:
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init()


def _beginning(pid: int) -> str:
    """Return when a process has begun (in ticks since the boot); "" if it is not there."""
    with contextlib.suppress(OSError, IndexError):
        return of_process(pid)[1][19]
    return ""
