"""The output of a rank under ``hpccomm run``: on the terminal, in a folder (``--log-dir``), or nowhere."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from ..process import stderr


def redirect(rank: int, folder: Path | None) -> None:
    """Send stdout and stderr, also those of C code, to files of the rank in `folder`, or nowhere.

    Messages of hpccomm, such as the verdict, still go to the terminal, too.
    """
    stderr.terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for file, stream, ending in ((1, sys.stdout, "out"), (2, sys.stderr, "err")):
        path = os.devnull if folder is None else folder / f"rank-{rank}.{ending}"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # flushes it; `tail -f` shows each line, and a hang loses none
        with open(path, "wb") as new:
            os.dup2(new.fileno(), file)
