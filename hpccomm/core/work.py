"""Work: the handle of an asynchronous operation."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import DistBackendError, DistError, DistTimeoutError, UnsupportedOperationError, here
from ..job import failures
from .observers import who_is_late
from .timeouts import as_seconds, pauses

if TYPE_CHECKING:
    from .future import Future
    from .group import ProcessGroup
    from .hooks import Operation


class WorkStatus(enum.Enum):
    """The state of a Work: IN_FLIGHT, COMPLETED, FAILED or ABORTED.

    Examples
    --------
    >>> work = hc.barrier(async_op=True)
    >>> work.wait()
    True
    >>> work.status
    <WorkStatus.COMPLETED: 'completed'>
    """

    IN_FLIGHT = "in flight"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


IN_FLIGHT = WorkStatus.IN_FLIGHT  # a look-up in an Enum is slow
COMPLETED = WorkStatus.COMPLETED


class Work:
    """An operation in flight; every ``async_op=True`` call returns one.

    The output arrays hold the result once `wait` has returned or `is_completed` has been true. Until then, neither
    inputs nor outputs may be touched. A Work may be dropped: its group keeps it and its arrays alive
    until it is done.

    On GPU arrays, `wait` makes the *current CUDA stream* wait and returns at once: what the program puts on that
    stream next sees the result. The host waits in `synchronize`, in `wait` with a timeout, and with
    ``HPCCOMM_BLOCKING_WAIT=1``; `is_completed` says whether the GPU is done.

    A transport subclasses it and writes `poll` and `block`, and `cancel` where it can.

    Attributes
    ----------
    op_type : str
        Name of the operation, ``"all_reduce"``.
    sequence_number : int
        Its number among the collectives of its group, or among the messages of its group on this rank, from 1. The
        same number is the same collective on every rank.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> work = hc.all_reduce(x, async_op=True)
    >>> work.wait()
    True
    >>> work.result()  # is x; on 4 ranks: array([4., 8.])
    array([1., 2.])
    >>> work.op_type, work.is_success()
    ('all_reduce', True)
    """

    op_type = ""
    sequence_number = 0
    alive: Any = None  # what must not be freed while the transport works on it
    group: ProcessGroup | None = None  # which keeps it while it is in flight
    is_let_go_at_once = False  # or only when many are in flight
    keeps_its_place = True  # a collective; a message may be overtaken
    keeps_time = False  # whether the transport ends it itself when a group with on_timeout="raise" has waited too long
    was_asked = False  # since the watchdog has looked, which sets it back
    error_was_seen = False  # by the program; the group tells of others when it is destroyed
    _result: Any = None
    _status = IN_FLIGHT
    _exception: BaseException | None = None
    _source: int | None = None  # the group rank that a message came from
    _callbacks: list[Callable[[Work], None]] | None = None
    _future: Future | None = None
    _operation: Operation | None = None  # what hooks know it by, or a recorder's entry
    _peer: int | None = None  # of a message: the rank of the group at its other end
    _patience: float | None = None  # seconds that `wait` waits where it is not told

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish  # what is left to do when the transport is done: unpack, divide ...
        self._lock = threading.Lock()  # completing happens once, in one thread at a time

    # -- what a transport writes ---------------------------------------------------------------

    def poll(self) -> bool:
        """Say whether the transport is done, without blocking; raise what went wrong."""
        raise NotImplementedError

    def block(self) -> None:
        """Return when the transport is done; raise what went wrong."""
        while not self.poll():
            time.sleep(1e-5)

    def cancel(self) -> None:
        """Make the transport give the operation up; return when it uses no buffer any more."""
        raise UnsupportedOperationError(
            f"{self.op_type}: it has begun and can't be taken back (only receives can); wait for it, "
            f"or end the job with ProcessGroup.abort(){here()}"
        )

    # -- what a program calls ------------------------------------------------------------------

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation is done.

        Parameters
        ----------
        timeout : timedelta or float (seconds), optional
            Default: wait for ever; in a group with ``on_timeout="raise"``, for the group's timeout.

        Returns
        -------
        bool
            True.

        Raises
        ------
        DistTimeoutError
            The timeout has passed. The operation stays in flight: a later `wait` can still succeed.
        Exception
            What went wrong in the operation.
        """
        if timeout is None:
            timeout = self._patience
        if timeout is not None:
            self._wait_until(time.monotonic() + as_seconds(timeout), timeout)
        elif self._status is IN_FLIGHT:
            with self._lock:
                if self._status is IN_FLIGHT:  # as `_complete`, for every call counts here
                    try:
                        self.block()
                        if self._finish is not None:
                            self._finish()
                        self._status = COMPLETED
                    except Exception as error:
                        self._fail(error)
                    self._finish = self.alive = None
            group = self.group
            if group is not None:
                group._forget(self)
            if self._callbacks:
                self._announce()
        if self._exception is not None:
            self.error_was_seen = True
            raise self._exception
        return True

    def _wait_until(self, deadline: float, timeout: timedelta | float) -> None:
        looks = pauses()
        while not self.is_completed():
            if time.monotonic() >= deadline:
                raise DistTimeoutError(
                    f"{self.op_type} #{self.sequence_number}: not done after {as_seconds(timeout):g} s; it is still in "
                    f"flight. Has every rank of the group made the matching call?{here()}"
                    + (who_is_late() if timeout == self._patience else "")
                )
            time.sleep(next(looks))

    def is_completed(self) -> bool:
        """Say whether the operation has ended, well or not, without blocking."""
        self.was_asked = True
        if self._status is IN_FLIGHT and self._lock.acquire(blocking=False):
            try:
                if self._status is IN_FLIGHT:
                    self._complete(self.poll)
            finally:
                self._lock.release()
            self._announce()
        return self._status is not IN_FLIGHT

    def is_success(self) -> bool:
        """Say whether the operation has ended well, without blocking."""
        return self.is_completed() and self._status is COMPLETED

    def exception(self) -> BaseException | None:
        """Return the exception that ended the operation, or None."""
        self.is_completed()
        self.error_was_seen = True
        return self._exception

    def result(self) -> Any:
        """Wait, and return the array (or list of arrays) that the operation wrote."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the global rank that the received message came from."""
        self.wait()
        if self._source is None or self.group is None:
            raise DistError(f"{self.op_type}: only a receive has a source rank{here()}")
        return self.group.ranks[self._source]

    def _source_rank(self) -> int:
        return self.source_rank()  # c10d's name of it

    def get_duration(self) -> float:
        """Return the seconds from when the operation began to when its end was noticed.

        Known where the group's :meth:`ProcessGroup.enable_timing` was called before the operation, and while operations
        are recorded (``HPCCOMM_TRACE``). The end is noticed in `wait`, `is_completed`, or by hpccomm's own thread where
        there is a Future: a program that looks late sees a longer time.

        Returns
        -------
        float

        Raises
        ------
        DistError
            It is not known, or the operation has not ended.
        """
        if self._operation is None:
            raise DistError(
                f"{self.op_type}: nobody has looked at the clock; call enable_timing() of the group before the "
                f"operation, or run with HPCCOMM_TRACE=1{here()}"
            )
        duration = self._operation.duration if self.is_completed() else None
        if duration is None:
            raise DistError(f"{self.op_type} #{self.sequence_number}: it is still in flight; wait() first{here()}")
        return duration

    def synchronize(self) -> None:
        """Block the host until the result is in the output arrays."""
        self.wait()

    def abort(self) -> None:
        """Take a pending receive back; the Work ends as ABORTED, and the group can be used on.

        MPI can't take other operations back: UnsupportedOperationError. Nothing happens to a Work that has ended.
        """
        with self._lock:
            if self._status is IN_FLIGHT:
                self.cancel()
                self._exception = DistError(f"{self.op_type} #{self.sequence_number}: aborted by the program{here()}")
                self._status = WorkStatus.ABORTED
        self._announce()

    def give_up(self, error: Exception, deadline: float) -> None:
        """End as failed, unless the transport says until `deadline` how the operation has ended."""
        while not self.is_completed() and time.monotonic() < deadline:
            time.sleep(1e-4)
        if self._status is IN_FLIGHT:
            failures.kept.append(self.alive)
            self._exception, self._status = error, WorkStatus.FAILED
            self._announce()

    @property
    def status(self) -> WorkStatus:
        """The state of the operation."""
        self.is_completed()
        return self._status

    def get_future(self) -> Future:
        """Return a Future of `result()`. It completes without a call of `wait`: a thread drives the transport."""
        from .future import Future
        from .progress import drive

        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future = Future()
            future.set_running_or_notify_cancel()  # it is under way: cancel() says False
        self.add_done_callback(lambda work: _settle(future, work))
        if self._status is IN_FLIGHT:
            drive(self)  # and not a look here: an earlier operation's Future may still be on its way
        return future

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(self)`` when the operation ends, in the thread that notices; at once if it has ended.

        What it raises is logged (logger ``hpccomm``), and goes no further.
        """
        with self._lock:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)
        self._announce()

    def finish_with(self, step: Callable[[], None], result: Any) -> None:
        """Make `step` the last part of the operation, and `result` its result (for composed operations)."""
        with self._lock:
            first, self._result = self._finish, result
            if self._status is IN_FLIGHT:
                self._finish = both(first, step)
                return
        if self._status is COMPLETED:
            step()

    def __await__(self) -> Generator[Any, None, Any]:
        return self.get_future().__await__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.op_type} #{self.sequence_number}: {self._status.value}>"

    # -- completion ----------------------------------------------------------------------------

    def _complete(self, advance: Callable[[], bool | None]) -> None:
        """Ask the transport (the lock is held); when it is done, finish once and note how it ended."""
        try:
            if advance() is False:
                return
            if self._finish is not None:
                self._finish()
        except Exception as error:
            self._fail(error)
        else:
            self._status = COMPLETED
        self._finish = self.alive = None

    def _fail(self, error: Exception) -> None:
        """Note what went wrong, in the words of the transport."""
        self._exception = self.translate_error(error)
        if self.group is not None:
            with_title(self._exception, f"#{self.sequence_number} of {self.group.name!r}")
        if self._exception is not error:
            self._exception.__cause__ = error
        self._status = WorkStatus.FAILED

    def translate_error(self, error: Exception) -> Exception:
        """Return the error that the program should see for what the transport raised."""
        return error

    def _announce(self) -> None:
        """Once the operation has ended, tell the group and run the callbacks, each once, outside the lock."""
        if self._status is IN_FLIGHT:
            return
        if self.group is not None:
            self.group._forget(self)
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            try:
                callback(self)
            except Exception:  # whose thread this is has nothing to do with it, and other callbacks wait
                log_exception("a callback of %r raised", self)


class CompletedWork(Work):
    """A Work that is done from the start, for backends whose operations complete at once.

    Examples
    --------
    >>> hc.CompletedWork().wait()
    True
    """

    def poll(self) -> bool:
        """Return True."""
        return True

    def block(self) -> None:
        """Return at once."""


class JoinedWork(Work):
    """Several Works as one, which is done when all of them are."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.alive = works
        self._works = works

    def poll(self) -> bool:
        """Return whether all are done; raise what went wrong in one of them."""
        done = [work.is_completed() for work in self._works]  # a look at each lets it make progress
        if not all(done):
            return False
        self.block()
        return True

    def block(self) -> None:
        """Wait for all, also where one has failed; raise what went wrong in the first that has."""
        errors = [error for work in self._works if (error := _error_of(work)) is not None]
        if errors:
            raise errors[0]


def _error_of(work: Work) -> Exception | None:
    try:
        work.wait()
    except Exception as error:
        return error
    return None


def log_exception(text: str, *arguments: object) -> None:
    """Log the exception that is being handled: there is nobody to raise it to."""
    import logging

    logging.getLogger("hpccomm").exception(text, *arguments)


def with_title(error: Exception, title: str) -> Exception:
    """Let a transport's error, which begins with the name of the operation, say which one it was; return it."""
    operation, colon, text = str(error).partition(": ")
    if isinstance(error, DistBackendError) and colon and operation.isidentifier():
        error.args = (f"{operation} {title}: {text}",)
    return error


def both(first: Callable[[], None] | None, second: Callable[[], None] | None) -> Callable[[], None] | None:
    """Return a function that calls `first`, then `second`; where one is None, the other."""
    if first is None or second is None:
        return first or second

    def one_after_the_other() -> None:
        first()
        second()

    return one_after_the_other


def _settle(future: Future, work: Work) -> None:
    if work._exception is not None:
        work.error_was_seen = True
        future.set_exception(work._exception)
    else:
        future.set_result(work._result)
