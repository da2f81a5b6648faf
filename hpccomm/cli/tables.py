"""Tables on stdout."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

from ..process.environment import launcher


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print rows of columns: on a terminal by rich, where it is installed; the rows with a "no" or "wrong" are red."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if is_terminal and launcher() is None:  # Open MPI's mpiexec gives rank 0 a terminal of its own
        with contextlib.suppress(ImportError):
            table, console, markup = map(importlib.import_module, ("rich.table", "rich.console", "rich.markup"))
            shown = table.Table(*header, box=None, show_header=bool(header), pad_edge=False)
            for row in rows:
                is_wrong = any(cell == "no" or cell.startswith(("no:", "wrong:")) for cell in row)
                shown.add_row(*map(markup.escape, row), style="red" if is_wrong else None)
            console.Console().print(shown)
            return
    every = [header, *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*every)]
    for row in every:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
