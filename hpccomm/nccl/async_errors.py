"""A thread that notices NCCL's asynchronous errors: the host never waits inside NCCL, so no other thread would."""

from __future__ import annotations

import threading
from collections.abc import Callable

SECONDS_BETWEEN_LOOKS = 0.5


class AsyncErrors:
    """A thread that calls `look` until it returns an error's text, and then calls `fail` with it."""

    def __init__(self, look: Callable[[], str | None], fail: Callable[[str], None]) -> None:
        self._look = look
        self._fail = fail
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpccomm-nccl-errors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(SECONDS_BETWEEN_LOOKS):
            if (error := self._look()) is not None:
                return self._fail(error)

    def stop(self) -> None:
        """End the thread; it does not use the communicator afterwards."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
