"""Works on CUDA streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

from ..core.arrays import count_of
from ..core.dispatcher import all_dispatchers
from ..core.timeouts import MAIN, pause, pauses
from ..core.work import COMPLETED, IN_FLIGHT, Progress, Work, WorkStatus
from ..core.work_info import work_info
from ..errors import DistBackendError, on_rank
from .seam import Runtime, on_device

T = TypeVar("T")


class CudaWork(Work):
    """An operation on a stream; an event marks its end.

    `release` recycles the event once it has passed; `failure` returns the transport's error, or None; `kept` maps
    events to objects that must live until the event has passed.
    """

    progress = Progress(any_thread_may_poll=True, is_released_at_once=True)  # its arrays are GPU memory
    called_on: int | None = None  # the current stream at the time of the call
    _rest: CudaWork | None = None  # replaces this Work in the group, once the program owns the arrays alone

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        release: Callable[[int], None],
        failure: Callable[[], Exception | None],
        wait_blocks: bool,
        event: int = 0,
        kept: dict[int, Any] | None = None,
    ) -> None:
        super().__init__()
        self._runtime = runtime
        self._device = device
        self._release = release
        self._failure = failure
        self.wait_blocks = wait_blocks
        self._event = event  # 0 until the batch is launched, and if there is a `_rest`
        self._kept = {} if kept is None else kept

    @property
    def waits_on_stream(self) -> bool:
        """True if `wait` makes a stream wait; it blocks the host if the operation's last part runs there."""
        return not self.wait_blocks and self._finish is None

    def launched(self, event: int) -> None:
        """Set the event that is recorded after the operation's batch."""
        self._event = event

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make this thread's current stream wait for the operation; with a `timeout`, block the host."""
        if timeout is not None or not self.waits_on_stream:
            return super().wait(timeout)
        if self._rest is not None:
            return self._rest.wait()
        if self._runtime.current_device() != self._device:
            with on_device(self._runtime, self._device):
                return self.wait()
        while self._status is IN_FLIGHT and self._failure() is None:
            if self._advance(self._make_stream_wait) and self._status is IN_FLIGHT:  # no other thread is polling it
                return True
        return super().wait()

    def _make_stream_wait(self) -> bool:
        current = self._runtime.current_stream(self._device)
        self._runtime.wait(current, self._event)
        if current == self.called_on and self.operation is None and not self._callbacks:
            self._let_go()
        return False  # not known to be complete

    def _let_go(self) -> None:
        """Make the group keep only the event, not the arrays: later work on the call's stream now runs after this one.

        So only the program owns the arrays, as after a blocking operation, and their memory can be reused at once.
        """
        dispatcher, name, number, result, *others = self.info
        if self not in dispatcher.in_flight:  # it is part of another Work
            return
        rest = CudaWork(self._runtime, self._device, self._release, self._failure, self.wait_blocks, self._event)
        rest.info = work_info((dispatcher, name, number, described(result), *others))
        self._kept[self._event] = ()
        self._event, self._rest = 0, rest
        dispatcher.in_flight[rest] = None
        dispatcher.in_flight.pop(self, None)

    def synchronize(self) -> None:
        """Block the host until the result is in the output arrays."""
        super().wait()

    def poll(self) -> bool:
        """Return True once the event has passed; raise the transport's error."""
        if self._rest is not None:
            if (error := self._rest.exception()) is not None:
                raise error
            return self._rest.has_ended()
        self._raise_failure()
        return self._event != 0 and self._ask(self._runtime.is_done)

    def make_progress(self) -> bool:
        """Poll host operations in flight of all groups, so that MPI makes progress; return whether there are any.

        The GPU may be waiting for a rank that waits for them (NCCL's user guide, "MPI Progress").
        """
        if threading.get_ident() != MAIN:  # other threads may not call MPI
            return False
        on_host = [
            each
            for dispatcher in all_dispatchers()
            for each in list(dispatcher.in_flight)
            if not each.progress.any_thread_may_poll
        ]
        for each in on_host:
            each.has_ended()
        return bool(on_host)

    def block(self) -> None:
        """Block the host until the event has passed; raise the transport's error."""
        if self._rest is not None:
            return self._rest.synchronize()
        self._raise_failure()
        for gap in pauses():
            if not self.make_progress() or self._ask(self._runtime.is_done):
                break
            pause(gap)
            self._raise_failure()
        try:
            self._ask(self._runtime.synchronize_event)
            self._raise_failure()
        finally:
            self._release(self._event)

    def _ask(self, function: Callable[[int], T]) -> T:
        """Call a function of CUDA for the event on the right GPU; raise its errors as DistBackendError."""
        try:
            if threading.get_ident() == MAIN:  # the program chooses the main thread's GPU
                return function(self._event)
            with on_device(self._runtime, self._device):
                return function(self._event)
        except Exception as error:
            if (translated := error_from_cuda(self._runtime, error, self.op_type)) is None:
                raise
            raise translated from error

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise failure

    def _advance(self, step: Callable[[], bool | None], ending: WorkStatus = COMPLETED) -> bool:
        mine = super()._advance(step, ending)
        if mine and self._status is not IN_FLIGHT and self._event:  # without an event its batch has failed
            self._release(self._event)
        return mine


def described(result: Any) -> Any:
    """Return a result with its arrays replaced by their dtypes and sizes, for reports: it holds no GPU memory."""
    if isinstance(result, list | tuple):
        return [described(each) for each in result]
    return SimpleNamespace(dtype=result.dtype, size=count_of(result)) if hasattr(result, "dtype") else None


def error_from_cuda(runtime: Runtime, error: Exception, operation: str = "") -> DistBackendError | None:
    """Return a DistBackendError for an error of CUDA; None for any other error."""
    text = runtime.explain(error)
    return None if text is None else DistBackendError(f"CUDA reports {text}{on_rank()}", operation)
