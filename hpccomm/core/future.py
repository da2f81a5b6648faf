"""Future: a value that will be there later, with torch.futures' methods on Python's own Future."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import log_exception
from . import progress
from .timeouts import pause, pauses

if TYPE_CHECKING:
    from .work import Work

SPIN = 2e-3  # seconds for which an event loop looks again in each of its turns; then once in `PAUSE`
PAUSE = 1e-3  # the shortest that the selectors of asyncio know


class Future(concurrent.futures.Future[Any]):
    """A value that will be there later.

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

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the future is completed; return the value, or raise the error.

        `timeout` is in seconds; ``concurrent.futures.TimeoutError`` is raised when it passes.
        """
        return self.result(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Call ``fn(self)`` when the future is completed, in the thread that completes it; at once if it is already."""
        super().add_done_callback(_Callback(fn))

    def value(self) -> Any:
        """Return the value of a completed future, or raise its error; RuntimeError if it is not completed yet."""
        if not self.done():
            raise RuntimeError("Future.value: the future is not completed; call wait(), or check done() first")
        return self.result()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a Future for the result of ``callback(self)``, which is called when this one is completed.

        An exception in the callback becomes the exception of the returned Future. The callback runs in
        the thread that completes this future, or at once if it is completed already.
        """
        chained = Future()

        def run(_: concurrent.futures.Future[Any]) -> None:
            if not chained.set_running_or_notify_cancel():
                return  # cancelled meanwhile
            try:
                chained.set_result(callback(self))
            except BaseException as error:  # whoever waits for the chained future sees it
                chained.set_exception(error)

        self.add_done_callback(run)
        return chained

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # takes 30 ms

        return asyncio.wrap_future(self).__await__()


class Driven(Future):
    """A Future that completes while somebody waits for it or polls it; a thread completes it once a callback needs one.

    `concurrent.futures.wait` and `as_completed` call nobody: they put something into `_waiters`, and sleep.
    """

    is_driven = False  # by a thread, or by callbacks of others

    def __init__(self) -> None:
        super().__init__()
        self._waiters = _Waiters(weakref.WeakMethod(self.expect_sleeper))

    def look(self) -> None:
        """Poll, and complete the Future if it is time."""
        raise NotImplementedError

    def start(self) -> None:
        """Make it complete without being polled, from now on."""
        raise NotImplementedError

    def expect_sleeper(self) -> None:
        """Do as `start`, for a thread that is about to sleep in `concurrent.futures.wait` or `as_completed`."""
        self.start()

    def done(self) -> bool:
        """Return True if it is completed, or cancelled."""
        if not (self.is_driven or super().done()):
            self.look()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Do as :meth:`wait`."""
        return super().result(self.drive(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until it is completed; return the error, or None if there is a value."""
        return super().exception(self.drive(timeout))

    def drive(self, timeout: float | None) -> float | None:
        """Complete it, unless others do; return the time that is left to wait for them."""
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
        """Do as :meth:`Future.add_done_callback`."""
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
        self.set_running_or_notify_cancel()  # it is under way: cancel() says False

    def look(self) -> None:
        """Poll the Work; it has not ended before the hooks, maybe in another thread, have been called."""
        work = self._work
        if work is not None and work.is_completed() and work.is_notified:
            self.settle(work)

    def settle(self, work: Work) -> None:
        """Complete with the result or the error of the Work, which has ended."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread has
            if work.error is None:
                self.set_result(work.info.result)
            else:
                work.error_was_seen = True
                self.set_exception(work.error)
        self._work = None

    def start(self) -> None:
        """Hand the Work to the progress thread."""
        work = self._work
        if work is not None and not self.is_driven:
            self.is_driven = True
            progress.drive(work)

    def drive(self, timeout: float | None) -> float | None:
        """Do as Driven; without a time limit the Work can block."""
        work = self._work
        if work is not None and progress.is_ahead_of(work):
            self.start()  # callbacks of earlier operations come first
        elif work is not None and timeout is None and not self.is_driven:
            try:
                work.synchronize()
            except BaseException as error:
                if error is not work.error:  # a time-out, or of a signal's handler
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
        """Poll each, which lets it make progress."""
        self._left = [future for future in self._left if not future.done()]
        if not self._left:
            self._settle()

    def start(self) -> None:
        """Make each complete without being polled."""
        with self._condition:
            if self.is_driven:
                return
            self.is_driven = True
        remaining = iter(range(len(self._futures) - 1, -1, -1))  # next() is atomic: callbacks come from any thread
        for future in self._futures:
            future.add_done_callback(lambda _: None if next(remaining) else self._settle())

    def _settle(self) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread has, or it is cancelled
            self.set_result(self._futures)


class _Waiters(list[Any]):
    """The waiters of a Future that do not poll it."""

    def __init__(self, expect: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._expect = expect

    def append(self, waiter: Any) -> None:
        """Add a waiter, and make a thread complete the Future."""
        super().append(waiter)
        expect_sleeper = self._expect()
        if expect_sleeper is not None:
            expect_sleeper()


def turns_until(is_done: Callable[[], bool]) -> Generator[Any, None, None]:
    """Yield to the event loop of asyncio until `is_done()` is true, which each turn asks."""
    import asyncio  # takes 30 ms

    began = time.perf_counter()
    while not is_done():
        if time.perf_counter() - began < SPIN:
            yield  # to what else is ready
            pause(0)
        else:
            yield from asyncio.sleep(PAUSE).__await__()


class _Callback:
    """A callback, until it has been called: its Future keeps this object, and the function may keep the Future."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._functions = [function]

    def __call__(self, future: Any) -> None:
        """Call it; what ends a thread (sys.exit) must not end hpccomm's, which has other futures to complete."""
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
    return _Collected(list(futures))
