"""Works on CUDA streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from ..core.timeouts import pause, pauses
from ..core.work import COMPLETED, IN_FLIGHT, Work, WorkStatus
from ..errors import DistBackendError, here
from .seam import Runtime, on_device

T = TypeVar("T")
MAIN = threading.main_thread().ident


class CudaWork(Work):
    """An operation on a stream; an event marks its end.

    `release` takes the event back once it has passed; `failure` returns the error of the transport, or None.
    """

    is_let_go_at_once = True  # its arrays are memory of the GPU
    any_thread_may_poll = True

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        release: Callable[[int], None],
        failure: Callable[[], Exception | None],
        wait_blocks: bool,
        event: int = 0,
    ) -> None:
        super().__init__()
        self._runtime = runtime
        self._device = device
        self._release = release
        self._failure = failure
        self._wait_blocks = wait_blocks
        self._event = event  # 0 until its batch has been launched

    def launched(self, event: int) -> None:
        """Set the event recorded behind the operation's batch."""
        self._event = event

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make this thread's current stream wait for the operation; with a `timeout`, block the host."""
        if timeout is not None or self._wait_blocks or self._finish is not None:
            return super().wait(timeout)
        if self._runtime.current_device() != self._device:
            with on_device(self._runtime, self._device):
                return self.wait()
        while self._status is IN_FLIGHT and self._failure() is None:
            if self._advance(self._make_stream_wait) and self._status is IN_FLIGHT:  # no other thread is at it
                return True
        return super().wait()

    def _make_stream_wait(self) -> bool:
        self._runtime.wait(self._runtime.current_stream(self._device), self._event)
        return False  # whether it has ended

    def synchronize(self) -> None:
        """Block the host until the result is in the output arrays."""
        super().wait()

    def poll(self) -> bool:
        """Return True once the event has passed; raise the error of the transport."""
        self._raise_failure()
        return self._event != 0 and self._ask(self._runtime.is_done)

    def block(self) -> None:
        """Block the host until the event has passed; raise the error of the transport.

        The group's messages of the host in flight go on meanwhile: what this waits for may be a rank that waits for one
        (NCCL's user guide, "MPI Progress").
        """
        self._raise_failure()
        for gap in pauses() if threading.get_ident() == MAIN else ():  # in others MPI may not be called
            on_host = [each for each in list(self.flight.door.in_flight) if not each.any_thread_may_poll]
            if not on_host or self._ask(self._runtime.is_done):
                break
            for each in on_host:
                each.has_ended()
            pause(gap)
            self._raise_failure()
        try:
            self._ask(self._runtime.synchronize_event)
            self._raise_failure()
        finally:
            self._release(self._event)

    def _ask(self, function: Callable[[int], T]) -> T:
        """Return CUDA's answer for the event on the right GPU; raise its errors as DistBackendError."""
        try:
            if threading.get_ident() == MAIN:  # whose current GPU is the program's business
                return function(self._event)
            with on_device(self._runtime, self._device):
                return function(self._event)
        except Exception as error:
            if (told := told_by_cuda(self._runtime, error, self.op_type)) is None:
                raise
            raise told from error

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise failure

    def _advance(self, step: Callable[[], bool | None], ending: WorkStatus = COMPLETED) -> bool:
        mine = super()._advance(step, ending)
        if mine and self._status is not IN_FLIGHT and self._event:  # without one its batch has failed
            self._release(self._event)
        return mine


def told_by_cuda(runtime: Runtime, error: Exception, operation: str = "") -> DistBackendError | None:
    """Return the error for the program in the place of one of CUDA's; None for another error."""
    text = runtime.explain(error)
    return None if text is None else DistBackendError(f"CUDA reports {text}{here()}", operation)
