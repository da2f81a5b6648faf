"""What this process has printed: read by the launcher before the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import struct
import sys
import termios
import time

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


def _unread(pipe: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])
