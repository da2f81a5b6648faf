"""The command line: ``hpccomm SUBCOMMAND``, also as ``python -m hpccomm SUBCOMMAND``.

A subcommand is one line in `COMMANDS` and a module with two functions: ``add_arguments(parser)``, and
``run(arguments)``, which returns the exit status. The module is imported when its subcommand runs, and must not
import MPI before `run`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple, NoReturn

from .. import __version__
from ..core import late
from ..process.environment import launcher


class Command(NamedTuple):
    """A subcommand: its module, and one line for ``hpccomm --help``."""

    module: str
    summary: str


COMMANDS = {
    "run": Command(late.RUN, "run a program of mpi4py or hpccomm, end it after an error, explain its hangs"),
    "info": Command(late.INFO, "show MPI, launcher and GPU configuration"),
    "trace": Command(late.TRACE, "compare the recorded operations of all ranks"),
    "debug": Command(late.DEBUG, "name the rank that a hanging job waits for"),
    "top": Command(late.TOP, "show what each rank of a running job does, again and again"),
    "slurm": Command(late.SLURM, "write a batch script for a program on this machine's Slurm"),
    "checkpoint": Command(late.CHECKPOINT, "list, verify, drain and export checkpoints"),
    "bench": Command(late.BENCH, "measure operations against mpi4py, CuPy's NCCL and torch"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the command line) names, and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser, subparsers = parsers_of([chosen])
    if not arguments:
        parser.print_help()
        return 0
    if chosen == arguments[0] and chosen not in COMMANDS:
        parser.error(f"there is no subcommand {chosen!r}{nearest(chosen, COMMANDS)}")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        known: Parser = getattr(parsed, "parser", subparsers[parsed.command])
        if not unknown[0].startswith("-"):
            folders = [each for each in (getattr(parsed, "folder", None), *unknown) if each and os.path.isdir(each)]
            newest = f"; it takes one folder: {max(folders, key=os.path.getmtime)} is the newest" if folders else ""
            known.error(f"{unknown[0]} is one argument too many{newest}")
        options = re.findall(r"--[\w-]+", known.format_help().partition("\nexamples:\n")[0])
        ranks = f"; mpiexec starts the ranks: mpiexec -n 4 {known.prog} ..." if unknown[0] in ("-n", "-np") else ""
        known.error(f"there is no option {unknown[0]}{ranks or nearest(unknown[0], options)}")
    try:
        status: int = late.late(COMMANDS[parsed.command].module).run(parsed)
        if parsed.command != "run" and sys.stdout is not None:  # the program may have closed or replaced stdout
            sys.stdout.flush()
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        if parsed.command == "run" or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        print(f"hpccomm {parsed.command}: {error}", file=sys.stderr)
        if error.filename is not None:
            return 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def parsers_of(chosen: Collection[str | None]) -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser, and those of the subcommands; only the chosen subcommands have their arguments."""
    parser = Parser(prog="hpccomm", description="torch.distributed's model of communication for NumPy arrays, on MPI.")
    parser.epilog = "examples:\n  hpccomm info\n  mpiexec -n 4 hpccomm run program.py\n  hpccomm run --help"
    parser.add_argument("-V", "--version", action="version", version=f"hpccomm {__version__}")
    parser.add_argument(
        "--print-completion", action=PrintCompletion, choices=("bash", "zsh", "tcsh"),
        help="print a script with which this shell completes commands and options; needs shtab",
    )  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary)
        if name in chosen:
            late.late(command.module).add_arguments(subparser)
    return parser, subparsers.choices


class PrintCompletion(argparse.Action):
    """Print a script that completes the command line, made by shtab, and end."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, __: str | None = None) -> None:
        """Print the script for a shell."""
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            parser.error("--print-completion needs shtab: pip install shtab")
        print(shtab.complete(parsers_of(COMMANDS)[0], shell))
        parser.exit()


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that wraps a text unless it has several lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text if "\n" in text else argparse.HelpFormatter(self._prog, width=width)._fill_text
        return fill(text, width, indent)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints help and errors on one process of a job only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, **options})

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the process; on an error, let the first process print its message first."""
        if status:
            let_the_first_process_speak()
        super().exit(status, message)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if is_first_process():
            super()._print_message(message, file)


def nearest(given: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean trace?"``; "" if no name is similar."""
    found = difflib.get_close_matches(given.partition("=")[0], list(names), 1)
    return f"; did you mean {found[0]}?" if found else ""


def let_the_first_process_speak() -> None:
    """Wait a second on all processes but the first: Open MPI's mpirun kills the job when one process fails."""
    if not is_first_process():
        time.sleep(1)


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True on the launcher's rank 0, or without a launcher; does not need MPI to be initialised."""
    started_by = launcher(environ)
    return started_by is None or environ.get(started_by.rank, "0") == "0"
