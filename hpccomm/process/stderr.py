"""Messages on stderr, each written in one piece.

Several ranks write to one stream. Without buffering (``python -u``, PYTHONUNBUFFERED in many containers) `print` writes
a line and its newline separately, and another rank's line may come between them.

Messages bypass stderr's buffer: a daemon thread that writes when the program ends holds the buffer's lock, and Python
aborts if it can't flush the buffer.

A program that has configured `logging` gets lines about settings, groups and executors as records of the logger
"hpccomm" instead (`log`), and a verdict as well (`tell_verdict`). Other messages go to stderr only, because handlers
may be closed or locked then: those of the watchdog's thread, of Ctrl-C and SIGTERM, and of the end of a program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

terminal: TextIO | None = None  # the first stderr, if `hpccomm run` has redirected file descriptor 2
uncaptured: Callable[[], TextIO | None] = lambda: None  # pytest captures sys.stderr: the plugin sets this

INFO, WARNING, ERROR = 20, 30, 40  # logging's levels
PATIENCE = 1.0  # seconds for handlers to take a verdict


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write one or more lines to `stream` (default: stderr, and the terminal) in one piece; ignore errors."""
    if stream is None and terminal is not None:
        tell(text, terminal)
    with contextlib.suppress(Exception):  # closed, or replaced by a broken object
        out = stream or sys.stderr
        out.flush()
        file = getattr(getattr(out, "buffer", None), "raw", None)
        if file is None:  # no buffer, or not a file
            out.write(f"{text}\n")
            out.flush()
            return
        rest = f"{text}\n".encode(out.encoding, "backslashreplace")
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]


def progress(things: Collection[T], what: str) -> Iterator[T]:
    """Yield the things; if stderr is a terminal, show how many are done on one line, which vanishes at the end."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    for done, each in enumerate(things):
        if is_terminal:
            print(f"\x1b[K{what}: {done} of {len(things)}", end="\r", file=sys.stderr, flush=True)
        yield each
    if is_terminal:
        print("\x1b[K", end="", file=sys.stderr, flush=True)


def log(text: str, level: int = WARNING) -> None:
    """Log one or more lines, without "hpccomm: "; print them if the program has not configured logging for `level`."""
    if (logger := _logger(level)) is not None:
        logger.log(level, text, stacklevel=2)
    else:
        tell(f"hpccomm: {text}")


def tell_verdict(lines: Sequence[str], stream: TextIO | None = None) -> None:
    """Print lines on `stream` (default: stderr), and log them as one record if the program has configured logging.

    A thread logs them: the job must end even if another thread holds a handler's lock.
    """
    tell("\n".join(f"hpccomm: {line}" for line in lines), stream)
    if (logger := _logger(ERROR)) is not None:
        with contextlib.suppress(RuntimeError):  # no thread starts while Python exits
            text = "\n".join(lines)
            thread = threading.Thread(target=logger.error, args=(text,), name="hpccomm-logging", daemon=True)
            thread.start()
            thread.join(PATIENCE)


def _logger(level: int) -> Any:
    """Return the logger "hpccomm" if the program has configured it; the level of the root alone hides no message."""
    if "logging" not in sys.modules:  # then there are no handlers, and an import would read files on every rank
        return None
    import logging

    logger = logging.getLogger("hpccomm")
    return logger if logger.hasHandlers() and (logger.level or logger.isEnabledFor(level)) else None
