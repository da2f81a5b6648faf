"""Work: the handle of an asynchronous operation."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from ..errors import DistError, DistTimeoutError, UnsupportedOperationError, log_exception, on_rank
from ..job import failures
from .observers import who_is_late
from .timeouts import after, pause, pauses, time_to_wait
from .work_info import NOT_FOLLOWED

if TYPE_CHECKING:
    from typing import Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

    from .future import Future, WorkFuture
    from .hooks import Operation

    Finish = TypeVar("Finish", bound=Callable[[], None] | None)


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


PUBLIC = [
    "wait", "is_completed", "is_success", "status", "exception", "result", "source_rank", "get_duration", "synchronize",
    "abort", "get_future", "op_type", "sequence_number", "group",
]  # fmt: skip
IN_FLIGHT = WorkStatus.IN_FLIGHT  # look-ups in an Enum are slow
COMPLETED = WorkStatus.COMPLETED
STATE_LOCK = threading.Lock()  # held for a few stores, never during a call


def own_names(kind: type) -> set[str]:
    """Return the names from all classes of `kind.__mro__` that are defined outside hpccomm."""
    return {name for each in kind.__mro__ if each.__module__.split(".")[0] != "hpccomm" for name in vars(each)}


class Progress(NamedTuple):
    """Properties of a transport's Works: `Work.progress` of the transport's subclass.

    Attributes
    ----------
    any_thread_may_poll : bool
        `poll` does not call MPI, only the GPU.
    needs_polling : bool
        Other ranks may wait until this rank polls, so a thread must poll.
    enforces_timeout : bool
        In a group with ``on_timeout="raise"`` the transport itself ends the operation after the timeout.
    can_be_left : bool
        After a timeout the operation may stay in the transport forever: no thread of this process is in it.
    is_released_at_once : bool
        Each new operation of this kind makes the group drop completed Works, not only when many are in flight.
    """

    any_thread_may_poll: bool = False
    needs_polling: bool = False
    enforces_timeout: bool = False
    can_be_left: bool = False
    is_released_at_once: bool = False


class Work:
    """An operation in flight; every ``async_op=True`` call returns one.

    The output arrays hold the result after `wait` has returned or `is_completed` has returned True. Until then, do not
    touch inputs or outputs. The program may drop a Work: its group keeps it and its arrays alive
    until it is done.

    On GPU arrays, `wait` makes the *current CUDA stream* wait and returns at once: later work on that stream
    sees the result. The host waits in `synchronize`, in `wait` with a timeout, and with
    ``HPCCOMM_BLOCKING_WAIT=1``; `is_completed` returns whether the GPU is done.

    A transport subclasses it and writes `poll` and `block`, and if possible `cancel` and `progress`. If the
    program's signal handler raises an exception inside `poll` or `block`, hpccomm calls them again, even after the
    transport was done.

    Attributes
    ----------
    op_type : str
        Name of the operation, ``"all_reduce"``.
    sequence_number : int
        Its number among the group's collectives, or among the group's messages on this rank, from 1. A
        collective has the same number on every rank.

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

    progress = Progress()
    info = NOT_FOLLOWED  # its operation and group, set by the dispatcher
    alive: Any = None  # objects to keep alive while the transport uses them
    source: int | None = None  # the sender's group rank
    operation: Operation | None = None  # for hooks, until it has ended: it holds the arguments
    duration: float | None = None  # seconds, if hooks have followed it
    error: BaseException | None = None  # the exception that ended it
    error_was_seen = False  # by the program; destroy of the group reports other errors
    has_timed_out = False  # after a DistTimeoutError of the group's timeout, if `progress.can_be_left`
    waiting_thread = 0  # the thread in a `wait` of the compiled extension, which has no Python frame
    was_asked = False  # whether the program has polled it since the watchdog last reset this
    is_driven = False  # by the progress thread, because a callback of its Future waits
    op_type: str = property(attrgetter("info.op_type"))  # type: ignore[assignment]  # C functions: no Python frame
    sequence_number: int = property(attrgetter("info.number"))  # type: ignore[assignment]
    group: Any = property(attrgetter("info.dispatcher.group"))  # a ProcessGroup, or None
    # whether it has ended and the hooks, which may still replace its error, have been called
    is_notified: bool = property(attrgetter("_notified"))  # type: ignore[assignment]
    _status = IN_FLIGHT
    _finish: Callable[[], None] | None = None  # the last steps after the transport is done: unpack, divide ...
    _busy = False  # whether a thread is in `_advance`
    _notified = False  # whether the dispatcher and the hooks have been notified of its end
    _callbacks: list[Callable[[Work], None]] | None = None
    _future: WorkFuture | None = None

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def __dir__(self) -> list[str]:
        """Return the public names, which completion shows; others are for transports and hpccomm's own files."""
        return sorted({*PUBLIC, *own_names(type(self))})

    # -- methods for transports to override ----------------------------------------------------

    def poll(self) -> bool:
        """Return True if the transport is done, without blocking; raise its error if it has one."""
        raise NotImplementedError

    def block(self) -> None:
        """Poll until the transport is done, while other threads run; raise its error if it has one."""
        looks = pauses()
        while not self.poll():
            pause(next(looks))

    def cancel(self) -> bool | None:
        """Make the transport give up the operation, so that it uses no buffer; return False if it completes instead."""
        raise UnsupportedOperationError(
            f"it has begun and can't be taken back (only receives can); wait for it, or end the job with "
            f"ProcessGroup.abort(){on_rank()}",
            self.op_type,
        )

    # -- methods for programs ------------------------------------------------------------------

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation is done.

        Parameters
        ----------
        timeout : timedelta or float (seconds), optional
            Default: no limit; in a group with ``on_timeout="raise"``, the group's timeout.

        Returns
        -------
        bool
            True.

        Raises
        ------
        DistTimeoutError
            The timeout has passed. The operation stays in flight: a later `wait` can still succeed.
        Exception
            The error of the operation.
        """
        if timeout is None:
            timeout = self.info.timeout
        if timeout is not None:
            self._wait_until(time.monotonic() + time_to_wait(f"{self.op_type}.wait", timeout), timeout)
        elif not self._notified:
            self._advance(self.block)
            while self._status is IN_FLIGHT:  # another thread was in it
                time.sleep(1e-5)
                self._advance(self.block)
        if self.error is not None:
            self.error_was_seen = True
            raise self.error
        return True

    def _wait_until(self, deadline: float, timeout: timedelta | float) -> None:
        looks = pauses()
        while not self.has_ended():
            if time.monotonic() >= deadline:
                self.has_timed_out = self.progress.can_be_left and timeout == self.info.timeout
                raise DistTimeoutError(
                    f"{self.op_type} #{self.sequence_number}: not done{after(timeout)}; it is still in flight, and the "
                    f"timeout has passed. Has every rank of the group made the matching call?{on_rank()}"
                    + (who_is_late() if timeout == self.info.timeout else "")
                )
            self.make_progress()
            pause(next(looks))

    def make_progress(self) -> bool:
        """Poll this rank's other operations, which the awaited ranks may need; return whether there are any.

        Not needed if `poll` calls MPI, which makes progress on all operations.
        """
        return False

    def is_completed(self) -> bool:
        """Return True if the operation has completed or failed; do not block."""
        self.was_asked = True
        if self.has_ended():
            return True
        self.make_progress()
        return False

    def has_ended(self) -> bool:
        """Return the same as `is_completed`, for hpccomm's own polls, which don't set `was_asked`."""
        if not self._notified:
            self._advance(self.poll)
        return self._status is not IN_FLIGHT

    @property
    def waits_on_stream(self) -> bool:
        """True if `wait` makes a GPU stream wait, not the host."""
        return False

    def is_success(self) -> bool:
        """Return True if the operation has completed without an error; do not block."""
        return self.is_completed() and self._status is COMPLETED

    def exception(self) -> BaseException | None:
        """Return the exception that ended the operation, or None."""
        self.is_completed()
        self.error_was_seen = True
        return self.error

    def result(self) -> Any:
        """Wait; return the array (or list of arrays) that the operation writes."""
        self.wait()
        return self.info.result

    def source_rank(self) -> int:
        """Return the global rank of the sender of a received message."""
        self.wait()
        if self.source is None or self.group is None:
            raise DistError(f"{self.op_type}: only a receive has a source rank{on_rank()}")
        return self.group.ranks[self.source]  # type: ignore[no-any-return]

    def _source_rank(self) -> int:
        return self.source_rank()  # c10d's name of it

    def get_duration(self) -> float:
        """Return the seconds from the beginning of the operation until its end was noticed.

        The group must measure it: call :meth:`ProcessGroup.enable_timing` before the operation, or record operations
        (``HPCCOMM_TRACE``). `wait` and `is_completed` notice the end, and hpccomm's own thread if a callback of the
        Future waits: a program that calls them late gets a longer time.

        Returns
        -------
        float

        Raises
        ------
        DistError
            The time was not measured, or the operation has not ended.
        """
        is_timed = self.operation is not None
        if self.is_completed() and self.duration is not None:
            return self.duration
        if is_timed:
            raise DistError(f"{self.op_type} #{self.sequence_number}: it is still in flight; wait() first{on_rank()}")
        raise DistError(
            f"{self.op_type}: nobody has looked at the clock; call enable_timing() of the group before the "
            f"operation, or run with HPCCOMM_TRACE=1{on_rank()}"
        )

    def synchronize(self) -> None:
        """Block the host until the result is in the output arrays."""
        self.wait()

    def abort(self) -> None:
        """Cancel a pending receive: the Work ends as ABORTED, and the group remains usable.

        If its message has come already, the receive completes. MPI can't cancel other operations:
        UnsupportedOperationError. On a Work that has ended, do nothing.
        """
        while self._status is IN_FLIGHT and not self._advance(self._take_back, WorkStatus.ABORTED):
            time.sleep(1e-5)
        while self._status is IN_FLIGHT and not self._advance(self.block):
            time.sleep(1e-5)

    def _take_back(self) -> bool:
        if self.cancel() is False:
            return False
        self.error = DistError(f"{self.op_type} #{self.sequence_number}: aborted by the program{on_rank()}")
        return True

    def give_up(self, error: Exception, deadline: float) -> None:
        """End as failed with `error`, unless the transport ends the operation before `deadline`."""
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(1e-4)
        if self._status is IN_FLIGHT:
            failures.unsafe_buffers.append(self.alive)
            self.fail(error)
            self._advance(self.poll)

    def fail(self, error: BaseException) -> None:
        """Set the error of the operation, and the status FAILED."""
        self.error, self._status = error, WorkStatus.FAILED

    @property
    def status(self) -> WorkStatus:
        """The state of the operation."""
        self.is_completed()
        return self._status

    def get_future(self) -> Future:
        """Return a Future of `result()`.

        The Future makes progress while the program waits for it or polls it; if it has a callback (or `then`), a thread
        makes progress instead.
        """
        from .future import WorkFuture

        with STATE_LOCK:
            if self._future is not None:
                return self._future
            self._future = future = WorkFuture(self)
        self.add_done_callback(future.settle)
        return future

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(self)`` when the operation ends, in the thread that notices it; at once if it has ended.

        An exception of the callback is logged (logger ``hpccomm``), not raised.
        """
        with STATE_LOCK:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)
        if self._notified:
            self._call_back()

    def finish_with(self, step: Callable[[], None]) -> None:
        """Add `step` as the last part of the operation; only before any other thread has the Work."""
        if self._status is IN_FLIGHT:
            self._finish = both(self._finish, step)
        elif self._status is COMPLETED:
            step()

    def __await__(self) -> Generator[Any, None, Any]:
        if self.is_driven:  # callbacks of earlier operations come first
            return (yield from self.get_future().__await__())
        if not self.is_completed():
            from .future import turns_until

            yield from turns_until(self.is_completed)
        return self.result()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.op_type} #{self.sequence_number}: {self._status.value}>"

    # -- completion ----------------------------------------------------------------------------

    def _advance(self, step: Callable[[], bool | None], ending: WorkStatus = COMPLETED) -> bool:
        """Call `step`, unless another thread is in this method; when the operation ends, finish it and notify once.

        In the main thread a signal handler may raise after any call: then the state is unchanged, and the next call
        continues. There is no call between setting `_busy` and `mine`, nor between setting `_notified` and `finally`.
        """
        mine = False
        try:
            with STATE_LOCK:
                if not self._busy:
                    self._busy = mine = True
            if mine and not self._notified:
                if self._status is IN_FLIGHT:
                    try:
                        if step() is False:
                            return True
                        if ending is COMPLETED and self._finish is not None:
                            self._finish()
                        self._status = ending
                    except Exception as error:
                        if ending is not COMPLETED or is_of_a_signal_handler(error):
                            raise
                        self.fail(self.translate_error(error))
                        if self.error is not error:
                            self.error.__cause__ = error  # type: ignore[union-attr]
                        self.info.dispatcher.identify(self.error, self.op_type, self.sequence_number)
                    self._finish = self.alive = None
                if self._status is not IN_FLIGHT:
                    info = self.info
                    if self.operation is not None or self.error is not None:
                        info.dispatcher.ended(self, self._status)
                    info.dispatcher.in_flight.pop(self, None)
                    self._notified = True
        finally:
            if mine:
                self._busy = False
        if self._callbacks and self._notified:
            self._call_back()
        return mine

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            try:
                callback(self)
            except Exception:  # this may be any thread, and other callbacks wait
                log_exception("a callback of %r raised", self)

    def translate_error(self, error: Exception) -> Exception:
        """Return the program's error for one that the transport has raised."""
        return error


