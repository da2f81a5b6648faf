"""hpccomm run: run a program that was not written for hpccomm; end the job after an error, and explain hangs."""

from __future__ import annotations

import argparse
import atexit
import io
import os
import re
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import errors
from ..debug.words import LARGEST_JOB
from ..process import stderr
from ..process.abort import abort
from ..process.environment import placement
from ..process.excepthook import AbortOnException, aborts_on_exception, end_with
from ..process.numbers import seconds
from ..process.stderr import tell
from .at_import import AtImport
from .main_module import CantOpenError, folder_of, run_code, run_file, run_module

PACKAGE = os.path.dirname(errors.__file__) + os.sep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hpccomm run``."""
    parser.usage = "hpccomm run [options] program.py [arguments]   (or -m module [arguments], or -c code [arguments])"
    parser.description = (
        "Run a program of mpi4py or hpccomm unchanged on every rank. An exception or sys.exit(1) of one rank ends the "
        "job. A hang gives a verdict: the rank that the others wait for, and its line."
    )
    parser.epilog = (
        "examples:\n"
        "  mpiexec -n 4 hpccomm run program.py --its-own-option\n"
        "  mpiexec -n 4 hpccomm run --timeout 60 --log-dir logs program.py\n"
        "  mpiexec -n 4 hpccomm run --only-ranks 0 -m pytest\n"
        "  mpiexec -n 4 hpccomm run --pdb 0-3 program.py"
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="end the job when a call has waited for so long"
    )
    parser.add_argument("--on-timeout", choices=("abort", "warn"), help="end the job, or only say who is late")
    parser.add_argument("--debug-dir", metavar="FOLDER", help="for the reports (HPCCOMM_DEBUG_DIR)")
    parser.add_argument(
        "--trace", action="store_const", const="stack", help="record each call, and its line, for hpccomm trace"
    )
    parser.add_argument(
        "--detail", action="store_const", const="DETAIL", dest="debug", help="compare collectives before they begin"
    )
    parser.add_argument(
        "--accelerate", action="store_true", help="let hpccomm do large Allreduce, Reduce, Scan ... of NumPy's arrays"
    )
    parser.add_argument(
        "--log", type=in_a_folder, metavar="FILE", help="write a line for each call; {rank} in its name is the rank's"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="FOLDER",
        help="write each rank's stdout and stderr to rank-N.out and rank-N.err",
    )
    parser.add_argument(
        "--only-ranks", type=ranks, metavar="RANKS",
        help="print the output of these ranks only, such as 0,3-5; the others' goes to --log-dir, or nowhere",
    )  # fmt: skip
    parser.add_argument(
        "--hook", type=function, action="append", default=[], metavar="MODULE:FUNCTION",
        help="call it before the program, to register hooks: hpccomm.debug:check_numerics, one of your own",
    )  # fmt: skip
    parser.add_argument(
        "--debugpy", type=ranks, default=(), metavar="RANKS", help="let these ranks wait for a client of debugpy"
    )
    parser.add_argument(
        "--pdb", type=ranks, default=(), metavar="RANKS", help="stop these ranks in pdb after an exception"
    )
    parser.add_argument("-m", nargs=argparse.REMAINDER, metavar="", dest="module", help="run a module")
    parser.add_argument("-c", nargs=argparse.REMAINDER, metavar="", dest="code", help="run code")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program, and its arguments")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the program; return its exit status."""
    words = arguments.module or arguments.code or arguments.program
    if not words:
        arguments.parser.error("there is no program")
    if arguments.debugpy or arguments.pdb:
        _let_debuggers_stop(arguments)
    for name in ("timeout", "on_timeout", "debug_dir", "trace", "debug"):
        value = getattr(arguments, name)
        if value is not None:
            os.environ[f"HPCCOMM_{name.upper()}"] = str(value)
    pid, place = os.getpid(), placement()
    if place is not None and place.rank is not None:
        errors.set_rank(place.rank)
    rank = (place and place.rank) or 0
    size = 1 if place is None else place.size
    for name in ("only_ranks", "debugpy", "pdb"):
        chosen = getattr(arguments, name)
        if size is not None and chosen and min(chosen) >= size:
            option, ranks = name.replace("_", "-"), f"{size} rank{'s' * (size > 1)}"
            arguments.parser.error(f"argument --{option}: there is no rank {min(chosen)}; the job has {ranks}")
    _redirect(arguments, rank)
    hook = AbortOnException()
    at_import = AtImport(lambda: _watch(hook, arguments))
    at_import.install()
    sys.argv[:] = words
    sys.path[0] = os.getcwd() if arguments.module else "" if arguments.code else folder_of(words[0])
    if rank in arguments.debugpy:
        from .debugger import wait_for_client

        wait_for_client(rank)
    try:
        if arguments.module:
            # pytest warns about packages with plugins that it can't rewrite any more, unless their docstring has this
            from ..core.late import package

            package().__doc__ = f"{package().__doc__}\nPYTEST_DONT_REWRITE\n"
            run_module(words[0])
        elif arguments.code:
            run_code(words[0])
        else:
            run_file(words[0])
    except SystemExit as end:
        if os.getpid() == pid and not (at_import.waits and _is_alone()):  # not in a forked process
            at_import.remove()
            end_with(end, "")
        raise
    except BaseException as error:
        ends_others = os.getpid() == pid and at_import.waits and not _is_alone() and aborts_on_exception()
        if ends_others:
            at_import.remove()
            hook.install(size=2)  # or more
        if isinstance(error, CantOpenError):
            tell(str(error))
            if ends_others:
                abort(2)
            return 2
        if rank in arguments.pdb and isinstance(error, Exception) and os.getpid() == pid:
            from .debugger import post_mortem

            post_mortem(rank, error, _of_the_program(error.__traceback__))
        _show(error, hook)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _let_debuggers_stop(arguments: argparse.Namespace) -> None:
    """Keep the watchdog from ending the job while a rank is in a debugger and the others wait for it."""
    from . import debugger

    if arguments.debugpy and not debugger.is_installed():
        arguments.parser.error("--debugpy needs debugpy: pip install debugpy")
    arguments.timeout = arguments.timeout or debugger.TIME_LIMIT
    arguments.on_timeout = arguments.on_timeout or "warn"


