"""Messages on stderr: each in one piece.

The lines of several ranks come together in one stream. Where Python does not buffer (``python -u``, PYTHONUNBUFFERED in
many containers) `print` writes a line and its end separately, and another rank's line may come in between.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

uncaptured: Callable[[], TextIO | None] = lambda: None  # pytest holds sys.stderr back: the plugin knows another one


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write a line, or several, in one piece on `stream` (default: stderr), which may be broken."""
    with contextlib.suppress(Exception):  # closed, or taken by the program and broken
        out = stream or sys.stderr
        out.write(f"{text}\n")
        out.flush()
