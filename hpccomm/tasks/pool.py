"""The public API of a pool of ranks: the block, and the executor inside it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.groups import usable
from ..api.world import member
from ..core.checks import integer
from ..core.group import ProcessGroup
from ..core.non_member import Group
from ..core.timeouts import as_seconds
from ..errors import DistError, on_rank
from ..job import failures, mpi_library
from .messages import Call, apply_to_each
from .task import TaskFuture, Tasks, refuse_own_thread

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_serving: list[ProcessGroup] = []  # the groups of the executors in whose blocks this rank is


def executor(
    group: Group | None = None,
    *,
    initializer: Callable[..., object] | None = None,
    initargs: Sequence[Any] = (),
    task_timeout: timedelta | float | None = None,
) -> Pool:
    """Make the ranks of a group a pool: rank 0 hands out function calls, and the other ranks run them.

    Every rank of the group calls it, in a ``with`` statement. Rank 0 gets a :class:`RankExecutor`, which is a
    :class:`concurrent.futures.Executor`. The other ranks work inside the ``with`` statement until rank 0 leaves its
    block. They then get None; ``if executor is not None:`` makes them skip the block. As with mpi4py's MPICommExecutor,
    a block that calls a method of the executor where it is None ends without an error.

    In a group of one rank, calls run in a thread of this rank, without pickling, and `task_timeout` has no effect.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world. A rank outside the group gets None.
    initializer : callable, optional
        Each worker calls it once with `initargs`, before its first task. It is not sent: every rank passes its own.
    initargs : sequence
        The initializer's arguments.
    task_timeout : timedelta or float (seconds), optional
        The time that a task may take. If a task takes longer, the group's `on_timeout` decides. ``"abort"``: the job
        ends, and its message names the worker, the task and the line. ``"raise"``: the task's Future gets a
        DistTimeoutError with this message, and its worker gets no other task until it returns. ``"warn"``: the message
        is printed. Default: no limit; the message is printed when a task takes longer than the group's `timeout`.

    Returns
    -------
    context manager
        Of a RankExecutor on rank 0 of the group, of None elsewhere.

    Raises
    ------
    DistError
        A rank of the group is in the block of another executor, which its ranks serve.
    ValueError, TypeError
        `task_timeout` is not positive, or no time; `initializer` is not callable.

    Examples
    --------
    >>> with hc.executor() as executor:
    ...     if executor is not None:  # rank 0
    ...         print(list(executor.map(pow, [1, 2, 3], [2, 2, 2])))
    [1, 4, 9]
    """
    seconds = None if task_timeout is None else as_seconds(task_timeout, "executor: task_timeout")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"executor: task_timeout is {seconds:g} s; expected a positive time, or None{on_rank()}")
    if initializer is not None and not callable(initializer):
        raise TypeError(f"executor: initializer is {initializer!r}; expected a function{on_rank()}")
    found = member(group)
    if not isinstance(found, ProcessGroup):
        return Pool(None, None, None, (), None)
    usable("executor", found)
    _check_nesting(found)
    found.agree_on("executor")
    comm = None
    if found.size > 1:
        with failures.translating("executor", found.comm):
            found.comm.Barrier()  # Dup might hold the GIL until all ranks have called it
            comm = found.comm.Dup()
        comm.Set_errhandler(mpi_library.load().ERRORS_RETURN)  # not `private`: it must survive a worker's death
    return Pool(found, comm, initializer, tuple(initargs), seconds)


def _check_nesting(group: ProcessGroup) -> None:
    for other in _serving:
        common = sorted({*group.ranks} & {*other.ranks} - {group.ranks[group.rank]})
        if common:
            raise DistError(
                f"executor: this rank is in the block of the executor of {other.name!r}, and so "
                f"{'are ranks' if len(common) > 1 else 'is rank'} {', '.join(map(str, common))} of {group.name!r}; "
                f"leave that block first, or give a group of other ranks{on_rank()}"
            )


@dataclass
class Pool:
    """The context manager that `executor` returns."""

    _group: ProcessGroup | None
    _comm: MPI.Intracomm | None
    _initializer: Callable[..., object] | None
    _initargs: tuple[Any, ...]
    _task_timeout: float | None
    _executor: RankExecutor | None = None
    _was_entered: bool = False

    def __enter__(self) -> RankExecutor | None:
        if self._group is None:
            return None
        if self._was_entered:
            raise RuntimeError(f"executor: its block can be entered once; call hc.executor() again{on_rank()}")
        self._was_entered = True
        if self._group.rank > 0:
            self._serve(self._group)
            return None
        _serving.append(self._group)
        if self._comm is None:
            tasks: Tasks = _InThisRank(self._group, self._initializer, self._initargs)
        else:
            from .scheduler import Scheduler

            tasks = Scheduler(self._group, self._comm, self._task_timeout)
        self._executor = RankExecutor(tasks)
        return self._executor

    def _serve(self, group: ProcessGroup) -> None:
        from .worker import Worker

        comm: Any = self._comm
        _serving.append(group)
        try:
            with failures.translating("executor", group.comm):
                has_lost = Worker(group, comm).serve(self._initializer, self._initargs)
        finally:
            _serving.remove(group)
        if not has_lost:
            comm.Free()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._executor is None:
            return _is_use_of_none(error)
        try:
            waits = kind is None or not self._executor._tasks.has_thread  # that could release the workers later
            self._executor.shutdown(waits, cancel_futures=kind is not None)
        finally:
            _serving.remove(self._group)  # type: ignore[arg-type]
        return False


def _is_use_of_none(error: BaseException | None) -> bool:
    """Return whether a worker's block failed because it used the executor, which is None on workers."""
    if not isinstance(error, AttributeError) or error.obj is not None or not hasattr(RankExecutor, error.name or ""):
        return False
    return error.__traceback__ is not None and error.__traceback__.tb_next is None  # raised in the block itself


