"""A task of a pool, and its Future."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..core.future import Driven
from ..errors import UnsupportedOperationError, on_rank

if TYPE_CHECKING:
    from ..core.group import ProcessGroup
    from .messages import Call


class Tasks(Protocol):
    """What does the tasks of an executor."""

    has_thread: bool

    @property
    def size(self) -> int:
        """The number of workers that are alive."""

    def submit(self, call: Call) -> concurrent.futures.Future[Any]:
        """Queue a call."""

    def close(self, cancels: bool) -> None:
        """Release the workers when the tasks are done; cancel first those that have not begun."""

    def wait(self) -> None:
        """Wait until the workers have been released."""

    def look(self) -> object:
        """Go on with the tasks, where there is no thread."""

    def is_own_thread(self) -> bool:
        """Return whether the caller is the thread that completes futures: their callbacks are."""


class TaskFuture(Driven):
    """The Future of a task."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self._tasks = tasks
        self.is_driven = tasks.has_thread
        self.task: Callable[[], Task | None] = lambda: None  # a weak reference: it has the arguments

    def tasks_waited_for(self) -> list[Task]:
        """Return its task, until it is done; the watchdog asks for a thread that waits for this Future."""
        task = self.task()
        return [] if task is None else [task]

    def look(self) -> None:
        """Let the scheduler work, which has no thread."""
        self._tasks.look()

    def start(self) -> None:
        """Refuse to be completed without being waited for, where there is no thread."""
        if not self.is_driven:
            raise UnsupportedOperationError(
                "add_done_callback, as_completed and wait of an executor's futures need MPI_THREAD_MULTIPLE, which "
                "mpi4py asks for unless mpi4py.rc.thread_level says otherwise; result() and map() work without it"
                + on_rank()
            )

    def drive(self, timeout: float | None) -> float | None:
        """Do as Driven; a callback may ask (`timeout` is 0), and not wait."""
        if timeout != 0 and not self.done():
            refuse_own_thread(self._tasks)
        return super().drive(timeout)

    def expect_sleeper(self) -> None:
        """Do as Driven, except in a callback."""
        if not self.done():
            refuse_own_thread(self._tasks)
        super().expect_sleeper()


def refuse_own_thread(tasks: Tasks) -> None:
    """Raise in the thread that completes futures, which is about to wait for itself."""
    if tasks.is_own_thread():
        raise RuntimeError(
            "executor: a callback of a Future can't wait for tasks, since its thread completes them; use "
            f"add_done_callback, shutdown(wait=False), or a thread of your own{on_rank()}"
        )


class Task:
    """A call, and the Future of its result. The watchdog reads `group`, `call` and `worker`."""

    def __init__(self, group: ProcessGroup, call: Call, future: TaskFuture) -> None:
        self.group = group
        self.call = call
        self.worker: int | None = None  # that has got it: its rank in the group
        self.future = future
        future.task = weakref.ref(self)
        self.has_begun = False
        self.deaths = 0  # of the ranks that were at it

    def begin(self) -> bool:
        """Return whether the task is to be done: it has neither been cancelled, nor failed because it was late."""
        if self.has_begun:
            return self.future.running()
        self.has_begun = self.future.set_running_or_notify_cancel()
        return self.has_begun

    def succeed(self, result: Any) -> None:
        """Complete its Future, unless it is late."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Complete its Future with an error, unless it is late."""
        if self.begin():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.future.set_exception(error)
