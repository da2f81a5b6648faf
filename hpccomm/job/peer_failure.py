"""Call a function on each survivor when the launcher reports a dead rank, under an MPI that does not survive it.

MPICH's ``mpiexec -disable-auto-cleanup`` sends SIGUSR1 to every survivor. Handlers of Python's `signal` don't run while
the main thread waits in MPI. faulthandler's handler runs at once, in C, and writes to a pipe that a thread reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from ..process.proc import of_process
from ..process.stderr import tell

ENOUGH = 1 << 16  # bytes: more than one signal's worth


class PeerFailures:
    """Call `callback` with the rank that has died, or None if unknown.

    `processes` has the process ids of the ranks on this node.
    """

    def __init__(self, callback: Callable[[int | None], object], processes: dict[int | None, int]) -> None:
        self._callback = callback
        self._processes = processes
        self._news, self._write = os.pipe()
        os.set_blocking(self._write, False)  # a handler must not wait
        has_handler = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, file=self._write, all_threads=False, chain=has_handler)
        threading.Thread(target=self._run, name="hpccomm-peer-failure", daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        faulthandler.unregister(signal.SIGUSR1)
        os.close(self._write)

    def _run(self) -> None:
        while os.read(self._news, ENOUGH):
            gone: list[int | None] = [rank for rank, pid in self._processes.items() if not _is_there(pid)]
            for rank in gone or [None]:
                self._processes.pop(rank, None)
                try:
                    self._callback(rank)
                except Exception:  # no caller to raise it to
                    tell(f"hpccomm: on_peer_failure raised\n{traceback.format_exc().rstrip()}")
        os.close(self._news)


def _is_there(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return of_process(pid)[1][0] != "Z"
    return not Path("/proc/self/stat").exists()  # only Linux has it