class _InThisRank:
    """Runs tasks in a thread of this rank, the only one of its group."""

    size = 1
    has_thread = True

    def __init__(
        self, group: ProcessGroup, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
    ) -> None:
        self._dispatcher = group.dispatcher
        self._thread: threading.Thread | None = None  # set when the thread starts
        begin = partial(self._begin, initializer, initargs)
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "hpccomm-executor", begin)

    def _begin(self, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
        self._thread = threading.current_thread()
        if initializer is not None:
            initializer(*initargs)

    def submit(self, call: Call) -> TaskFuture:
        """Queue a call."""
        future = TaskFuture(self)
        self._threads.submit(self._do, future, call).add_done_callback(partial(_complete, future))
        return future

    def _do(self, future: TaskFuture, call: Call) -> Any:
        if future.set_running_or_notify_cancel():
            return self._dispatcher.run_task(call, call.make)
        return None

    def close(self, cancels: bool) -> None:
        """Refuse further calls; run or cancel those in the queue."""
        self._threads.shutdown(wait=False, cancel_futures=cancels)

    def wait(self) -> None:
        """Wait until the queue is empty."""
        self._threads.shutdown()

    def look(self) -> None:
        """Do nothing: the thread runs the tasks."""

    def is_own_thread(self) -> bool:
        """Return whether the caller is the thread that runs the tasks and callbacks."""
        return threading.current_thread() is self._thread


def _complete(future: TaskFuture, done: concurrent.futures.Future[Any]) -> None:
    """Copy the result or error of the thread's Future `done` to `future`."""
    if done.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()
    elif (error := done.exception()) is not None:  # perhaps the initializer's
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled meanwhile
            future.set_exception(error)
    elif not future.cancelled():
        future.set_result(done.result())


class RankExecutor(concurrent.futures.Executor):
    """The executor of rank 0 in the block of :func:`executor`: other ranks run its calls.

    Functions, arguments and results are pickled. Large NumPy arrays inside them travel separately, without a copy: do
    not change an argument before its call is done. A function is pickled by name: define it on every rank, before the
    block. Each worker runs one task at a time, and gets the next one when it is done. If tasks take less than 10 ms,
    workers get one task in advance (but not with `task_timeout` in a group with ``on_timeout="raise"``).

    A task's Future raises the task's exception, with the worker's traceback as its cause. Under ``mpirun --with-ft
    ulfm``, the task of a worker that dies is run once more by another worker. Every other task runs once.

    Callbacks run in the thread that completes the Futures: a callback that waits for a task raises RuntimeError.

    Examples
    --------
    >>> with hc.executor() as executor:
    ...     if executor is not None:
    ...         future = executor.submit(sorted, [3, 1, 2], reverse=True)
    ...         print(future.result(), executor.num_workers)  # on 4 ranks: [3, 2, 1] 3
    [3, 2, 1] 1
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    @property
    def num_workers(self) -> int:
        """The number of living ranks that run tasks; 1 in a group of one rank."""
        return self._tasks.size

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Queue the call ``fn(*args, **kwargs)``.

        Parameters
        ----------
        fn : callable
            Must be picklable, as must its arguments.

        Returns
        -------
        concurrent.futures.Future
            Of the call's result. ``cancel()`` works until the call is sent to a worker.

        Raises
        ------
        RuntimeError
            After `shutdown`.
        concurrent.futures.BrokenExecutor
            The initializer has failed on a worker, or all workers have died.
        """
        return self._tasks.submit(Call(fn, args, kwargs))

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return an iterator over the results of ``fn`` for the items of the iterables, in order.

        Parameters
        ----------
        fn : callable
            Takes as many arguments as there are iterables.
        timeout : float (seconds), optional
            Raise TimeoutError if a result is missing this long after `map` was called.
        chunksize : int
            The number of calls in one message; use it if a call takes less than a millisecond.

        Returns
        -------
        iterator
            It raises a call's exception instead of its result, or at the first result of the call's chunk.
        """
        return self.starmap(fn, zip(*iterables), timeout=timeout, chunksize=chunksize)

    def starmap(
        self, fn: Callable[..., T], iterable: Iterable[Sequence[Any]], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return the results of ``fn(*each)`` for each item of the iterable; otherwise like :meth:`map`."""
        chunksize = integer("executor: chunksize", chunksize)
        if chunksize < 1:
            raise ValueError(f"executor: chunksize is {chunksize}; expected 1 or more{on_rank()}")
        chunks = list(_chunks(iterable, chunksize))
        results = super().map(apply_to_each, itertools.repeat(fn), chunks, timeout=timeout)
        return itertools.chain.from_iterable(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Release the workers when all tasks are done; the end of the block calls it.

        Parameters
        ----------
        wait : bool
            True: return when the workers are released. False: return at once.
        cancel_futures : bool
            True: cancel tasks that have not begun. An exception that ends the block does so too.
        """
        if wait:
            refuse_own_thread(self._tasks)
        self._tasks.close(cancel_futures)
        if wait:
            self._tasks.wait()


def _chunks(iterable: Iterable[Sequence[Any]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    calls = map(tuple, iterable)
    while chunk := list(itertools.islice(calls, size)):
        yield chunk
