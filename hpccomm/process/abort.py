"""End the whole job from one rank."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Collection, Mapping

from .environment import launcher
from .proc import of_process

# Under ULFM, Open MPI 5.0's MPI_Abort leaves other ranks alive in jobs of four or more ranks.
_left_alive: dict[int, str] = {}  # start time of each process on this node
_survives = False  # whether MPI continues after a rank has died
LONGEST_START = 30.0  # seconds for the other ranks to reach MPI_Init; a program without MPI never reaches it
_are_all = False  # whether the whole job runs on this node


def note_those_left_alive(processes: Collection[int], size: int) -> None:
    """Note the ranks of this node that MPI_Abort may leave alive in a job of `size` ranks."""
    global _are_all, _survives
    _survives = True
    _left_alive.update((pid, began) for pid in processes if pid != os.getpid() and (began := _beginning(pid)))
    _are_all = _are_all or len(processes) == size


def abort(status: int) -> None:
    """End every rank with an exit status (MPI_Abort); first join any ranks that wait for this one in MPI_Init."""
    if "mpi4py.MPI" not in sys.modules or not sys.modules["mpi4py.MPI"].Is_initialized():
        with open(os.devnull, "w") as nowhere:  # faulthandler keeps the file; its thread needs no GIL
            faulthandler.dump_traceback_later(LONGEST_START, exit=True, file=nowhere)
            from mpi4py import MPI

            if not MPI.Is_initialized():
                MPI.Init()
            faulthandler.cancel_dump_traceback_later()
    from mpi4py import MPI

    for pid, began in _left_alive.items():
        with contextlib.suppress(OSError):
            if _beginning(pid) == began:  # otherwise another process has reused the number
                os.kill(pid, signal.SIGTERM)
    if _are_all or MPI.Is_finalized() or (_ends_all_of(os.environ) and not _survives):
        # mpirun then returns this status; after MPI_Abort it may return 0, after MPI_Finalize a different one.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, closed, or the program's own object
                stream.flush()
        os._exit(status)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the line that MPICH would print last
    MPI.COMM_WORLD.Abort(status)


def _ends_all_of(environ: Mapping[str, str]) -> bool:
    """Whether the launcher (prterun) ends the job, with less output, as soon as one rank exits with a status."""
    names = launcher(environ)
    return names is not None and "Open MPI" in names.name and "PRTE_LAUNCHED" in environ


def _beginning(pid: int) -> str:
    """Return the start time of a process (in ticks since boot); "" if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return of_process(pid)[1][19]
    return ""
