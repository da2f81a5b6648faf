"""The progress thread: it completes the Works whose Futures nobody waits for.

Started by the first `Work.get_future`, it sleeps when there is nothing to drive. It needs
MPI_THREAD_MULTIPLE, which mpi4py asks for by default.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .work import Work

SHORTEST_PAUSE = 20e-6  # seconds between two looks at the works in flight, while they keep completing
LONGEST_PAUSE = 1e-3  # ... and after a while in which none has

# Works that complete in the order of their launch share a queue, of which only the first is looked at (any look lets
# MPI make progress on all of them); a message has a queue of its own, because it may have to wait for ever.
_queues: dict[Hashable, deque[Work]] = {}
_wake = threading.Condition()
_thread: threading.Thread | None = None
_stopping = False


def drive(work: Work) -> None:
    """Complete `work` in the background."""
    global _thread
    with _wake:
        queue = work.group if work.keeps_its_place and work.group is not None else work
        _queues.setdefault(queue, deque()).append(work)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="hpccomm-progress", daemon=True)
            _thread.start()
            atexit.register(_stop)  # before MPI_Finalize, which mpi4py calls after Python's own exit functions
        _wake.notify()


def _run() -> None:
    pause = SHORTEST_PAUSE
    while True:
        with _wake:
            for key in [key for key, queue in _queues.items() if not queue]:
                del _queues[key]
            if not _queues:
                pause = SHORTEST_PAUSE
            if not _stopping:
                _wake.wait(pause if _queues else None)
            if _stopping:
                return
            queues = list(_queues.values())
        advanced = sum(_advance(queue) for queue in queues)
        pause = SHORTEST_PAUSE if advanced else min(2 * pause, LONGEST_PAUSE)


def _advance(queue: deque[Work]) -> bool:
    """Let go of the completed works at the head of the queue; return whether there was one."""
    before = len(queue)
    while queue and queue[0].is_completed():
        queue.popleft()
    return len(queue) < before


def _stop() -> None:
    global _stopping
    with _wake:
        _stopping = True
        _wake.notify()
    if _thread is not None:
        _thread.join(timeout=5)
