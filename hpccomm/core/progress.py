"""The progress thread: it completes Works that callbacks of Futures, or other ranks, wait for.

The first such Work starts it; without Works it sleeps. It needs MPI_THREAD_MULTIPLE, mpi4py's default.
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
from .wakes import Bell

if TYPE_CHECKING:
    from .work import Work

NAME = "hpccomm-progress"

# Works that complete in launch order share a queue. Only its first Work is polled: any poll lets MPI make progress on
# all of them. A message has its own queue, because it may wait forever.
_queues: dict[Hashable, deque[Work]] = {}
_changing = threading.RLock()  # guards the queues
_bell = Bell()
_thread: threading.Thread | None = None
_stopping = False


def drive(work: Work) -> None:
    """Complete `work` in the background."""
    global _thread
    work.is_driven = True
    if threading.current_thread().name == NAME:  # begun by a callback, which may wait for it
        threading.Thread(target=_drive_alone, args=(work,), name=NAME, daemon=True).start()
        return
    with _changing:
        _queues.setdefault(_queue_of(work), deque()).append(work)
        if _thread is None:
            _thread = threading.Thread(target=_run, name=NAME, daemon=True)
            _thread.start()
            atexit.register(_stop)  # runs before MPI_Finalize, which mpi4py calls after Python's exit functions
    look_now()


def is_ahead_of(work: Work) -> bool:
    """Return True if callbacks of earlier operations are pending: those of `work` must not overtake them."""
    return bool(_queues) and threading.current_thread().name != NAME and bool(_queues.get(_queue_of(work)))


def _queue_of(work: Work) -> Hashable:
    is_alone = work.op_type in MESSAGES or work.progress.needs_polling or work.group is None
    return work if is_alone else work.group


def look_now() -> None:
    """Make the thread poll at once: there is a new Work, or a transport has noticed that a Work has ended."""
    _bell.ring()


def _run() -> None:
    looks = pauses()
    while True:
        seconds = next(looks)
        if not seconds:
            pause(0)
        with _changing:
            _forget_empty_queues()
        if _bell.wait(seconds if _queues else None):
            looks = pauses()
        if _stopping:
            return
        with _changing:
            queues = list(_queues.values())
        if sum(map(_advance, queues)):
            looks = pauses()


def _forget_empty_queues() -> None:
    """Drop empty queues; in `_run` itself, a local variable would keep the key, a Work, alive."""
    for key in [key for key, queue in _queues.items() if not queue]:
        del _queues[key]


def _drive_alone(work: Work) -> None:
    looks = pauses()
    while not _has_ended(work) and not _stopping:
        pause(next(looks))


def _advance(queue: deque[Work]) -> bool:
    """Remove completed Works from the head of the queue; return True if there were any."""
    before = len(queue)
    while queue and _has_ended(queue[0]):
        queue.popleft()
    return len(queue) < before


def _has_ended(work: Work) -> bool:
    try:
        return work.has_ended()
    except BaseException:  # such as sys.exit in a callback: this thread serves other Works too
        log_exception("a callback or a hook of %r raised in the progress thread", work)
        return work.has_ended()


def _stop() -> None:
    global _stopping
    _stopping = True
    look_now()
    if _thread is not None:
        _thread.join(timeout=5)
