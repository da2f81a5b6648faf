"""This process's output: the launcher must read it before the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator
from typing import TextIO

from . import stderr

LONGEST_WAIT = 1.0  # seconds


def let_launcher_read() -> None:
    """Wait until mpiexec has read this process's output: MPI_Abort may discard the rest."""
    for stream in (sys.stdout, sys.stderr, stderr.terminal or sys.stderr):
        with contextlib.suppress(Exception):  # closed, replaced by an object without a file, or not a pipe
            stream.flush()
            give_up = time.monotonic() + LONGEST_WAIT
            while _unread(stream.fileno()) and time.monotonic() < give_up:
                time.sleep(0.01)
    time.sleep(0.1)  # mpiexec's agent on this node passes the output to mpiexec


@contextlib.contextmanager
def launchers_stderr() -> Iterator[TextIO | None]:
    """Yield the stderr of Open MPI's launcher, which no longer reads the ranks' output after Ctrl-C; or None."""
    stream = None
    if "PRTE_LAUNCHED" in os.environ:
        with contextlib.suppress(OSError):  # the launcher has ended, or its stderr is a socket
            stream = open(f"/proc/{os.getppid()}/fd/2", "w", encoding="utf-8")  # noqa: SIM115
    try:
        yield stream
    finally:
        if stream is not None:
            stream.close()


def let_go_of_output() -> None:
    """Discard all output from now on; called just before this process and the others end.

    MPICH's mpiexec (hydra's pmip.c) kills the other processes as soon as one has ended without finalizing. It then
    returns 9 for each process whose end it sees while it reads output. Once all processes have closed its pipes it no
    longer reads, and returns their own statuses.
    """
    with contextlib.suppress(OSError):
        files = {1, 2, stderr.terminal.fileno() if stderr.terminal else 2}
        pipes = [found for file in files if stat.S_ISFIFO((found := os.fstat(file)).st_mode)]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if any(os.path.samestat(os.fstat(file), pipe) for pipe in pipes):
                    os.dup2(nowhere, file)


def _unread(pipe: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])
