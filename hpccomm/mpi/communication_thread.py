"""Asynchronous operations on large arrays, as blocking calls in a thread.

MPI's own non-blocking operations make progress only while the program is inside a call of MPI, and those of large
arrays are slower (Open MPI's Iallreduce takes 2 to 4 times as long as Allreduce). In a thread they are really under way
while the program computes, because mpi4py's calls release the GIL: ``hpccomm bench overlap`` measures it.

The thread makes its calls on a communicator of its own, in the order of the launches, which is the same on all ranks:
so they match each other, and nothing else. It needs MPI_THREAD_MULTIPLE.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from ..core.backend import Backend
from ..core.work import Work
from .works import as_backend_error

LONGEST_GOODBYE = 5.0  # seconds, at the end of a program that has not waited for its operations

Operation = TypeVar("Operation", bound=Callable[..., Any])


def in_thread_if_large(argument: int) -> Callable[[Operation], Operation]:
    """Make a method of a backend run in the backend's thread, if it is called with ``async_op=True`` on large arrays.

    The size of `argument`, an array or a list of arrays, decides; it has to be the same on all ranks.
    """

    def decorate(operation: Operation) -> Operation:
        @functools.wraps(operation)
        def method(backend: Any, *arguments: Any) -> Any:
            if arguments[-1] and _nbytes(arguments[argument]) >= backend.thread_bytes:
                return backend.thread.launch(operation.__name__, *arguments[:-1])
            return operation(backend, *arguments)

        return method  # type: ignore[return-value]

    return decorate


def _nbytes(arrays: Any) -> int:
    return sum(array.nbytes for array in arrays) if isinstance(arrays, list) else arrays.nbytes


class CommunicationThread:
    """The thread of one group. `make` makes a backend on the communicator that it is given.

    Both are made at the first launch, which must not wait for the other ranks; so it is the thread that does.
    """

    def __init__(self, comm: MPI.Intracomm, make: Callable[[MPI.Intracomm], Backend]) -> None:
        self._comm = comm
        self._make = make
        self._backend: Backend | None = None
        self._thread: threading.Thread | None = None
        self._launched: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()

    def launch(self, operation: str, *arguments: Any) -> Work:
        """Queue the backend's blocking `operation`, and return its Work."""
        if self._thread is None:
            duplicate = self._comm.Idup()
            self._thread = threading.Thread(target=self._run, args=duplicate, name="hpccomm-communication", daemon=True)
            self._thread.start()
            atexit.register(self._stop, LONGEST_GOODBYE)  # before MPI_Finalize, as the progress thread
        work = ThreadWork(operation, arguments)
        self._launched.put(work)
        return work

    def _run(self, comm: MPI.Intracomm, request: MPI.Request) -> None:
        failure: Exception | None = None
        try:
            request.Wait()
            self._backend = self._make(comm)
        except Exception as error:  # MPI has no communicator left, for example: every operation tells
            failure = error
        while (work := self._launched.get()) is not None:
            work.run(self._backend, failure)
            del work  # and its arrays, while there is no other

    def _stop(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join(timeout)

    def close(self) -> None:
        """End the thread and free what it has; called once, by every rank, when the group is destroyed."""
        if self._thread is None:
            return
        atexit.unregister(self._stop)
        self._stop()
        if self._backend is not None:
            self._backend.close()
            self._backend._comm.Free()  # type: ignore[attr-defined]


class ThreadWork(Work):
    """An operation that the thread does."""

    def __init__(self, operation: str, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.alive = arguments
        self._operation = operation
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self, backend: Backend | None, failure: Exception | None) -> None:
        """Do the operation, or fail with `failure`; called by the thread."""
        try:
            if failure is not None:
                raise failure
            getattr(backend, self._operation)(*self.alive, False)
        except Exception as error:
            self._error = error
        self._done.set()

    def explain(self, error: Exception) -> Exception:
        """Turn MPI's exceptions into DistBackendError."""
        return as_backend_error(self.op_type, error)

    def poll(self) -> bool:
        """Say whether the thread has done the operation; raise what it raised."""
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def block(self) -> None:
        """Wait until the thread has done the operation; raise what it raised."""
        self._done.wait()
        self.poll()
