"""What this process has printed: read by the launcher before the job ends."""

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

LONGEST_WAIT = 1.0  # seconds


def let_launcher_read() -> None:
    """Wait until mpiexec has taken what this process has printed: MPI_Abort may throw the rest away."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, replaced by something without a file, not a pipe
            stream.flush()
            give_up = time.monotonic() + LONGEST_WAIT
            while _unread(stream.fileno()) and time.monotonic() < give_up:
                time.sleep(0.01)
    time.sleep(0.1)  # from mpiexec's agent on this node to mpiexec itself


@contextlib.contextmanager
def launchers_stderr() -> Iterator[TextIO | None]:
    """Give the stderr of Open MPI's launcher, which does not read from the ranks any more after Ctrl-C; or None."""
    stream = None
    if "PRTE_LAUNCHED" in os.environ:
        with contextlib.suppress(OSError):  # it is gone, or its stderr is a socket
            stream = open(f"/proc/{os.getppid()}/fd/2", "w", encoding="utf-8")  # noqa: SIM115
    try:
        yield stream
    finally:
        if stream is not None:
            stream.close()


def let_go_of_output() -> None:
    """Print nowhere from now on, a moment before this process ends at the same time as the others.

    MPICH's mpiexec (hydra's pmip.c) kills the others as soon as one process has ended without finalizing, and then
    returns 9 for those whose end it sees while it reads what processes print. When all have let go of its pipes it no
    longer reads, and takes the statuses as they are.
    """
    with contextlib.suppress(OSError):
        pipes = [found for file in (1, 2) if stat.S_ISFIFO((found := os.fstat(file)).st_mode)]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the listing's own
                if any(os.path.samestat(os.fstat(file), pipe) for pipe in pipes):
                    os.dup2(nowhere, file)


def _unread(pipe: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])
