"""Future: a value that will be there later, with torch.futures' methods on Python's own Future."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from ..errors import log_exception


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
        """Block until the value is there and return it, or raise the error that came instead.

        `timeout` is in seconds; ``concurrent.futures.TimeoutError`` is raised when it passes.
        """
        return self.result(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Call ``fn(self)`` when the future is completed, in the thread that completes it; at once if it is already."""
        super().add_done_callback(functools.partial(_called, fn))

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


def _called(callback: Callable[[Any], object], future: Any) -> None:
    """Call a callback; what ends a thread (sys.exit) must not end hpccomm's, which has other futures to complete."""
    try:
        callback(future)
    except BaseException as error:
        if isinstance(error, Exception) or threading.current_thread() is threading.main_thread():
            raise
        log_exception("a callback of %r raised", future)


def collect_all(futures: Sequence[Future]) -> Future:
    """Return one Future for several.

    Parameters
    ----------
    futures : list of Future

    Returns
    -------
    Future
        Completed when all of `futures` are; its value is the list of them. Errors stay in their own futures: look at
        each with ``value()``.

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
    collected = Future()
    if not futures:
        collected.set_result(futures)
        return collected
    remaining = iter(range(len(futures) - 1, -1, -1))  # next() is atomic: callbacks come from any thread

    def one_done(_: concurrent.futures.Future[Any]) -> None:
        if next(remaining) == 0:
            collected.set_result(futures)

    for future in futures:
        future.add_done_callback(one_done)
    return collected
