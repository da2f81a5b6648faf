"""End the whole job after an uncaught exception on one rank; otherwise the other ranks would hang."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .. import errors
from . import forked
from .proc import MAPPED_LATER, take_names_away

PATIENCE = 3.0  # seconds for ranks that Ctrl-C interrupts inside MPI to report their place
PACKAGE = os.path.dirname(errors.__file__) + os.sep


class AbortOnException:
    """A sys.excepthook that prints the traceback and ends the whole job."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._pid = os.getpid()
        self.at_the_end: Callable[[str], object] | None = None  # called with the exception's text

    def install(self, size: int) -> None:
        """Replace sys.excepthook if there are other ranks and Python is not interactive."""
        interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if size > 1 and not interactive and sys.excepthook is not self and aborts_on_exception():
            self._previous, sys.excepthook, self._pid = sys.excepthook, self, os.getpid()

    def take_the_place_back(self) -> None:
        """Become sys.excepthook again; a hook that the program has installed meanwhile only prints."""
        if self._previous is not None and sys.excepthook is not self:
            self._previous, sys.excepthook = sys.excepthook, self

    def remove(self) -> None:
        """Put the previous hook back."""
        if sys.excepthook is self:
            sys.excepthook = self._previous
        self._pid = 0  # torch.distributed's hook, if installed, still calls this one

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print as the previous hook does, then end every rank; a forked process only prints.

        Equal texts of several ranks of a node are printed once.
        """
        import traceback

        from .abort import abort
        from .printed import let_launcher_read
        from .stderr import tell
        from .together import Words, said_once

        previous, self._previous = self._previous, sys.__excepthook__  # it may call this one again, as torch's does
        lines = ""
        try:
            if previous is sys.__excepthook__ and os.getpid() == self._pid:
                lines = "".join(traceback.format_exception(kind, error, _without_refusing(error, trace)))
            else:
                previous(kind, error, trace)
        except Exception:  # the job must end even if the program's hook is broken
            with contextlib.suppress(Exception):  # or stderr is closed
                traceback.print_exception(kind, error, trace)
        if os.getpid() != self._pid or _goes_on():
            if lines:
                tell(Words(lines, "").of(f"rank {errors._rank}").rstrip())
            return
        if self.at_the_end is not None:
            with contextlib.suppress(Exception):
                self.at_the_end(f"{kind.__name__}: {error}")
        hint = _at_the_end_of_a_block(trace) or _arguments_taken(error)
        who = "Ctrl-C" if _is_ctrl_c(kind, trace) else f"{kind.__name__} on {{ranks}}"
        with said_once(Words(lines, f"hpccomm: {who} ends the job{hint}")) as texts:
            for text in texts:
                tell(text)
            if isinstance(sys.stderr, io.StringIO):  # torch's hook collects the output to print it later
                collected, sys.stderr = sys.stderr, sys.__stderr__
                print(collected.getvalue(), end="", file=sys.stderr)
                collected.truncate(0)
            let_launcher_read()
        if issubclass(kind, KeyboardInterrupt):
            time.sleep(PATIENCE)
        take_names_away(MAPPED_LATER)
        abort(1)


def _without_refusing(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback; if an error of hpccomm's or a refused argument ends it, without hpccomm's last frames."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    shown = len(entries)
    refused = isinstance(error, ValueError | TypeError) and shown and _raises(entries[-1])
    if refused or isinstance(error, errors.DistError):
        while shown and entries[shown - 1].tb_frame.f_code.co_filename.startswith((PACKAGE, "hpccomm/native/")):
            shown -= 1
    for each in reversed(entries[: shown or None]):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def _raises(entry: TracebackType) -> bool:
    """Whether a `raise` statement of this frame raised the exception, rather than a function that it called."""
    import dis

    return entry.tb_frame.f_code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _is_ctrl_c(kind: type[BaseException], trace: TracebackType | None) -> bool:
    """Whether Python has raised KeyboardInterrupt, not the program."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return kind is KeyboardInterrupt and not (trace is not None and _raises(trace))


def _goes_on() -> bool:
    """Whether the program still runs because C code has only printed an exception (Cython's ``__dealloc__``).

    Python code that calls ``sys.excepthook`` by its name, as ``coverage run`` does, runs a program that has ended.
    """
    frame, is_called = sys._getframe(1), False
    while frame.f_back is not None:
        frame = frame.f_back
        is_called = is_called or "excepthook" in frame.f_code.co_names
    runs = frame.f_code.co_name in ("<module>", "_run_module_as_main")
    return runs and not is_called and threading.current_thread() is threading.main_thread()


def _at_the_end_of_a_block(trace: TracebackType | None) -> str:
    """Return a clause if the error came from the end of a `with` block (Python shows its first line); otherwise ""."""
    from traceback import walk_tb

    codes = (frame.f_code for frame, _ in walk_tb(trace))
    if any(code.co_name == "__exit__" and code.co_filename.startswith(PACKAGE) for code in codes):
        return "; at the end of a `with` block, a rank waits for the other ranks to come there"
    return ""


def _arguments_taken(error: BaseException) -> str:
    """Return the argument names of a function of hpccomm that got an unknown one (mpi4py's ``root=``) or too few."""
    refused = re.match(r"(\w+)\(\) (?:got an unexpected keyword|missing \d+ required)", str(error))
    function = getattr(sys.modules[errors.__package__], refused[1], None) if refused else None
    if not inspect.isfunction(function):
        return ""
    return f"; the arguments of hpccomm.{function.__name__} are {', '.join(inspect.signature(function).parameters)}"


def aborts_on_exception() -> bool:
    """Whether an exception or an exit status of one rank ends the job (HPCCOMM_ABORT_ON_EXCEPTION)."""
    return os.environ.get("HPCCOMM_ABORT_ON_EXCEPTION", "1") != "0"


def end_with(end: SystemExit, where: str = " inside `with` of the world") -> None:
    """End every rank with the status of a SystemExit, unless the status or HPCCOMM_ABORT_ON_EXCEPTION is 0."""
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if not status & 0xFF or forked.is_child or not aborts_on_exception():
        return
    from .abort import abort
    from .printed import let_launcher_read
    from .stderr import tell
    from .together import Words, said_once

    text = "" if isinstance(end.code, int) else f"{end.code}\n"
    why = "Ctrl-C" if end.code == 128 + signal.SIGINT else f"sys.exit({end.code!r}){where}"
    with said_once(Words(f"{text}hpccomm: {why} ends the job", "")) as texts:
        for each in texts:
            tell(each)
        let_launcher_read()
    take_names_away(MAPPED_LATER)
    abort(status & 0xFF)
