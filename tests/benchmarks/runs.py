"""A whole run of a study whose tables are those of `benchmarks.beside`."""

from __future__ import annotations

import sys

from ..launch import launch


def run(ranks: int, name: str, *arguments: str) -> dict[str, tuple[list[str], list[str]]]:
    """Run the study; check that times are positive, and return the columns and the sizes of each table by its title."""
    ended = launch(ranks, sys.executable, "-m", f"benchmarks.{name}", *arguments, "-n", "2", timeout=100)
    assert ended.returncode == 0, ended.stderr
    facts, _, *tables = ended.stdout.split("\n\n")
    assert facts.startswith("# hpccomm ")
    found = {}
    for table in tables:
        title, head, *rows = table.splitlines()
        found[title] = [head[i : i + 12].strip() for i in range(11, len(head), 12)], [row[:11].strip() for row in rows]
        assert all(float(time) > 0 for row in rows for time in row[11:-12].split())
    return found
