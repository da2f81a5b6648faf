"""``hpccomm checkpoint``: list a folder of checkpoints, verify its files, and export its arrays for other programs.

It needs no MPI and does not initialise it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint import files
from ..checkpoint.draining import drain
from ..checkpoint.export import FORMATS, export
from ..checkpoint.inspection import Found, inspect, whole
from ..checkpoint.local import check_owner, local_folder
from ..checkpoint.together import CheckpointError
from ..checkpoint.writer import in_words
from ..debug.words import size_in_words
from .tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options to `parser`."""
    parser.description = "List, verify, drain and export checkpoints in a folder of checkpoint.save. No MPI is needed."
    parser.epilog = (
        "examples:\n"
        "  hpccomm checkpoint list saved\n"
        "  hpccomm checkpoint verify saved --step 20\n"
        "  hpccomm checkpoint drain saved --local /tmp/saved\n"
        "  hpccomm checkpoint export saved all.h5"
    )
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=type(parser))
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.set_defaults(parser=command)
        command.add_argument("folder", metavar="FOLDER", type=Path, help="the folder given to checkpoint.save")
        command.add_argument(
            "--local", metavar="PATH", type=Path, action="append", default=[], required=name == "drain",
            help="also what is in this node's own storage: the local= given to checkpoint.save",
        )  # fmt: skip
        if name != "list":
            command.add_argument("--step", type=int, help=f"this step alone (default: {STEPS.get(name, 'the last')})")
        if name in ("list", "verify"):
            command.add_argument("--json", action="store_true", help="print JSON")
        if name == "export":
            command.add_argument("output", metavar="OUTPUT", type=Path, help=f"a new name: *{', *'.join(FORMATS)}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0 on success, 1 if a checkpoint is damaged, 2 if there is none or the command fails."""
    step = getattr(arguments, "step", None)
    folders = [arguments.folder, *(local_folder(local, arguments.folder) for local in arguments.local)]
    try:
        for folder, local in zip(folders[1:], arguments.local):
            if not local.is_dir():
                raise CheckpointError(f"there is no folder {local} on this node; --local is local= of checkpoint.save")
            check_owner(folder)
        found = [each for folder in folders for each in inspect(folder) if step in (None, each.step)]
        if not found:
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"there is {which} in {' or '.join(map(str, folders))}")
        return COMMANDS[arguments.what][0](sorted(found, key=lambda each: each.step), arguments)
    except (CheckpointError, OSError) as error:
        print(f"hpccomm checkpoint: {error}", file=sys.stderr)
        return 2


def _verify(found: list[Found], arguments: argparse.Namespace) -> int:
    """Compare all files with their checksums, and print the same table."""
    for each in found:
        each.verify()
    return _report(found, arguments)


def _export(found: list[Found], arguments: argparse.Namespace) -> int:
    """Write the arrays of the last step to one file."""
    body, paths = whole(found)
    export(body, paths.__getitem__, arguments.output)
    arrays = len(body["arrays"]) + len(body["replicated"])
    print(f"{arguments.output}: {arrays} array{'s' * (arrays != 1)} of step {body['step']}")
    return 0


def _drain(found: list[Found], arguments: argparse.Namespace) -> int:
    """Copy the files of the last step that has a manifest from this node's storage to the shared folder."""
    published = [each for each in found if each.body is not None]
    if not published:
        raise CheckpointError(f"step {found[-1].step}: {found[-1].problems[0]}")
    step = published[-1].step
    for each in found:
        if each.step > step:
            print(f"step {each.step}: {each.problems[0]}; it is left out", file=sys.stderr)
    last = [each for each in published if each.step == step]
    if any(each.folder == arguments.folder for each in last):
        print(f"step {step} is in {arguments.folder}")
        return 0
    there, of_all = 0, 0
    for each in last:
        there, of_all = drain(each, arguments.folder)
    if there < of_all:
        print(
            f"step {step}: {there} of {of_all} files are in {arguments.folder}; others are on other nodes; if one of "
            "those is lost, --step names an earlier step"
        )
    else:
        print(f"step {step} is in {arguments.folder}")
    return 0


def _report(found: list[Found], arguments: argparse.Namespace) -> int:
    """Print a table, then the problems; return 1 if there are any."""
    if arguments.json:
        print(json.dumps([_as_json(each) for each in found], indent=2))
        return 1 if any(each.problems for each in found) else 0
    rows = [_row(each, "folder" if each.folder == arguments.folder else "node") for each in found]
    print_table(rows, ("step", "where", "whole", "files", "ranks", "arrays", "size", "saved"))
    for each in found:
        for problem in each.problems:
            print(f"step {each.step}: {problem}")
    return 1 if any(each.problems for each in found) else 0


def _as_json(found: Found) -> dict[str, Any]:
    said: dict[str, Any] = {"step": found.step, "folder": str(found.folder), "problems": found.problems}
    if (body := found.body) is not None:
        said |= {
            "files_there": len(found.files_there()),
            "files": len(files.sizes_of_files(body)),
            "ranks": body["ranks"],
            "arrays": len(body["arrays"]) + len(body["replicated"]),
            "bytes": sum(found.sizes.values()),
            "writer": body.get("writer", {}),
        }
    return said


def _row(found: Found, where: str) -> tuple[str, ...]:
    if (body := found.body) is None:
        return str(found.step), where, "no", *"?????"
    writer = body.get("writer", {})
    return (
        str(found.step),
        where,
        "no" if found.problems else "yes",
        f"{len(found.files_there())} of {len(files.sizes_of_files(body))}",
        str(body["ranks"]),
        str(len(body["arrays"]) + len(body["replicated"])),
        size_in_words(sum(found.sizes.values())),
        f"{writer.get('since', '?')} by {in_words(writer)}",
    )


STEPS = {"verify": "all of them"}
COMMANDS: dict[str, tuple[Callable[[list[Found], argparse.Namespace], int], str]] = {
    "list": (_report, "list the steps in a folder, and whether their files are there"),
    "verify": (_verify, "read all files, compare them with their checksums, and list the steps"),
    "drain": (_drain, "copy the last step from this node's own storage to the folder; on each node of the job"),
    "export": (_export, "write the arrays of a step to one file of HDF5, or to zarr"),
}
