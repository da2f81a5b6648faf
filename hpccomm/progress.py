"""The progress thread: it completes the Works whose Futures nobody waits for.

Started by the first `Work.get_future`, it sleeps when there is nothing to drive. It needs
MPI_THREAD_MULTIPLE, which mpi4py asks for by default.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .work import Work

SHORTEST_PAUSE = 20e-6  # seconds between two looks at the works in flight, while they keep completing
LONGEST_PAUSE = 1e-3  # ... and after a while in which none has

_driven: deque[Work] = deque()
_wake = threading.Condition()
_thread: threading.Thread | None = None
_stopping = False


def drive(work: Work) -> None:
    """Complete `work` in the background."""
    global _thread
    with _wake:
        _driven.append(work)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="hpccomm-progress", daemon=True)
            _thread.start()
            atexit.register(_stop)  # before MPI_Finalize, which mpi4py calls after Python's own exit functions
        _wake.notify()


def _run() -> None:
    pause = SHORTEST_PAUSE
    while True:
        with _wake:
            if _stopping:
                return
            if _driven:
                _wake.wait(pause)
            else:
                _wake.wait()
                pause = SHORTEST_PAUSE
        before = len(_driven)
        for _ in range(before):  # oldest first, so that operations of one group complete in order
            work = _driven.popleft()
            if not work.is_completed():
                _driven.append(work)
        pause = SHORTEST_PAUSE if len(_driven) < before else min(2 * pause, LONGEST_PAUSE)


def _stop() -> None:
    global _stopping
    with _wake:
        _stopping = True
        _wake.notify()
    if _thread is not None:
        _thread.join(timeout=5)
