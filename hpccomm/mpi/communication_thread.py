"""Asynchronous operations on large arrays, as blocking calls in a thread.

MPI's own non-blocking operations make progress only while the program is inside an MPI call, and are slower for large
arrays (Open MPI's Iallreduce takes 2 to 4 times as long as Allreduce). In a thread they progress while the program
computes, because mpi4py's calls release the GIL: ``benchmarks/overlap.py`` measures it.

The thread makes its calls on its own communicator, in the order of the launches, so they match only those of other
ranks' threads. It needs MPI_THREAD_MULTIPLE. The array's size selects the thread, so operations whose sizes may differ
between ranks do not use it.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from ..core.backend import Backend
from ..core.progress import look_now
from ..core.wakes import Event
from ..core.work import Work
from ..job import failures, tags
from ..job.mpi_library import private, release
from .works import as_backend_error

LONGEST_GOODBYE = 5.0  # seconds, at the end of a program that has not waited for its operations


class CommunicationThread:
    """The communication thread of one group. `make` makes a backend on a communicator.

    The thread makes its communicator and backend after the first launch, which must not wait for other ranks. The
    program's thread frees nothing (`ProcessGroup.destroy`) and makes no window (`shared_memory.Window`) before all
    ranks have met, so neither thread waits for the other's work.
    """

    def __init__(self, comm: MPI.Intracomm, make: Callable[[MPI.Intracomm], Backend]) -> None:
        self._comm = comm
        self._make = make
        self._backend: Any = None
        self._thread: threading.Thread | None = None
        self._launched: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()

    def launch(self, operation: str, *arguments: Any) -> Work:
        """Queue the backend's blocking `operation`, and return its Work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpccomm-communication", daemon=True)
            self._thread.start()
            atexit.register(self._stop, LONGEST_GOODBYE)  # before MPI_Finalize, like the progress thread
        work = ThreadWork(operation, arguments)
        self._launched.put(work)
        return work

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            self._backend = self._make(self._duplicate())
        except Exception as error:  # MPI has no communicator left, for example: every operation fails with it
            failure = error
        while (work := self._launched.get()) is not None:
            work.run(self._backend, failure)
            del work  # frees its arrays before the next one comes

    def _duplicate(self) -> Any:
        """Return the thread's communicator, made while the group's own is in use.

        MPI_Comm_create_group does not interfere with the group's collectives: its messages have a tag of their own.
        """
        spare = failures.take_spare(self._comm)
        if spare is not None:
            return spare
        members = self._comm.Get_group()
        try:
            return private(self._comm.Create_group(members, tags.THREAD), self._comm)
        finally:
            members.Free()

    def _stop(self, timeout: float | None = None) -> None:
        self.abort()
        if self._thread is not None:
            self._thread.join(timeout)

    def abort(self) -> None:
        """Ask the thread to end after its queued operations; do not wait for it."""
        if self._thread is not None:
            self._launched.put(None)

    def leave(self) -> None:
        """Wait for the thread again after all ranks have come to their end: it must leave MPI before MPI_Finalize."""
        if self._thread is not None:
            self._thread.join(LONGEST_GOODBYE)

    def close(self) -> None:
        """End the thread and free its communicator; called once, by every rank, when the group is destroyed."""
        if self._thread is None:
            return
        atexit.unregister(self._stop)
        self._stop()
        if self._backend is not None:
            self._backend.close()
            release(self._backend.comm)


class ThreadWork(Work):
    """An operation that the communication thread does."""

    def __init__(self, operation: str, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.alive = arguments
        self._name = operation
        self._done = Event()
        self._raised: Exception | None = None

    def run(self, backend: Backend | None, failure: Exception | None) -> None:
        """Do the operation, or fail with `failure`; called by the thread."""
        try:
            if failure is not None:
                raise failure
            getattr(backend, self._name)(*self.alive, False)
        except Exception as error:
            self._raised = self.translate_error(error)  # now: other ranks must learn of a dead rank at once
        self._done.set()
        if self.is_driven:
            look_now()

    def translate_error(self, error: Exception) -> Exception:
        """Return the error that the program should see for an error of MPI."""
        return as_backend_error(self._name, error, self.group.comm if self.group else None)

    def poll(self) -> bool:
        """Return whether the thread has done the operation; raise its error."""
        if not self._done.is_set():
            return False
        if self._raised is not None:
            raise self._raised
        return True

    def block(self) -> None:
        """Wait until the thread has done the operation; raise its error."""
        self._done.wait()
        self.poll()
