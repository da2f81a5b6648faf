"""Directives that check advice about speed against the recorded tables of docs/benchmarks.

    ```{faster} halo, cut along the first axis
    64 B: isend
    64 B: one call
    ```

The argument is the name of the files (mpich-halo.txt, openmpi-halo.txt) and the beginning of a table's title. Each line
is a row and a column; in every file each number must be below the next one, or else the build of the pages fails. The
page shows how many times the last number is as large as the first. `slower` has the largest number first.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from recorded import value

BENCHMARKS = Path(__file__).parent / "benchmarks"
LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI"}


class Faster(SphinxDirective):
    """Check that the numbers grow from line to line."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    text = "Recorded: {} times as fast {}."

    def run(self) -> list[nodes.Node]:
        """Return a paragraph with the ratios."""
        name, _, title = self.arguments[0].partition(", ")
        ratios = {}
        for prefix, library in LIBRARIES.items():
            file = BENCHMARKS / f"{prefix}-{name}.txt"
            if file.exists():
                self.env.note_dependency(str(file))
                ratios[library] = self.ratio(file, title)
        if not ratios:
            raise self.error(f"no file docs/benchmarks/*-{name}.txt")
        (library, ratio), *others = ratios.items()
        rest = "".join(f", {other:.{other < 10:d}f} with {name}" for name, other in others)
        return [nodes.paragraph("", self.text.format(f"{ratio:.{ratio < 10:d}f}", f"with {library}{rest}"))]

    def ratio(self, file: Path, title: str) -> float:
        """Return the last number of a file divided by the first one."""
        text = file.read_text(encoding="utf-8")
        numbers = {}
        for cell in filter(None, self.lines()):
            row, _, column = cell.rpartition(": ")
            try:
                numbers[cell] = value(text, title, row, column)
            except LookupError as error:
                raise self.error(f"{file.name}: {error}") from None
        for small, large in itertools.pairwise(numbers):
            if numbers[small] >= numbers[large]:
                shown = f"{small!r} is {numbers[small]:g}, and {large!r} is {numbers[large]:g}"
                raise self.error(f"{file.name} does not show this: {shown}")
        first, *_, last = numbers.values()
        return last / first

    def lines(self) -> list[str]:
        """Return the lines, that of the smallest number first."""
        return list(self.content)


class Slower(Faster):
    """Check that the numbers fall from line to line."""

    text = "Recorded: {} times the time {}."

    def lines(self) -> list[str]:
        """Return the lines, that of the smallest number first."""
        return list(self.content)[::-1]


def setup(app: Any) -> None:
    """Add the directives to Sphinx."""
    app.add_directive("faster", Faster)
    app.add_directive("slower", Slower)
