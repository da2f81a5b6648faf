"""hpccomm debug: name the rank to blame for a hang, from the reports of a job's ranks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from . import asking, groups_seen, stacks
from .culprits import Verdict, verdict
from .words import by_number, printable, ranks_in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hpccomm debug``."""
    parser.description = (
        "Name the rank that a hanging job waits for. Exits with 1 if it finds one, with 2 if there are no reports."
    )
    parser.epilog = (
        "examples:\n  hpccomm debug --pid 12345 --stacks\n  hpccomm debug --job 678\n  hpccomm debug reports --json"
    )
    asking.add_arguments(parser, " first")
    parser.add_argument("--stacks", action="store_true", help="also show what each thread of each rank is in")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict; return 1 if it names a rank, 0 if no rank waits, 2 without reports."""
    try:
        folder, found = asking.answers(arguments)
    except (asking.Refused, OSError) as error:
        print(f"hpccomm debug: {error}", file=sys.stderr)
        return 2
    shown = found if arguments.job is not None else found[-1:]
    if len(found) > len(shown) and not arguments.json:
        print(f"the last of {len(found)} runs in {folder}; name another one to see it: {found[0][0]}")
    try:
        verdicts = [(reports, verdict(reports, reports[-1]["size"])) for _, reports in shown]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        print(f"hpccomm debug: a report in {folder} makes no sense: {error!r}", file=sys.stderr)
        return 2
    for reports, said in verdicts:
        _show(arguments, reports, said)
    return 1 if any(said.culprits for _, said in verdicts) else 0


def _show(arguments: argparse.Namespace, reports: list[dict[str, Any]], found: Verdict) -> None:
    size = reports[-1]["size"]
    if arguments.json:
        print(json.dumps({"culprits": found.culprits, "lines": found.lines, "reports": len(reports), "size": size}))
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reports[-1]["time"]))
    _say(f"{len(reports)} of {size} ranks, {when} ({', '.join(sorted({each['reason'] for each in reports}))}):")
    _say("\n".join(found.lines))
    if spares := [int(each["rank"]) for each in reports if each.get("spare")]:
        _say(f"{ranks_in_words(spares)} {by_number(spares, 'waits as a spare', 'wait as spares')}")
    if arguments.stacks:
        for each in sorted(reports, key=lambda each: int(each["rank"])):
            _say(f"\nrank {each['rank']}, process {each['pid']} on {each['host']}")
            for name, lines in sorted(each["threads"].items(), key=lambda thread: thread[0] != "MainThread"):
                _say("\n".join([f"  {name}", *(f"    {line}" for line in _folded(lines))]))


def _folded(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a stack; consecutive lines of libraries and of hpccomm become one."""
    hidden = 0
    for line in [*lines, ""]:
        is_of_a_library = line.startswith((groups_seen.PACKAGE, "<", *stacks.LIBRARIES))
        hidden += is_of_a_library
        if hidden and not is_of_a_library:
            yield f"({hidden} line{'s' * (hidden > 1)} of libraries)"
            hidden = 0
        if line and not is_of_a_library:
            yield line


def _say(text: str) -> None:
    print(printable(text))
