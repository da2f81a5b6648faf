"""hpccomm top: show a running job in the terminal, from the reports that its ranks write again and again."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from ..process.numbers import seconds
from . import asking
from .view import View

SHORTEST, LONGEST = 0.2, 30.0  # seconds between two screens: ranks stop to count if nobody asks for a while
PAGE = 120, 50  # columns and lines without a terminal
OTHER_SCREEN, OWN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other one without a cursor
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hpccomm top``."""
    parser.description = (
        "Show what each rank of a running job does, for how long, and for which ranks it waits. Rates are means per "
        "rank (operations) and sums (bytes); the memory is that of the largest rank. An asterisk marks the ranks to "
        "blame for a hang. Press q to end. Exits with 2 if no rank answers."
    )
    parser.epilog = "examples:\n  hpccomm top --pid 12345\n  hpccomm top --job 678 --once"
    asking.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one screen, after one interval, and end")
    parser.add_argument(
        "--interval", type=seconds, default=2.0, metavar="SECONDS", help="time between two screens (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print each screen as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show screens until the user or the job ends; return 2 if no rank answers."""
    if arguments.pid is None and arguments.job is None:
        print("hpccomm top: give the job: --pid PID, or --job JOB", file=sys.stderr)
        return 2
    pause, before = min(max(arguments.interval, SHORTEST), LONGEST), None
    is_live = sys.stdout.isatty() and not (arguments.once or arguments.json)
    try:
        with terminal() if is_live else contextlib.nullcontext(time.sleep) as wait:
            while True:
                _, found = asking.answers(arguments, counts=True)
                view = View(found[-1][1], before)
                if before is not None or not arguments.once:
                    _show(view, is_live, arguments.json)
                if (before is not None and arguments.once) or wait(pause):
                    return 0
                before = view
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # ... | head
        raise
    except (asking.Refused, OSError) as error:
        print(f"hpccomm top: {error}", file=sys.stderr)
        return 2 if before is None else 0
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        print(f"hpccomm top: a report makes no sense: {error!r}", file=sys.stderr)
        return 2


def _show(view: View, is_live: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(view.as_dict()), flush=True)
        return
    columns, lines = os.get_terminal_size(sys.stdout.fileno()) if sys.stdout.isatty() else PAGE
    shown = view.lines(columns, lines - 1)
    if is_live:
        print(HOME + "".join(f"{line}{END_OF_LINE}\n" for line in shown) + END_OF_SCREEN, end="", flush=True)
    else:
        print("\n".join(shown), flush=True)


@contextlib.contextmanager
def terminal() -> Iterator[Callable[[float], bool]]:
    """Use the terminal's other screen in the block; yield a function that waits, and returns True after the key q."""
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    saved = None if keys is None else termios.tcgetattr(keys)

    def wait(seconds: float) -> bool:
        if not select.select([] if keys is None else [keys], [], [], seconds)[0]:
            return False
        return os.read(keys or 0, 64)[:1] in (b"q", b"Q", b"")

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        print(OTHER_SCREEN, end="", flush=True)
        yield wait
    finally:
        print(OWN_SCREEN, end="", flush=True)
        if saved is not None and keys is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, saved)
        signal.signal(signal.SIGTERM, before)
