"""The pages of the API name a function once: in the table at the top."""

from __future__ import annotations

import re

MARK = ".. functions of the table above"  # where they are described
TABLE = re.compile(r"\.\. autosummary::\n   :nosignatures:\n\n((?:   \w+\n)+)")
DESCRIBED = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:(?:function|class)):: (\w+)", re.M)


def names_in_tables(page: str) -> list[str]:
    """Return the names in the tables of a page."""
    return [name for table in TABLE.findall(page) for name in table.split()]


def written_out(page: str) -> str:
    """Return a page with a directive for each name of its tables that has none, in the place of the mark."""
    rest = [name for name in names_in_tables(page) if name not in DESCRIBED.findall(page)]
    return page.replace(MARK, "\n".join(f".. autofunction:: {name}" for name in rest))
