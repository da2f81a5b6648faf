"""The pages of the API name a function once, in the table at the top; collectives are those of `api/collectives.py`."""

from __future__ import annotations

import inspect
import re

from hpccomm.api import collectives

MARK = ".. functions of the table above"  # where they are described
TABLE = re.compile(r"\.\. autosummary::\n   :nosignatures:\n\n((?:   \w+\n)+)")
DESCRIBED = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:(?:function|class)):: (\w+)", re.M)
EVERY = "   every_collective\n"
GUIDE = re.compile(r"\| call \| result \| MPI \|\n(?:\|.*\n)+")  # the table of the guide


def names_in_tables(page: str) -> list[str]:
    """Return the names in the tables of a page."""
    page = page.replace(EVERY, "".join(f"   {name}\n" for name in collectives.__all__))
    return [name for table in TABLE.findall(page) for name in table.split()]


def written_out(page: str) -> str:
    """Return a page with a directive for each name of its tables that has none, in the place of the mark."""
    rest = [name for name in names_in_tables(page) if name not in DESCRIBED.findall(page)]
    page = page.replace(EVERY, "".join(f"   {name}\n" for name in collectives.__all__))
    page = GUIDE.sub(lambda table: table[0] + "".join(rows(table[0])), page)
    return page.replace(MARK, "\n".join(f".. autofunction:: {name}" for name in rest))


def rows(table: str) -> list[str]:
    """Return rows for the collectives that the table lacks: the call, the docstring's beginning, and MPI's function."""
    found = []
    for name in collectives.__all__:
        function = getattr(collectives, name)
        arguments = ", ".join(inspect.signature(function).parameters).partition(", group")[0]
        does, _, mpi = inspect.getdoc(function).partition("\n\n")[0].replace("\n", " ").partition(": MPI_")
        if f"`{name}(" not in table:
            found.append(f"| `{name}({arguments})` | {does.rstrip('.')} | {mpi.partition(' ')[0]} |\n")
    return found
