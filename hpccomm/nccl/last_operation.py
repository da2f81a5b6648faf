"""LastOperation: lets the watchdog see blocking operations, whose calls return before the GPU has completed them.

Blocking operations have no Work. Instead an event is recorded after one of them now and then. It shows if the GPU still
waits for other ranks while the host runs the program. An operation that directly follows such a one is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..core.work_info import NOT_FOLLOWED, work_info
from ..cuda.seam import Runtime, on_device
from ..cuda.work import CudaWork, described
from ..native import NOT_NOTED, gil_held

if TYPE_CHECKING:
    from ..core.dispatcher import Dispatcher

PERIOD = 1e-3  # seconds: recording and querying an event take the host a microsecond each
SPARE: dict[int, list[int]] = {}  # events of destroyed groups, by GPU: the watchdog may still query one


class LastOperation(CudaWork):
    """The last blocking operation of a connection with a recorded event; never waited for."""

    due = 0.0  # the time.monotonic at which the next operation is to be marked

    def __init__(self, runtime: Runtime, device: int, failure: Callable[[], Exception | None]) -> None:
        spare = SPARE.get(device)
        event = spare.pop() if spare else runtime.create_event(device)
        self._notes, self._note = NOT_NOTED, -1
        if gil_held is not None:
            gil_held.ask_cuda(*runtime.addresses_for_c())
        super().__init__(runtime, device, lambda _: None, failure, wait_blocks=False, event=event)

    def mark(self, dispatcher: Dispatcher, name: str, arrays: Any, peer: int | None = None) -> None:
        """Record the event after an operation just put on the current stream, unless the event is still pending."""
        self.due = monotonic() + PERIOD
        with on_device(self._runtime, self._device):
            stream = self._runtime.current_stream(self._device)
            if self._runtime.is_capturing(stream) or not self.poll():
                return
            self._runtime.record(self._event, stream)
        while isinstance(arrays, list | tuple):
            arrays = arrays[0] if arrays else None
        number = dispatcher.number_of(name)
        self._notes, self._note = dispatcher.notes, dispatcher.notes.begin_on_gpu(name, number, self._event)
        self.info = work_info((dispatcher, name, number, described(arrays), peer, None, None))

    def poll(self) -> bool:
        """Return True once the event has passed, and forget the operation then; raise the transport's error."""
        info = self.info
        has_passed = self._event == 0 or super().poll()
        if has_passed and self.info is info:  # no other thread has marked another operation
            self._forget()
        return has_passed

    def close(self) -> None:
        """Keep the event for later groups; all operations have ended."""
        event, self._event = self._event, 0
        self._forget()
        SPARE.setdefault(self._device, []).append(event)

    def _forget(self) -> None:
        self.info = NOT_FOLLOWED
        (notes, self._notes), (note, self._note) = (self._notes, NOT_NOTED), (self._note, -1)
        notes.end(note)
