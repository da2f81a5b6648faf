"""Messages of objects that do not block. They are those of mpi4py's `pkl5`, so each form matches the other.

An object is several messages of MPI, and only the first one says how many. So a receive can't be left to MPI: somebody
has to look for the first message, and what has come belongs to the receive that has begun first, as in MPI (MPI-4.1
§3.5).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from ..core.work import Work
from ..errors import DistBackendError
from .works import MPIWork

NO_OBJECT = "what came is not from send_object_list; receive arrays with recv"


class Receives:
    """The receives of a group for which nothing has come yet, the first begun first."""

    def __init__(self, comm: pkl5.Intracomm) -> None:
        self._comm = comm
        self._waiting: deque[ObjectReceive] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, receive: ObjectReceive) -> None:
        """Look for its message from now on."""
        with self._lock:
            self._waiting.append(receive)

    def remove(self, receive: ObjectReceive) -> None:
        """Look for its message no more."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)

    def look(self) -> None:
        """Take what has come for any of them: those who have sent it may wait for that."""
        for receive in list(self._waiting):
            receive.has_ended()

    def look_for(self, receive: ObjectReceive) -> None:
        """Take what has come from where this one expects it, until its own message has come, or there is none."""
        if not self._lock.acquire(blocking=False):  # another thread looks, or what a signal's handler has interrupted
            return
        try:
            while receive.message is None and receive in self._waiting:
                status = MPI.Status()
                source = MPI.ANY_SOURCE if receive.expected is None else receive.expected
                message = self._comm.improbe(source, receive.tag, status)
                if message is None:
                    return
                sender = status.Get_source()
                first = next(each for each in self._waiting if each.matches(sender, receive.tag))
                first.source, first.message = sender, message
                self._waiting.remove(first)
        finally:
            self._lock.release()


class ObjectReceive(Work):
    """One receive; `finish` is called with what has come."""

    translate_error = MPIWork.translate_error
    can_be_left = True
    needs_looks = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def __init__(
        self, receives: Receives, source: int | None, tag: int, finish: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(None if finish is None else lambda: finish(self.came))
        self._receives = receives
        self.expected, self.tag = source, tag
        self.message: Any = None  # when it has come
        self._request: Any = None
        self.came: Any = None
        receives.add(self)

    def matches(self, sender: int, tag: int) -> bool:
        """Whether a message may be its own."""
        return tag == self.tag and self.expected in (None, sender)

    def poll(self) -> bool:
        """Look for the message, or whether all of it has come."""
        try:
            if self.message is None:
                self._receives.look_for(self)
            if self.message is None:
                return False
        except Exception:
            self._receives.remove(self)
            raise
        if self._request is None:
            try:
                self.alive = self._request = self.message.irecv()
            except MemoryError:  # the bytes of an array, read as a length
                raise DistBackendError(NO_OBJECT) from None
        is_there, came = self._request.test()
        if is_there and came is not None:  # None: it was there already when a signal's handler has interrupted this
            self.came = came
        return bool(is_there)

    def cancel(self) -> None:
        """Take the receive back; if its message has come, it completes."""
        self._receives.remove(self)
        if self.message is not None:
            self.block()


class ObjectSend(Work):
    """One message that is under way; while it is waited for, receives go on, which the receiver may wait for."""

    translate_error = MPIWork.translate_error
    can_be_left = True

    def __init__(self, receives: Receives, request: Any, finish: Callable[[], None]) -> None:
        super().__init__(finish)
        self._receives = receives
        self.alive = self._request = request

    def poll(self) -> bool:
        """Return whether it has gone."""
        self._receives.look()
        return bool(self._request.test()[0])
