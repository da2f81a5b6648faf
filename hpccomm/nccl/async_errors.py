"""A thread that notices when NCCL has failed: the host never waits inside NCCL, so nothing else would tell."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..cuda.seam import Communicator

SECONDS_BETWEEN_LOOKS = 0.5


class AsyncErrors:
    """Asks a communicator for its asynchronous error again and again; if there is one, calls `fail` with its text."""

    def __init__(self, comm: Communicator, fail: Callable[[str], None]) -> None:
        self._comm = comm
        self._fail = fail
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpccomm-nccl-errors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(SECONDS_BETWEEN_LOOKS):
            error = self._comm.async_error()
            if error is not None:
                return self._fail(error)

    def stop(self) -> None:
        """End the thread; afterwards it does not touch the communicator any more."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
