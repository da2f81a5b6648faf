"""Messages of objects, as mpi4py's `pkl5` sends them: blocking and non-blocking receives.

An object is several MPI messages, and only the first one says how many. So a receive can't be left to MPI: this code
probes for the first message, which belongs to the matching receive that was begun first, as in MPI (MPI-4.1 §3.5). The
first message has the lengths of the others: of the pickle, and of each large buffer. Their tags are above those of
arrays (`tags.OBJECTS`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from ..core.work import Progress, Work
from ..job import mpi_library
from .datatypes import message as typed
from .works import MPIWork


class Incoming:
    """An object whose first message has come; MPI receives the others from now on."""

    def __init__(self, comm: MPI.Intracomm, sender: int, tag: int, lengths: list[int]) -> None:
        self.sender = sender
        self._parts: list[Any] = list(map(MPI.buffer.allocate, lengths))
        self._requests: list[MPI.Request] = []
        into = [typed(np.frombuffer(part, np.uint8)) for part in self._parts]
        UNFINISHED.add(self)  # before a signal handler can raise
        self._requests += map(comm.Irecv, into, repeat(sender), repeat(tag))

    def is_there(self) -> bool:
        """Return whether all of it has come."""
        if not MPI.Request.Testall(self._requests):
            return False
        UNFINISHED.discard(self)
        return True

    def wait(self) -> None:
        """Wait until all of it has come."""
        MPI.Request.Waitall(self._requests)
        UNFINISHED.discard(self)

    def load(self) -> Any:
        """Unpickle the object, all of which has come."""
        data, *buffers = self._parts
        return pkl5.pickle.loads_oob(data, buffers)


UNFINISHED: set[Incoming] = set()  # MPI writes to their memory, even if nobody waits for them any more


def matched(comm: MPI.Intracomm, probe: Callable[..., MPI.Message | None], source: int, tag: int) -> Incoming | None:
    """Match an object's first message by `probe`, MPI's Mprobe or Improbe, which may return None.

    The receives of the others begin at once: the sender may send one after the other, each when the one before has a
    receive.
    """
    status = MPI.Status()
    with MPI._comm_lock(comm, "recv"):  # pkl5's
        message = probe(comm, source, tag, status)
        if message is None:
            return None
        lengths = np.empty(status.Get_elements(MPI.INT64_T), np.int64)  # pkl5's
        message.Recv(typed(lengths))
        return Incoming(comm, status.Get_source(), tag, lengths.tolist())


class Receives:
    """The receives of a group that have no message yet, the first begun first."""

    def __init__(self, comm: pkl5.Intracomm) -> None:
        self._comm = comm
        self._waiting: deque[ObjectReceive] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, receive: ObjectReceive) -> None:
        """Probe for its message from now on."""
        with self._lock:
            self._waiting.append(receive)

    def remove(self, receive: ObjectReceive) -> None:
        """Stop probing for its message."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)

    def look(self) -> None:
        """Take the messages of all receives: their senders may wait for that."""
        for receive in list(self._waiting):
            receive.has_ended()

    def look_for(self, receive: ObjectReceive) -> None:
        """Match messages from the sender that `receive` expects, until its own is matched or there are no more."""
        if not self._lock.acquire(blocking=False):  # another thread is here, or code that a signal handler interrupted
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
    """One receive; `finish` is called with the object."""

    translate_error = MPIWork.translate_error
    progress = Progress(can_be_left=True, needs_polling=mpi_library.any_thread_may_call())

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
        """Whether a message matches this receive."""
        return tag == self.tag and self.expected in (None, sender)

    def poll(self) -> bool:
        """Probe for the message, then return whether all of it has come."""
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

    def cancel(self) -> bool:
        """Cancel the receive; return False if its message has come: it completes."""
        self._receives.remove(self)
        return self.message is None


class ObjectSend(Work):
    """One send; while the program waits for it, receives make progress: the receiver may wait for them."""

    translate_error = MPIWork.translate_error
    progress = MPIWork.progress

    def __init__(self, receives: Receives, request: Any, finish: Callable[[], None]) -> None:
        super().__init__(finish)
        self._receives = receives
        self.alive = self._request = request

    def poll(self) -> bool:
        """Return whether it is complete."""
        self._receives.look()
        return bool(self._request.test()[0])
