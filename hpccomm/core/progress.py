"""The progress thread: it completes the Works for which callbacks of Futures, or other ranks, wait.

Started by the first of them, it sleeps when there is nothing to drive. It needs MPI_THREAD_MULTIPLE, which mpi4py asks
for by default.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

from ..errors import log_exception
from .operation_list import MESSAGES
from .timeouts import pause, pauses

if TYPE_CHECKING:
    from .work import Work

NAME = "hpccomm-progress"

# Works that complete in the order of their launch share a queue, of which only the first is looked at (any look lets
# MPI make progress on all of them); a message has a queue of its own, because it may have to wait for ever.
_queues: dict[Hashable, deque[Work]] = {}
_wake = threading.Condition()
_thread: threading.Thread | None = None
_news = False  # since the last look there is a new work, or one has ended
_stopping = False


def drive(work: Work) -> None:
    """Complete `work` in the background."""
    global _thread, _news
    work.is_driven = True
    if threading.current_thread().name == NAME:  # a callback has begun it, and may be about to wait for it
        threading.Thread(target=_drive_alone, args=(work,), name=NAME, daemon=True).start()
        return
    with _wake:
        _queues.setdefault(_queue_of(work), deque()).append(work)
        _news = True
        if _thread is None:
            _thread = threading.Thread(target=_run, name=NAME, daemon=True)
            _thread.start()
            atexit.register(_stop)  # before MPI_Finalize, which mpi4py calls after Python's own exit functions
        _wake.notify()


def is_ahead_of(work: Work) -> bool:
    """Return True if callbacks of earlier operations wait, which the callbacks of `work` must not overtake."""
    return bool(_queues) and threading.current_thread().name != NAME and bool(_queues.get(_queue_of(work)))


def _queue_of(work: Work) -> Hashable:
    is_alone = work.op_type in MESSAGES or work.progress.needs_polling or work.group is None
    return work if is_alone else work.group


def look_now() -> None:
    """Poll the Works in flight at once: a transport has noticed that one has ended."""
    global _news
    with _wake:
        _news = True
        _wake.notify()


def _run() -> None:
    global _news
    looks = pauses()
    while True:
        seconds = next(looks)
        if not seconds:
            pause(0)  # without the lock
        with _wake:
            _forget_empty_queues()
            if not (_stopping or _news) and (seconds or not _queues):
                _wake.wait(seconds if _queues else None)
            if _stopping:
                return
            if _news:
                looks, _news = pauses(), False
            queues = list(_queues.values())
        if sum(map(_advance, queues)):
            looks = pauses()


def _forget_empty_queues() -> None:
    """Forget them, here: a variable of `_run` would keep a Work, which is the key of its queue."""
    for key in [key for key, queue in _queues.items() if not queue]:
        del _queues[key]


def _drive_alone(work: Work) -> None:
    looks = pauses()
    while not _has_ended(work) and not _stopping:
        pause(next(looks))


def _advance(queue: deque[Work]) -> bool:
    """Remove the completed Works from the head of the queue; return True if there was one."""
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
