"""Shared by tools/benchmark-ratios and docs/faster.py: read the tables of docs/benchmarks/*.txt.

An empty line ends a table. Its first lines are a title and the names of the columns; each cell of a row ends below the
end of its column's name.
"""

from __future__ import annotations

import re

IN_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


def tables(text: str) -> list[list[str]]:
    """Return the lines of each table."""
    return [block.splitlines() for block in re.split(r"\n\s*\n", text.strip("\n"))]


def cells(line: str) -> dict[int, str]:
    """Return the words of a row by the position of their end; a time and its unit are one."""
    return {word.end(): word[0] for word in re.finditer(r"\S+(?: (?:us|ms|s)(?!\S))?", line)}


def value(text: str, title: str, row: str, column: str) -> float:
    """Return the number in the first table whose title begins with `title`; times with a unit in us.

    `row` is the beginning of the row, with single spaces; the number of spaces in the file does not matter.
    """
    for lines in tables(text):
        if not lines[0].startswith(title):
            continue
        label = re.compile(r"\s*" + r"\s+".join(map(re.escape, row.split())) + r"(?=\s\s|$)")
        number = next((number for number, line in enumerate(lines) if label.match(line)), None)
        if number is None:
            continue
        start = 0
        for end, cell in cells(lines[number]).items():
            found = re.fullmatch(r"(-?[\d.]+)(?:%| (us|ms|s))?", cell)
            if found and column in (heading[start:end].strip() for heading in lines[:number]):
                return float(found[1]) * IN_US.get(found[2], 1)
            start = end
        raise LookupError(f"the row {row!r} has no number in a column {column!r}")
    raise LookupError(f"no table {title!r} has a row {row!r}")
