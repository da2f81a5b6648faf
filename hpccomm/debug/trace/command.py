"""hpccomm trace: a verdict, a timeline and a summary from the ranks' recordings."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..folder import runs
from .arrivals import by_rank
from .files import SUFFIX, read
from .history import history
from .summary import summary, times
from .timeline import chrome, html


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hpccomm trace``."""
    parser.description = (
        "Compare the operations that the ranks of a program with HPCCOMM_TRACE=1 have recorded, and name ranks that "
        "differ. Exits with 1 if one does, with 2 if a rank has no recording."
    )
    parser.epilog = "examples:\n  hpccomm trace reports --summary\n  hpccomm trace reports --html timeline.html"
    parser.add_argument("folder", help="the folder of the recordings (HPCCOMM_DEBUG_DIR, or hpccomm-debug-*)")
    parser.add_argument("--summary", action="store_true", help="how long operations take, and who is the straggler")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="OUT.html", type=Path, help="write a page that shows all ranks")
    parser.add_argument("--timeline", metavar="OUT.json", type=Path, help="write a file for ui.perfetto.dev")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict and other requested output; return 1 if it names a rank, 2 if a recording is missing."""
    try:
        traces = read(arguments.folder)
    except (OSError, ValueError) as error:
        print(f"hpccomm trace: {error}", file=sys.stderr)
        return 2
    if not traces:
        print(
            f"hpccomm trace: there are no recordings (rank*.trace.json) in {arguments.folder}; run the program with "
            "HPCCOMM_TRACE=1",
            file=sys.stderr,
        )
        return 2
    found = history(traces)
    all_runs = runs(Path(arguments.folder), f"rank*{SUFFIX}")
    tell = partial(print, file=sys.stderr) if arguments.json else print
    if len(all_runs) > 1:
        tell(f"the last of {len(all_runs)} runs in {arguments.folder}: {all_runs[-1]}; name another one to see it")
    count = sum(len(trace.records) for trace in traces)
    if arguments.json:
        said: dict[str, Any] = {"operations": count, "recordings": len(traces), "size": traces[0].size}
        said |= {"culprits": found.culprits, "lines": found.lines}
        if arguments.summary:
            said |= {
                "times": [each._asdict() for each in times(traces)],
                "ranks": [asdict(each) for each in by_rank(traces)],
            }
        print(json.dumps(said, indent=2))
    else:
        print(f"{count} operations of {len(traces)} of {traces[0].size} ranks")
        print("\n".join(found.lines or ["all ranks have made the same calls"]))
        if arguments.summary:
            print(f"\n{summary(traces)}")
    if arguments.timeline:
        arguments.timeline.write_text(json.dumps(chrome(traces), separators=(",", ":")), encoding="utf-8")
        tell(f"{arguments.timeline}: open it in https://ui.perfetto.dev")
    if arguments.html:
        arguments.html.write_text(html(traces, found), encoding="utf-8")
        tell(f"{arguments.html}: open it in a browser")
    return 1 if found.culprits else 2 if len(traces) < traces[0].size else 0
