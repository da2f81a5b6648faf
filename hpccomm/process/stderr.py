"""Messages on stderr: each in one piece, and read before the job ends.

The lines of several ranks come together in one stream. Where Python does not buffer (``python -u``, PYTHONUNBUFFERED in
many containers) `print` writes a line and its end separately, and another rank's line may come in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import TextIO

from .. import errors

LONGEST_WAIT = 1.0  # seconds


uncaptured: Callable[[], TextIO | None] = lambda: None  # pytest holds sys.stderr back: the plugin knows another one


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write a line, or several, in one piece on `stream` (default: stderr), which may be broken."""
    with contextlib.suppress(Exception):  # closed, or taken by the program and broken
        out = stream or sys.stderr
        out.write(f"{text}\n")
        out.flush()


def tell_with_rank(lines: list[str]) -> None:
    """Write lines to stderr in one piece, each with this process's rank."""
    text = "".join(lines).rstrip("\n").replace("\n", f"\n[rank {errors._rank}] ")
    tell(f"[rank {errors._rank}] {text}")


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
