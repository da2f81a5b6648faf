"""Messages on stderr, each written in one piece.

Several ranks write to one stream. Without buffering (``python -u``, PYTHONUNBUFFERED in many containers) `print` writes
a line and its newline separately, and another rank's line may come between them.

Messages bypass stderr's buffer: a daemon thread that writes when the program ends holds the buffer's lock, and Python
aborts if it can't flush the buffer.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

terminal: TextIO | None = None  # the first stderr, if `hpccomm run` has redirected file descriptor 2
uncaptured: Callable[[], TextIO | None] = lambda: None  # pytest captures sys.stderr: the plugin sets this


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
