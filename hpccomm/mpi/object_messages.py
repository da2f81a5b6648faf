"""Messages of objects, as mpi4py's `pkl5` sends them; receives, also those that do not block.

An object is several messages of MPI, and only the first one says how many. So a receive can't be left to MPI: somebody
has to look for the first message, and what has come belongs to the receive that has begun first, as in MPI (MPI-4.1
§3.5). The first has the lengths of the others: of the pickle, and of each buffer that is large. Their tags are above
those of arrays (`tags.OBJECTS`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from ..core.work import Progress, Work
from .datatypes import message as typed
from .works import MPIWork


class Incoming:
    """An object that has come for a receive: its messages have been matched."""

    def __init__(self, sender: int, messages: list[MPI.Message], lengths: list[int]) -> None:
        self.sender = sender
        self._messages, self._lengths = messages, lengths
        self._requests: list[MPI.Request] | None = None
        self._parts: list[Any] = []

    def is_there(self) -> bool:
        """Receive it; return whether all of it has come."""
        return MPI.Request.Testall(self._begun())

    def wait(self) -> None:
        """Receive it."""
        MPI.Request.Waitall(self._begun())

    def load(self) -> Any:
        """Return the object, all of which has come."""
        data, *buffers = self._parts
        return pkl5.pickle.loads_oob(data, buffers)

    def _begun(self) -> list[MPI.Request]:
        if self._requests is None:
            self._parts = list(map(MPI.buffer.allocate, self._lengths))
            self._requests = []
        for message, part in zip(self._messages[len(self._requests) :], self._parts[len(self._requests) :]):
            self._requests += map(message.Irecv, [typed(np.frombuffer(part, np.uint8))])
        return self._requests


def matched(comm: MPI.Intracomm, probe: Callable[..., MPI.Message | None], source: int, tag: int) -> Incoming | None:
    """Match the messages of an object by `probe`, MPI's Mprobe or Improbe, which may return None."""
    status = MPI.Status()
    with MPI._comm_lock(comm, "recv"):  # pkl5's
        message = probe(comm, source, tag, status)
        if message is None:
            return None
        lengths = np.empty(status.Get_elements(MPI.INT64_T), np.int64)  # pkl5's
        message.Recv(typed(lengths))
        sender = status.Get_source()
        return Incoming(sender, [comm.Mprobe(sender, tag) for _ in lengths], lengths.tolist())


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
                source = MPI.ANY_SOURCE if receive.expected is None else receive.expected
                message = matched(self._comm, MPI.Comm.Improbe, source, receive.tag)
                if message is None:
                    return
                first = next(each for each in self._waiting if each.matches(message.sender, receive.tag))
                first.source, first.message = message.sender, message
                self._waiting.remove(first)
        finally:
            self._lock.release()


class ObjectReceive(Work):
    """One receive; `finish` is called with what has come."""

    translate_error = MPIWork.translate_error
    progress = Progress(can_be_left=True, needs_polling=MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def __init__(
        self, receives: Receives, source: int | None, tag: int, finish: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(None if finish is None else lambda: finish(self.came))
        self._receives = receives
        self.expected, self.tag = source, tag
        self.message: Incoming | None = None  # when it has come
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
        self.alive = self.message
        if not self.message.is_there():
            return False
        self.came = self.message.load()
        return True

    def cancel(self) -> None:
        """Take the receive back; if its message has come, it completes."""
        self._receives.remove(self)
        if self.message is not None:
            self.block()


class ObjectSend(Work):
    """One message that is under way; while it is waited for, receives go on, which the receiver may wait for."""

    translate_error = MPIWork.translate_error
    progress = MPIWork.progress

    def __init__(self, receives: Receives, request: Any, finish: Callable[[], None]) -> None:
        super().__init__(finish)
        self._receives = receives
        self.alive = self._request = request

    def poll(self) -> bool:
        """Return whether it has gone."""
        self._receives.look()
        return bool(self._request.test()[0])
