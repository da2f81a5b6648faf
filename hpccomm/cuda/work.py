"""Works on CUDA streams."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..core.work import IN_FLIGHT, Work
from .seam import Runtime, on_device


class CudaWork(Work):
    """An operation on a stream of its transport; an event marks its end.

    `events` is the pool that the event comes from and goes back to. `failure` returns the error of
    the transport, or None.
    """

    is_let_go_at_once = True  # its arrays are memory of the GPU

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        events: list[int],
        failure: Callable[[], Exception | None],
        wait_blocks: bool,
    ) -> None:
        super().__init__()
        self._runtime = runtime
        self._device = device
        self._events = events
        self._failure = failure
        self._wait_blocks = wait_blocks
        self._event = 0  # until the batch that the operation belongs to has been launched

    def launched(self, event: int, alive: Any) -> None:
        """Take the event recorded after the operation, and everything that must be kept until it has passed."""
        self._event = event
        self.alive = alive

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make this thread's current stream wait for the operation, not the host; with a `timeout`, the host."""
        if timeout is not None or self._wait_blocks or self._finish is not None:
            return super().wait(timeout)
        if self._runtime.current_device() != self._device:
            with on_device(self._runtime, self._device):
                return self.wait()
        if self._status is IN_FLIGHT and self._failure() is None:
            with self._lock:
                if self._status is IN_FLIGHT:
                    self._runtime.wait(self._runtime.current_stream(self._device), self._event)
                    return True
        return super().wait()

    def synchronize(self) -> None:
        """Block the host until the result is in the output arrays."""
        super().wait()

    def poll(self) -> bool:
        """Say whether the event has passed; raise the error of the transport."""
        self._raise_failure()
        return self._event != 0 and self._runtime.is_done(self._event)

    def block(self) -> None:
        """Return when the event has passed; raise the error of the transport."""
        self._raise_failure()
        self._runtime.synchronize_event(self._event)
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure

    def _complete(self, advance: Callable[[], bool | None]) -> None:
        super()._complete(advance)
        if self._status is not IN_FLIGHT:
            self._events.append(self._event)
