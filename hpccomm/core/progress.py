"""The progress thread: it completes the Works whose Futures nobody waits for.

Started by the first `Work.get_future`, it sleeps when there is nothing to drive. It needs
MPI_THREAD_MULTIPLE, which mpi4py asks for by default.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

from ..errors import log_exception
from .operation_list import MESSAGES

if TYPE_CHECKING:
    from .work import Work

NAME = "hpccomm-progress"
SHORTEST_PAUSE = 20e-6  # seconds between two looks at the works in flight, while they keep completing
LONGEST_PAUSE = 1e-3  # ... and after a while in which none has

# Works that complete in the order of their launch share a queue, of which only the first is looked at (any look lets
# MPI make progress on all of them); a message has a queue of its own, because it may have to wait for ever.
_queues: dict[Hashable, deque[Work]] = {}
_wake = threading.Condition()
_thread: threading.Thread | None = None
_news = False  # a work has ended since the last look
_stopping = False


def drive(work: Work) -> None:
    """Complete `work` in the background."""
    global _thread
    if threading.current_thread().name == NAME:  # a callback has begun it, and may be about to wait for it
        threading.Thread(target=_drive_alone, args=(work,), name=NAME, daemon=True).start()
        return
    with _wake:
        queue = work if work.op_type in MESSAGES or work.group is None else work.group
        _queues.setdefault(queue, deque()).append(work)
        if _thread is None:
            _thread = threading.Thread(target=_run, name=NAME, daemon=True)
            _thread.start()
            atexit.register(_stop)  # before MPI_Finalize, which mpi4py calls after Python's own exit functions
        _wake.notify()


def look_now() -> None:
    """Look at the works in flight at once: a transport says that one has ended."""
    global _news
    with _wake:
        _news = True
        _wake.notify()


def _run() -> None:
    global _news
    pause = SHORTEST_PAUSE
    while True:
        with _wake:
            for key in [key for key, queue in _queues.items() if not queue]:
                del _queues[key]
            if not _queues:
                pause = SHORTEST_PAUSE
            if not _stopping and not (_news and _queues):
                _wake.wait(pause if _queues else None)
            _news = False
            if _stopping:
                return
            queues = list(_queues.values())
        advanced = sum(_advance(queue) for queue in queues)
        pause = SHORTEST_PAUSE if advanced else min(2 * pause, LONGEST_PAUSE)


def _drive_alone(work: Work) -> None:
    pause = SHORTEST_PAUSE
    while not _has_ended(work) and not _stopping:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _advance(queue: deque[Work]) -> bool:
    """Let go of the completed works at the head of the queue; return whether there was one."""
    before = len(queue)
    while queue and _has_ended(queue[0]):
        queue.popleft()
    return len(queue) < before


def _has_ended(work: Work) -> bool:
    try:
        return work.has_ended()
    except BaseException:  # sys.exit in a callback, say: this thread has others to look after
        log_exception("a callback or a hook of %r raised in the progress thread", work)
        return work.has_ended()


def _stop() -> None:
    global _stopping
    with _wake:
        _stopping = True
        _wake.notify()
    if _thread is not None:
        _thread.join(timeout=5)
