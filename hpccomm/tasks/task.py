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
    """Runs the tasks of an executor: a Scheduler, or a thread in a group of one rank."""

    has_thread: bool

    @property
    def size(self) -> int:
        """The number of living workers."""

    def submit(self, call: Call) -> concurrent.futures.Future[Any]:
        """Queue a call."""

    def close(self, cancels: bool) -> None:
        """Release the workers when all tasks are done; `cancels` cancels tasks that have not begun."""

    def wait(self) -> None:
        """Wait until the workers have been released."""

    def look(self) -> object:
        """Make progress on the tasks, if no thread does."""

    def is_own_thread(self) -> bool:
        """Return whether the caller is the thread that completes futures and runs their callbacks."""


class TaskFuture(Driven):
    """The Future of a task."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self._tasks = tasks
        self.is_driven = tasks.has_thread
        self.task: Callable[[], Task | None] = lambda: None  # a weak reference, because the task holds the arguments

    def tasks_waited_for(self) -> list[Task]:
        """Return its task until it is done; the watchdog calls it for a thread that waits for this Future."""
        task = self.task()
        return [] if task is None else [task]

    def look(self) -> None:
        """Let the scheduler make progress if it has no thread."""
        self._tasks.look()

    def start(self) -> None:
        """Raise if no thread can complete the Future without a waiting caller."""
        if not self.is_driven:
            raise UnsupportedOperationError(
                "add_done_callback, as_completed and wait of an executor's futures need MPI_THREAD_MULTIPLE, which "
                "mpi4py asks for unless mpi4py.rc.thread_level says otherwise; result() and map() work without it"
                + on_rank()
            )

    def drive(self, timeout: float | None) -> float | None:
        """Do as Driven, but raise in a callback that would wait; `timeout` is 0 for a poll."""
        if timeout != 0 and not self.done():
            refuse_own_thread(self._tasks)
        return super().drive(timeout)

    def expect_sleeper(self) -> None:
        """Do as Driven, but raise in a callback."""
        if not self.done():
            refuse_own_thread(self._tasks)
        super().expect_sleeper()


def refuse_own_thread(tasks: Tasks) -> None:
    """Raise if the caller is the thread that completes futures: it would wait for itself."""
    if tasks.is_own_thread():
        raise RuntimeError(
            "executor: a callback of a Future, or a task of a group of one rank, can't wait for tasks: its thread "
            "completes them; use "
            f"add_done_callback, shutdown(wait=False), or a thread of your own{on_rank()}"
        )


class Task:
    """A call, and the Future of its result. The watchdog reads `group`, `call` and `worker`."""

    def __init__(self, group: ProcessGroup, call: Call, future: TaskFuture) -> None:
        self.group = group
        self.call = call
        self.worker: int | None = None  # group rank of the worker that has the task
        self.future = future
        future.task = weakref.ref(self)
        self.has_begun = False
        self.deaths = 0  # of workers that ran it

    def begin(self) -> bool:
        """Return whether to run the task: it is neither cancelled nor failed for being late."""
        if self.has_begun:
            return self.future.running()
        self.has_begun = self.future.set_running_or_notify_cancel()
        return self.has_begun

    def succeed(self, result: Any) -> None:
        """Complete its Future, unless the task has failed for being late."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Complete its Future with an error, unless it is already complete."""
        if self.begin():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.future.set_exception(error)
