"""Start the watchdog: its signals, and its thread, which imports the rest of the watchdog at its first look.

All ranks start together and load modules from one file system. Modules that a first operation does not need are
imported a second later. That is long before a call counts as a hang, because a file system may hang, too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ..core.timeouts import as_seconds
from ..native import fastpath, gil_held
from ..process import stderr
from ..process.proc import say_that_it_ends
from ..process.settings import Settings, folder_at_start
from .groups_seen import PACKAGE, groups

if TYPE_CHECKING:
    from .watchdog import Watchdog

LONGEST_PERIOD = 1.0  # seconds between two looks

# Both are held during a fork: a child can't import a module that a missing thread is importing.
_importing = threading.RLock()
_changing = threading.RLock()  # guards the fields of a Start; never held during an import


def period() -> float:
    """Return the seconds between two looks at the calls in flight."""
    shortest = min((as_seconds(group.timeout) for group in groups()), default=10 * LONGEST_PERIOD)
    return min(LONGEST_PERIOD, max(shortest / 10, 0.05))


class Signals:
    """The watchdog's signals: each has a pipe that becomes readable when the signal arrives."""

    def __init__(self, *numbers: signal.Signals) -> None:
        wanted = numbers or (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
        self.pipes = {number: _pipe() for number in wanted}  # the ends for reading and writing
        self._taken: list[int] = []
        self._pid = os.getpid()

    def listen(self) -> None:
        """Listen to the signals that the program does not handle."""
        if self.listen_to(signal.SIGUSR2):
            atexit.register(self._stop_listening)
        self.listen_to(signal.SIGINT, signal.default_int_handler)  # the default handler is still called
        os.register_at_fork(before=_hold_back, after_in_parent=_go_on, after_in_child=self.close_in_child)

    def listen_to(self, number: signal.Signals, default: Any = signal.SIG_DFL) -> bool:
        """Make a signal write into its pipe from now on; return False if the program handles it.

        Python's own handlers run in the main thread, which may be inside MPI; faulthandler's handler writes at once.
        """
        if signal.getsignal(number) is not default:
            return False
        pipe = self.pipes[number][1]
        faulthandler.register(number, file=pipe, all_threads=False, chain=default is not signal.SIG_DFL)
        self._taken.append(number)
        return True

    def _stop_listening(self) -> None:
        """Ignore SIGUSR2 from now on: without a handler, one that arrives while Python exits would kill the process."""
        if os.getpid() == self._pid:
            faulthandler.unregister(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def close_in_child(self) -> None:
        """Stop handling the signals in a forked process: its writes would be taken for the rank's."""
        for number in self._taken:
            faulthandler.unregister(number)
        _go_on()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe with non-blocking writes, for signal handlers."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    return read, write


_held: list[set[Any]] = []  # the signals that were blocked before each fork


def _hold_back() -> None:
    _importing.acquire()
    _changing.acquire()
    _held.append(signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2)))


def _go_on() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())
    _changing.release()
    _importing.release()


