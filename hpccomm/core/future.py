"""Future: a value that becomes available later; Python's own Future with torch.futures' methods."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedOperationError, log_exception, on_rank
from ..job import mpi_library
from . import progress
from .timeouts import pause, pauses
from .wakes import Condition

if TYPE_CHECKING:
    from .work import Work

SPIN = 2e-3  # seconds in which an event loop polls in each turn; later it polls every `PAUSE` seconds
PAUSE = 1e-3  # the resolution of asyncio's selectors


class Future(concurrent.futures.Future[Any]):
    """A value that becomes available later.

    It is a :class:`concurrent.futures.Future`, so ``concurrent.futures.wait``, ``asyncio.wrap_future`` and
    ``await future`` work; `then`, `value` and `wait` are torch.futures' names.

    Examples
    --------
    >>> future = hc.Future()
    >>> doubled = future.then(lambda f: 2 * f.value())
    >>> future.set_result(21)
    >>> doubled.wait()
    42
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the future is completed; return the value, or raise the error.

        `timeout` is in seconds; after that time ``concurrent.futures.TimeoutError`` is raised.
        """
        return self.result(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Call ``fn(self)`` in the thread that completes the future; at once if it is already completed."""
        super().add_done_callback(_Callback(fn))

    def value(self) -> Any:
        """Return the value of a completed future, or raise its error; RuntimeError if it is not yet completed."""
        if not self.done():
            raise RuntimeError("Future.value: the future is not completed; call wait(), or check done() first")
        return self.result()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Call ``callback(self)`` when this future is completed; return a Future of the callback's result.

        An exception in the callback becomes the exception of the returned Future. The callback runs in
        the thread that completes this future, or at once if it is already completed.
        """
        if not callable(callback):
            raise TypeError(f"Future.then: callback is {callback!r}; expected a function of one argument{on_rank()}")
        chained = Future()

        def run(_: concurrent.futures.Future[Any]) -> None:
            if not chained.set_running_or_notify_cancel():
                return  # cancelled meanwhile
            try:
                chained.set_result(callback(self))
            except BaseException as error:  # passed to the waiter of the chained future
                chained.set_exception(error)

        self.add_done_callback(run)
        return chained

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # takes 30 ms

        return asyncio.wrap_future(self).__await__()


class Driven(Future):
    """A Future that makes progress in waits and polls; if it has a callback, a thread makes progress for it.

    `concurrent.futures.wait` and `as_completed` call no method: they append to `_waiters`, and sleep.
    """

    is_driven = False  # a thread, or callbacks of other futures, will complete it

    def __init__(self) -> None:
        super().__init__()
        self._waiters = _Waiters(weakref.WeakMethod(self.expect_sleeper))

    def look(self) -> None:
        """Poll; complete the Future if its operation has ended."""
        raise NotImplementedError

    def start(self) -> None:
        """Let a thread poll from now on."""
        raise NotImplementedError

    def expect_sleeper(self) -> None:
        """Call `start`: a thread is about to sleep in `concurrent.futures.wait` or `as_completed`."""
        self.start()

    def done(self) -> bool:
        """Return True if it is completed or cancelled."""
        if not (self.is_driven or super().done()):
            self.look()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Do the same as :meth:`wait`."""
        return super().result(self.drive(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until it is completed; return the error, or None if there is a value."""
        return super().exception(self.drive(timeout))

    def drive(self, timeout: float | None) -> float | None:
        """Poll until it is completed or another thread drives it; return the remaining time to wait."""
        if self.done():
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        looks = pauses()
        while not (self.is_driven or self.done()):
            if deadline is not None and time.monotonic() >= deadline:
                return 0
            pause(next(looks))
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Do the same as :meth:`Future.add_done_callback`."""
        if not super().done():
            self.start()
        super().add_done_callback(fn)

    def __await__(self) -> Generator[Any, None, Any]:
        if self.is_driven:
            return (yield from super().__await__())
        yield from turns_until(self.done)
        return super().result()


class WorkFuture(Driven):
    """The Future of `Work.result`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work: Work | None = work  # until it has ended
        self.set_running_or_notify_cancel()  # it is running: cancel() returns False

    def look(self) -> None:
        """Poll the Work; it counts as ended only after its hooks have been called, perhaps in another thread."""
        work = self._work
        if work is not None and work.is_completed() and work.is_notified:
            self.settle(work)

    def settle(self, work: Work) -> None:
        """Complete with the result or error of the ended Work."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread has completed it
            if work.error is None:
                self.set_result(work.info.result)
            else:
                work.error_was_seen = True
                self.set_exception(work.error)
        self._work = None

    def start(self) -> None:
        """Hand the Work to the progress thread."""
        work = self._work
        if work is None or self.is_driven:
            return
        if not work.progress.any_thread_may_poll and not mpi_library.any_thread_may_call() and not self.done():
            raise UnsupportedOperationError(
                "callbacks of Futures need MPI_THREAD_MULTIPLE, which mpi4py asks for unless mpi4py.rc.thread_level "
                f"says otherwise; wait() and done() work without it{on_rank()}",
                work.op_type,
            )
        self.is_driven = True
        progress.drive(work)

    def drive(self, timeout: float | None) -> float | None:
        """Do the same as Driven; without a time limit, block in the Work."""
        work = self._work
        if work is not None and progress.is_ahead_of(work):
            self.start()  # callbacks of earlier operations come first
        elif work is not None and timeout is None and not self.is_driven:
            try:
                work.synchronize()
            except BaseException as error:
                if error is not work.error:  # a timeout, or raised by a signal handler
                    raise
        return super().drive(timeout)


class _Collected(Driven):
    """The Future of `collect_all`."""

    def __init__(self, futures: list[Future]) -> None:
        super().__init__()
        self._futures = futures
        self._left = futures
        if not futures:
            self.set_result(futures)

    def look(self) -> None:
        """Poll each future, which makes progress."""
        self._left = [future for future in self._left if not future.done()]
        if not self._left:
            self._settle()

    def start(self) -> None:
        """Let a thread poll each future from now on."""
        with self._condition:
            if self.is_driven:
                return
            self.is_driven = True
        remaining = iter(range(len(self._futures) - 1, -1, -1))  # next() is atomic: callbacks come from any thread
        for future in self._futures:
            future.add_done_callback(lambda _: None if next(remaining) else self._settle())

    def _settle(self) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # already completed or cancelled
            self.set_result(self._futures)


class _Waiters(list[Any]):
    """The waiters that sleep without polling the Future."""

    def __init__(self, expect: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._expect = expect

    def append(self, waiter: Any) -> None:
        """Add a waiter; let a thread complete the Future."""
        super().append(waiter)
        expect_sleeper = self._expect()
        if expect_sleeper is not None:
            expect_sleeper()


def turns_until(is_done: Callable[[], bool]) -> Generator[Any, None, None]:
    """Yield to asyncio's event loop until `is_done()`, called in each turn, returns True."""
    import asyncio  # takes 30 ms

    began = time.perf_counter()
    while not is_done():
        if time.perf_counter() - began < SPIN:
            yield  # let other ready tasks run
            pause(0)
        else:
            yield from asyncio.sleep(PAUSE).__await__()


class _Callback:
    """A callback that drops its function after the call: Future and function may refer to each other."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._functions = [function]

    def __call__(self, future: Any) -> None:
        """Call the function; its SystemExit must not end hpccomm's thread, which serves other futures too."""
        try:
            self._functions.pop()(future)
        except BaseException as error:
            if isinstance(error, Exception) or threading.current_thread() is threading.main_thread():
                raise
            log_exception("a callback of %r raised", future)


def collect_all(futures: Sequence[Future]) -> Future:
    """Return a Future that is completed when all of `futures` are.

    Parameters
    ----------
    futures : list of Future

    Returns
    -------
    Future
        Its value is the list of `futures`. Errors stay in their own futures: look at each with ``value()``.

    Examples
    --------
    >>> a, b = hc.Future(), hc.Future()
    >>> both = hc.collect_all([a, b])
    >>> a.set_result(1)
    >>> b.set_result(2)
    >>> [future.value() for future in both.wait()]
    [1, 2]
    """
    futures = list(futures)
    for each in futures:
        if not hasattr(each, "done"):
            kind = type(each).__name__
            raise TypeError(f"collect_all: an item is a {kind}; expected Futures, such as work.get_future(){on_rank()}")
    return _Collected(futures)
