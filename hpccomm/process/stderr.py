"""Messages on stderr: each in one piece.

The lines of several ranks come together in one stream. Where Python does not buffer (``python -u``, PYTHONUNBUFFERED in
many containers) `print` writes a line and its end separately, and another rank's line may come in between.

A daemon thread that writes when the program ends holds the lock of stderr's buffer, and Python aborts if it can't flush
that: so the buffer is passed by.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

uncaptured: Callable[[], TextIO | None] = lambda: None  # pytest holds sys.stderr back: the plugin knows another one


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write a line, or several, in one piece on `stream` (default: stderr), which may be broken."""
    with contextlib.suppress(Exception):  # closed, or taken by the program and broken
        out = stream or sys.stderr
        out.flush()
        file = getattr(getattr(out, "buffer", None), "raw", None)
        if file is None:  # without a buffer, or not a file
            out.write(f"{text}\n")
            out.flush()
            return
        rest = f"{text}\n".encode(out.encoding, "backslashreplace")
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
