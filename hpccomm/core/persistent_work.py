"""PersistentWork: the handle of an operation that is set up once and started many times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import DistError, DistTimeoutError, on_rank
from ..job import failures
from .calls import Call
from .observers import who_is_late
from .operation_list import START
from .timeouts import after, time_to_wait
from .work import CompletedWork, Work, is_of_a_signal_handler

if TYPE_CHECKING:
    from .hooks import Operation


class PersistentWork:
    """An operation set up by one of the ``*_init`` functions.

    `start` begins it with the arrays' values at that time, `wait` completes it; do not touch the arrays between the two
    calls. It keeps the arrays alive until it is freed. `free`, the end of a ``with`` block and the end of the
    group free MPI's resources.

    A transport subclasses it and writes `begin`, `poll`, `block` and `release`.

    Attributes
    ----------
    op_type : str
        Name of the operation, ``"all_reduce"``.
    output : array
        The array that the operation writes (or sends).

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> with hc.all_reduce_init(x) as reduction:
    ...     reduction.start()
    ...     reduction.wait()
    True
    >>> x  # on 4 ranks: array([4., 8.])
    array([1., 2.])
    >>> reduction.is_completed()
    True
    """

    op_type = ""
    output: Any = None
    number = 0  # of its set-up, if the ranks compare set-ups
    dispatcher: Any = None  # of its group, whose destroy also frees it
    call: Call  # for each start
    operation: Operation | None = None  # for hooks, while it is active
    was_asked = False  # whether the program has polled it since the watchdog last reset this
    waiting_thread = 0  # the thread in a `wait` of the compiled extension, which has no Python frame
    is_active = False  # in flight
    _timeout: float | None = None  # seconds: the default of `wait`
    _freed = False
    _refusal: Exception | None = None  # raised by `wait` in a process forked while it was in flight

    def belong_to(self, dispatcher: Any, call: Call, number: int) -> None:
        """Make this the persistent form of `call` in the dispatcher's group."""
        self.dispatcher, self.number, self._timeout = dispatcher, number, dispatcher.timeout
        self.op_type, self.output = call.name, call.result
        self.call = Call((f"{call.name}{START}", call.device, self, call.arguments))

    @property
    def group(self) -> Any:
        """The group of the operation."""
        return None if self.dispatcher is None else self.dispatcher.group

    def begin(self) -> Work | None:
        """Start the transport; return a Work if the group must follow it like an asynchronous operation's."""
        raise NotImplementedError

    def poll(self) -> bool:
        """If the transport is done, finish and return True; do not block."""
        raise NotImplementedError

    def block(self) -> None:
        """Block until the transport is done and the output is in place."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the resources of the transport."""

    def start(self) -> None:
        """Begin the operation.

        Raises
        ------
        DistError
            It is already in flight, or has been freed.
        """
        if self.is_active or self._freed:
            self.refuse_to_start()
        if self.dispatcher is None:
            self.begin()
        else:
            self.dispatcher.start(self)
        self.is_active = True

    def run(self) -> None:
        """Do the operation: `start` and `wait` in one call.

        On GPU arrays it runs on the current stream, like a blocking operation, and costs the host less.
        """
        self.start()
        self.wait()

    def refuse_to_start(self) -> NoReturn:
        """Raise the error of a `start` of an operation that is in flight or freed."""
        raise DistError(f"{self.op_type}: {'freed' if self._freed else 'started already; wait() first'}{on_rank()}")

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation is done, like :meth:`Work.wait`; return at once if it has not been started."""
        if not self.is_active:
            if self._refusal is not None:
                raise self._refusal
            return True
        if timeout is None:
            timeout = self._timeout
        if timeout is not None:
            deadline = time.monotonic() + time_to_wait(f"{self.op_type}.wait", timeout)
            while not self._ends(self.poll):
                if time.monotonic() >= deadline:
                    raise DistTimeoutError(
                        f"{self.op_type}: not done{after(timeout)}; it is still in flight{on_rank()}"
                        + (who_is_late() if timeout == self._timeout else "")
                    )
                time.sleep(0)
        else:
            self._ends(self.block)
        return True

    def _ends(self, advance: Callable[[], bool | None]) -> bool:
        """Poll or block; return True if the operation has ended. An error of the transport also ends it."""
        try:
            if advance() is False:
                return False
        except Exception as error:
            if is_of_a_signal_handler(error):  # still in flight: the next call continues
                raise
            self.fail(error)
        self._ended(None)
        return True

    def fail(self, error: Exception) -> NoReturn:
        """End the operation with an error, translated by its backend."""
        if self.dispatcher is not None:
            error = self.dispatcher.translated(self.dispatcher.backends[self.call.device], self.op_type, 0, error)
        self._ended(error)
        raise error

    def _ended(self, error: Exception | None) -> None:
        self.is_active = False
        operation, self.operation = self.operation, None
        if operation is not None:
            operation.end(error)

    def give_up(self, error: Exception, deadline: float) -> None:
        """End with `error`, unless the transport ends the operation before `deadline`."""
        with contextlib.suppress(Exception):
            self.wait(max(0.0, deadline - time.monotonic()))
        if self.is_active:
            failures.unsafe_buffers.append(self)
            self._ended(error)

    def leave_to_the_parent(self, refusal: Exception) -> None:
        """In a forked process, let `wait` raise `refusal` if the operation is in flight in the parent."""
        if self.is_active:
            self.is_active, self.operation, self._refusal = False, None, refusal

    def is_completed(self) -> bool:
        """Return True if the operation is done (or not started), without blocking."""
        self.was_asked = True
        return not self.is_active or self._ends(self.poll)

    def free(self) -> None:
        """Wait for the operation and free its resources; it can't be started again. A second call does nothing."""
        if not self._freed:
            self.wait()
            self._freed, self.output = True, None
            self.release()
            if self.dispatcher is not None:
                self.dispatcher.persistent.remove(self)
                self.call = Call((self.call.name, self.call.device, None, ()))  # drops this object and the arrays

    def __enter__(self) -> PersistentWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error it may be in flight forever
            self.free()

    def __repr__(self) -> str:
        state = "freed" if self._freed else "in flight" if self.is_active else "ready"
        return f"<{type(self).__name__} {self.op_type}: {state}>"


class Repeated(PersistentWork):
    """A persistent operation for transports that have none: each start is an asynchronous operation."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._launch: Callable[[], Any] | None = launch  # returns a Work, or another value if already done
        self._work: Work | None = None

    def begin(self) -> Work:
        """Begin an asynchronous operation; the group follows it."""
        assert self._launch is not None, "it has been freed"
        begun = self._launch()
        self._work = begun if isinstance(begun, Work) else CompletedWork()
        return self._work

    def poll(self) -> bool:
        """Return True if it is done; raise its error."""
        return self._work is None or (self._work.is_completed() and self._work.wait())

    def block(self) -> None:
        """Wait for the asynchronous operation."""
        if self._work is not None:
            self._work.wait()

    def release(self) -> None:
        """Drop the arrays and the last asynchronous operation."""
        self._launch = self._work = None