class Start:
    """This process's watchdog, from its start on."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.watchdog: Watchdog | None = None  # None until it is loaded
        self.pid = os.getpid()
        self._rank = rank
        self._size = size
        self._folder = folder
        self._processes: dict[int, int] = {}
        self._since = time.time()
        self._has_stopped = False
        self._signals = Signals()
        self._thread = threading.Thread(target=self._run, name="hpccomm-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread, and listen to the signals that the program does not handle."""
        atexit.register(self._report_end)
        self._signals.listen()
        self._thread.start()
        self._start_threads_without_python()

    def _start_threads_without_python(self) -> None:
        """Start the threads that answer for this process while a call of C holds the GIL (`native/gil_held.h`)."""
        if (
            gil_held is None
            or fastpath is None
            or not hasattr(os, "memfd_create")
            or not (free := gil_held.free_signal())
        ):
            return
        self._stacks = os.memfd_create("hpccomm-stacks")  # faulthandler writes stacks into it
        faulthandler.register(free, file=self._stacks, all_threads=True)
        terminal = stderr.terminal.fileno() if stderr.terminal else -1
        if gil_held.start(self._rank, self._size, PACKAGE, free, self._stacks, terminal, fastpath.blocking_address()):
            atexit.register(gil_held.stop)

    def stop(self) -> None:
        """End the thread, because rank 0's settings disable the watchdog."""
        self._has_stopped = True
        with _changing:
            if self.watchdog is not None:
                self.watchdog.has_stopped = True
        os.write(self._signals.pipes[signal.SIGUSR2][1], b"stop")
        if gil_held is not None:
            gil_held.stop()

    def configure(self, agreed: Settings, processes: dict[int, int]) -> None:
        """Use the settings that all ranks agreed on, and the processes of this node."""
        with _changing:
            self._processes.update(processes)
            self._folder = agreed.debug_dir
            if gil_held is not None:
                gil_held.answer_in(os.path.abspath(self._folder), "")
            if self.watchdog is not None:
                self.watchdog.reporter.configure(self._folder, self._processes)
        if agreed.keeps_reports or agreed.trace != "0":
            self._signals.listen_to(signal.SIGTERM)  # launchers send it to the other ranks when one has died

    def loaded(self) -> Watchdog:
        """Return the watchdog; import it if necessary."""
        with _importing:
            from .report import Reporter
            from .watchdog import Watchdog
        with _changing:
            if self.watchdog is None:
                folder = self._folder or folder_at_start()
                reporter = Reporter(self._rank, self._size, folder, self._processes, self._since)
                self.watchdog = Watchdog(reporter)
            return self.watchdog

    def _run(self) -> None:
        signals = select.poll()  # a question is answered at once
        for read, _ in self._signals.pipes.values():
            signals.register(read, select.POLLIN)
        signals.poll(1000 * period())
        if not self._has_stopped:
            self.loaded().run(self._signals)

    def _report_end(self) -> None:
        """Report that the program has ended before its groups; write a report file if an exception ended it.

        Other ranks can't ask this rank afterwards. An end without an exception may be intended, so it leaves no files.
        """
        error = getattr(sys, "last_value", None)
        has_groups = any(group.processes and group.leaving is None for group in groups())
        if os.getpid() != self.pid or not has_groups:
            return
        if error is None:
            say_that_it_ends()
        else:
            with contextlib.suppress(OSError):
                self.loaded().reporter.write(f"{type(error).__name__}: {error}", has_left=True)


# -- the one of this process ---------------------------------------------------------------------------------

_started: Start | None = None


def begin(rank: int, size: int, folder: str, is_wanted: bool | None = None) -> None:
    """Start this process's watchdog, as this rank of MPI.COMM_WORLD. A second call can only stop it.

    `is_wanted` comes from the settings; until ranks agree on them, this process's ``HPCCOMM_WATCHDOG`` decides.
    """
    global _started
    if is_wanted is None:
        is_wanted = os.environ.get("HPCCOMM_WATCHDOG", "1").strip() != "0"
    if _started is not None and _started.pid == os.getpid():
        if not is_wanted:
            _started.stop()
            _started = None
    elif size < 2 and is_wanted:
        _watch_ctrl_c()
    elif is_wanted:
        _started = Start(rank, size, folder)
        _started.start()


@functools.cache  # once
def _watch_ctrl_c() -> None:
    """In a job of one rank, which has no watchdog, report waits for itself, and let Ctrl-C end it inside MPI."""
    signals = Signals(signal.SIGINT)
    signals.listen_to(signal.SIGINT, signal.default_int_handler)

    def wait() -> None:
        time.sleep(LONGEST_PERIOD)
        with _importing:
            from .ctrl_c import end_on_ctrl_c
            from .lonely import Lonely
        read, _ = signals.pipes[signal.SIGINT]
        lonely, poll = Lonely(), select.poll()
        poll.register(read, select.POLLIN)
        while True:
            if poll.poll(1000 * LONGEST_PERIOD):
                os.read(read, 1 << 16)
                end_on_ctrl_c(0)
            with contextlib.suppress(Exception):  # Ctrl-C must work anyway
                lonely.look(time.monotonic())

    os.register_at_fork(before=_hold_back, after_in_parent=_go_on, after_in_child=signals.close_in_child)
    threading.Thread(target=wait, name="hpccomm-ctrl-c", daemon=True).start()


def listen_to_sigterm() -> None:
    """Make this process's watchdog handle SIGTERM, too."""
    if _started is not None:
        _started._signals.listen_to(signal.SIGTERM)


def configure(agreed: Settings, processes: dict[int, int]) -> None:
    """Give the watchdog the settings that all ranks agreed on, and the processes of this node."""
    if _started is not None:
        _started.configure(agreed, processes)


def current() -> Watchdog | None:
    """Return this process's watchdog, imported; None if there is none."""
    return None if _started is None else _started.loaded()