class CompletedWork(Work):
    """A completed Work, for backends whose operations complete at once.

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


def both(first: Callable[[], None] | None, second: Callable[[], None] | None) -> Callable[[], None] | None:
    """Return a function that calls `first`, then `second`; if one is None, the other."""
    if first is None or second is None:
        return first or second
    steps = repeatable(first), repeatable(second)

    def one_after_the_other() -> None:
        for step in steps:
            step()

    return one_after_the_other


class InPlace(partial[Any]):
    """A last step in C that must not be repeated: AVG's division of an array by the number of ranks."""


def repeatable(finish: Finish) -> Finish | Once:
    """Return `finish` as a function that may be called again after a signal handler has interrupted it."""
    return Once(finish) if isinstance(finish, InPlace) else finish


class Once:
    """A function that calls `steps`, which must be C functions, once; and again only after `arm`.

    hpccomm repeats last steps that a signal handler has interrupted, but a division in place must not be repeated: no
    handler can run between C's taking a step from the iterator and calling it.
    """

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self._steps = steps
        self.arm()

    def arm(self) -> None:
        """Allow one more call."""
        self._pending = iter(self._steps)

    def __call__(self) -> None:
        """Call the steps that have not yet been called; an overflow in one is no exception, as in MPI."""
        with np.errstate(all="ignore"):
            deque(map(methodcaller("__call__"), self._pending), 0)


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Return True if a signal handler has raised `error`: a function with the interrupted frame as an argument."""
    trace = error.__traceback__
    interrupted: FrameType | None = None
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            given = value if isinstance(value, tuple) else (value,)  # def handler(*_)
            if interrupted is not None and any(each is interrupted for each in given):
                return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


if TYPE_CHECKING:
    P = ParamSpec("P")
    Rest = ParamSpec("Rest")
    First = TypeVar("First")
    Blocking = TypeVar("Blocking", covariant=True)  # the result without async_op

    class Asynchronous(Protocol[P, Blocking]):
        """A function that returns a Work if `async_op` is true; type checkers check only its first argument then."""

        @overload
        def __call__(
            self: _Given[First, Rest], _: First, /, *__: Any, async_op: Literal[True], **named: Any
        ) -> Work: ...
        @overload
        def __call__(self, *, async_op: Literal[True], **named: Any) -> Work: ...
        @overload
        def __call__(self, *_: *tuple[*tuple[Any, ...], Literal[True]]) -> Work: ...
        @overload
        def __call__(
            self: _Given[First, Rest], _: First, /, *__: Any, async_op: Literal[False], **named: Any
        ) -> Blocking: ...
        @overload
        def __call__(
            self: _Given[First, Rest], _: First, /, *__: Any, async_op: bool, **named: Any
        ) -> Blocking | Work: ...
        @overload
        def __call__(self, *_: P.args, **named: P.kwargs) -> Blocking: ...

    _Given: TypeAlias = "Asynchronous[Concatenate[First, Rest], Any]"

    class _Method(Protocol[P, Blocking]):
        def __get__(self, group: object, kind: Any) -> Asynchronous[P, Blocking]: ...

    def asynchronous_method(method: Callable[Concatenate[Any, P], Blocking | Work]) -> _Method[P, Blocking]: ...  # noqa: D103

else:

    def asynchronous_method(method: Any) -> Any:
        """Return the method unchanged; for type checkers, `async_op` selects the type of the result."""
        return method