def _redirect(arguments: argparse.Namespace, rank: int) -> None:
    """Send stdout and stderr, also those of C code, to files or nowhere, unless the options leave them on the terminal.

    Messages of hpccomm, such as the verdict, still go to the terminal, too.
    """
    shown, folder = arguments.only_ranks, arguments.log_dir
    if rank in (shown or ()) or (shown is None and folder is None):
        return
    try:
        stderr.terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        for file, stream, ending in ((1, sys.stdout, "out"), (2, sys.stderr, "err")):
            path = os.devnull if folder is None else folder / f"rank-{rank}.{ending}"
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # flushes it; `tail -f` shows each line, and a hang loses none
            with open(path, "wb") as new:
                os.dup2(new.fileno(), file)
    except OSError as error:
        arguments.parser.error(f"argument --log-dir: {error}")


def _is_alone() -> bool:
    """Return True if no other ranks may wait for this one in MPI_Init."""
    place = placement()
    return place is None or place.size == 1


def _show(error: BaseException, hook: AbortOnException) -> None:
    """Call the hook; this is a separate function, because no frame may refer to the hook while the program runs."""
    trace = _of_the_program(error.__traceback__)
    hook.take_the_place_back()
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((PACKAGE, "<frozen", runpy.__file__)):
            return trace
        trace = trace.tb_next
    return None


def _watch(hook: AbortOnException, arguments: argparse.Namespace) -> None:
    """Make an error on one rank end the job, and watch the calls of communicators; collective."""
    from ..job import mpi_library

    mpi = mpi_library.load()
    size = mpi.COMM_WORLD.Get_size()
    if size == 1:
        from ..process import alone

        alone.check(mpi)
    errors.set_rank(mpi.COMM_WORLD.Get_rank())
    hook.install(size)
    has_hooks = bool(arguments.log or arguments.hook)
    if size == 1 and not has_hooks:
        return
    from ..core.group import ProcessGroup

    group = ProcessGroup.from_comm(mpi.COMM_WORLD, name="hpccomm run")
    if not group.settings.watchdog:
        group.destroy()
        if has_hooks:
            raise SystemExit("hpccomm run: --log and --hook need what HPCCOMM_WATCHDOG=0 turns off")
        return
    from ..debug import attach
    from ..debug.watchdog import IF_ALL_WAIT
    from . import communicators

    wants_the_end = arguments.timeout is not None or bool(os.environ.get("HPCCOMM_ON_TIMEOUT", "").strip())
    if not group.comm.bcast(wants_the_end):
        group.on_timeout = IF_ALL_WAIT
    communicators.install(group, arguments.accelerate)
    if group.settings.keeps_reports or group.settings.trace != "0":
        hook.at_the_end = attach.last_words()
    atexit.register(_leave, group, os.getpid())
    _register_hooks(arguments)


def _register_hooks(arguments: argparse.Namespace) -> None:
    from ..core.late import late
    from ..debug.hooks import log_operations

    if arguments.log:
        log_operations(arguments.log)
    for name in arguments.hook:
        try:
            register = late(name)
        except (ModuleNotFoundError, AttributeError) as error:
            module, _, function = name.partition(":")
            if error.name != function and not f"{module}.".startswith(f"{error.name}."):  # of the module itself
                raise
            raise SystemExit(f"hpccomm run: argument --hook {name}: {error}") from error
        register()


def _leave(group: Any, pid: int) -> None:
    """Wait for the other ranks at the end of the program, so that the watchdog can report that this one has ended."""
    from mpi4py import MPI

    if os.getpid() == pid and not MPI.Is_finalized():
        group.leave(tells=False)


# -- types of options; argparse names the option that one of them refuses ---------------------------------


def in_a_folder(text: str) -> str:
    """Return the name of a file whose folder exists."""
    folder = os.path.dirname(text) or "."
    if "{rank}" not in folder and not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"there is no folder {folder}")
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder; expected a file")
    if "{rank}" not in folder and not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"you may not write into {os.path.abspath(folder)}")
    return text


def function(text: str) -> str:
    """Return the text ``MODULE:FUNCTION``."""
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:FUNCTION, such as hpccomm.debug:check_numerics")
    return text


def ranks(text: str) -> set[int]:
    """Return the ranks of a list such as ``0,3-5``."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= LARGEST_JOB:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 0,3-5")
        found.update(range(first, last + 1))
    return found
