"""The pages of the API name a function or exception once, in a table; collectives are those of `api/collectives.py`."""

from __future__ import annotations

import re

from hpccomm.api import collectives

MARK = ".. functions of the table above"  # where they are described
TABLE = re.compile(r"\.\. autosummary::\n   :nosignatures:\n\n((?:   \w+\n)+)")
DESCRIBED = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:(?:function|class)):: (\w+)", re.M)
EVERY = "   every_collective\n"


def names_in_tables(page: str) -> list[str]:
    """Return the names in the tables of a page."""
    page = page.replace(EVERY, "".join(f"   {name}\n" for name in collectives.__all__))
    return [name for table in TABLE.findall(page) for name in table.split()]


def written_out(page: str) -> str:
    """Return a page with a directive for each name of its tables that has none, in the place of the mark."""
    rest = [name for name in names_in_tables(page) if name not in DESCRIBED.findall(page)]
    page = page.replace(EVERY, "".join(f"   {name}\n" for name in collectives.__all__))
    return page.replace(MARK, "\n".join(map(described, rest)))


def described(name: str) -> str:
    """Return the directive that describes a function, an exception or a warning."""
    is_exception = name.endswith(("Error", "Warning"))
    return f".. autoexception:: {name}\n   :show-inheritance:" if is_exception else f".. autofunction:: {name}"
