"""The command line of a study: it has the sizes and iterations of ``hpccomm bench``; rank 0 prints the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import hpccomm as hc
from hpccomm.bench.command import MISUSED, OK, add_amounts, add_sizes, plan_of, say, sizes_of
from hpccomm.bench.measure import Plan
from hpccomm.cli.machine import machine, one_line
from hpccomm.cli.main import Parser

S = TypeVar("S")


def main(
    description: str | None,
    steps: Callable[[hc.ProcessGroup, Sequence[int], Plan], Iterator[S]],
    text: Callable[[Sequence[S]], str],
    least_ranks: int = 1,
) -> None:
    """Measure the steps with the options of the command line, print the result, and exit."""
    parser = Parser(
        prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}", description=(description or "").partition("\n")[0]
    )
    add_sizes(parser)
    add_amounts(parser)
    arguments = parser.parse_args()
    try:
        sizes = sizes_of(arguments.begin, arguments.end, arguments.factor)
    except ValueError as error:
        parser.error(str(error))
    with hc.init_process_group() as world:
        if world.size < least_ranks:
            sys.exit(say(f"{parser.prog}: this needs at least {least_ranks} ranks: mpiexec -n {least_ranks}", MISUSED))
        found = text(list(steps(world, sizes, plan_of(arguments))))
        say(f"# {one_line(machine(world))}\n\n{found}")
    sys.exit(OK)
