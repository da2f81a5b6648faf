"""``hpccomm checkpoint``: what is in a folder of checkpoints, whether it is whole, and its arrays for other programs.

It needs no MPI, and does not initialise it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.export import FORMATS, export
from ..checkpoint.inspection import Found, inspect
from ..checkpoint.together import CheckpointError
from ..checkpoint.writer import in_words
from ..debug.words import size_in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options to `parser`."""
    parser.description = "Look at a folder that checkpoint.save has written. No MPI is needed."
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=type(parser))
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.add_argument("folder", metavar="FOLDER", type=Path, help="the folder given to checkpoint.save")
        if name != "list":
            command.add_argument("--step", type=int, help="this step alone (default: all; export: the last)")
        if name == "export":
            command.add_argument("output", metavar="OUTPUT", type=Path, help=f"a new name: *{', *'.join(FORMATS)}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0, or 1 if something is not whole, or 2 if there is nothing, or it can't be done."""
    found = list(inspect(arguments.folder))
    if (step := getattr(arguments, "step", None)) is not None:
        found = [each for each in found if each.step == step]
    try:
        if not found:
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"there is {which} in {arguments.folder}")
        return COMMANDS[arguments.what][0](found, arguments)
    except (CheckpointError, OSError) as error:
        print(f"hpccomm checkpoint: {error}", file=sys.stderr)
        return 2


def _list(found: list[Found], _: argparse.Namespace) -> int:
    """Print a table of the steps, and what is wrong with them."""
    return _report(found)


def _verify(found: list[Found], _: argparse.Namespace) -> int:
    """Read all files, and print the same table."""
    for each in found:
        each.verify()
    return _report(found)


def _export(found: list[Found], arguments: argparse.Namespace) -> int:
    """Write the arrays of the last step to one file."""
    last = found[-1]
    if last.body is None or last.problems:
        raise CheckpointError(f"step {last.step}: {last.problems[0]}; --step names another one")
    export(last.body, last.path_of, arguments.output)
    arrays = len(last.body["arrays"]) + len(last.body["replicated"])
    print(f"{arguments.output}: {arrays} array{'s' * (arrays != 1)} of step {last.step}")
    return 0


def _report(found: list[Found]) -> int:
    """Print a table, then the problems; return 1 if there are any."""
    rows = [("step", "whole", "ranks", "arrays", "size", "saved"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    for each in found:
        for problem in each.problems:
            print(f"step {each.step}: {problem}")
    return 1 if any(each.problems for each in found) else 0


def _row(found: Found) -> tuple[str, ...]:
    if (body := found.body) is None:
        return str(found.step), "no", *"????"
    writer = body.get("writer", {})
    return (
        str(found.step),
        "no" if found.problems else "yes",
        str(body["ranks"]),
        str(len(body["arrays"]) + len(body["replicated"])),
        size_in_words(sum(found.sizes.values())),
        f"{writer.get('since', '?')} by {in_words(writer)}",
    )


COMMANDS: dict[str, tuple[Callable[[list[Found], argparse.Namespace], int], str]] = {
    "list": (_list, "the steps in a folder, and whether their files are there"),
    "verify": (_verify, "the same, of files that are read, and compared with their checksums"),
    "export": (_export, "write the arrays of a step to one file of HDF5, or to zarr"),
}
