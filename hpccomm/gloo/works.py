"""Works that wrap c10d's Works, and the translation of gloo's errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..core.work import Progress, Work
from ..errors import DistBackendError, DistError, DistTimeoutError, on_rank

TIMED_OUT = ("timed out", "timeout", "failed to pass monitoredbarrier")  # gloo raises only RuntimeError
WAITING: set[threading.Thread] = set()


class GlooWork(Work):
    """One or several collectives of c10d; `alive` is the memory that gloo uses."""

    progress = Progress(enforces_timeout=True)

    def __init__(self, works: list[Any], finish: Callable[[], None] | None, alive: Any) -> None:
        super().__init__(finish)
        self.alive = alive
        self._works = works

    def poll(self) -> bool:
        """Return True once gloo's threads are done; raise their error."""
        if not all(work.is_completed() for work in self._works):
            return False
        self.block()
        return True

    def block(self) -> None:
        """Wait for gloo's threads; the program's other threads keep running."""
        for work in self._works:
            work.wait()

    def translate_error(self, error: Exception) -> Exception:
        """Translate gloo's exceptions to hpccomm's."""
        return as_dist_error(self.op_type, error)


class MessageWork(GlooWork):
    """Messages of c10d; their Works complete only inside `wait`.

    A wait whose time-out expires breaks all of gloo's connections. So `poll` starts a thread that waits.
    """

    _waiting: threading.Thread | None = None
    _error: Exception | None = None

    def poll(self) -> bool:
        """Return True once the waiting thread is done, and raise its error; the first call starts the thread."""
        if self._waiting is None:
            self._waiting = threading.Thread(target=self._wait_in_thread, name="hpccomm-gloo", daemon=True)
            WAITING.add(self._waiting)
            self._waiting.start()
        if self._waiting.is_alive():
            return False
        self.block()
        return True

    def block(self) -> None:
        """Wait for the messages, or for the thread that waits for them."""
        if self._waiting is None:
            self._wait()
        else:
            self._waiting.join()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            super().block()
        except Exception as error:
            self._error = error

    def _wait_in_thread(self) -> None:
        self._wait()
        WAITING.discard(threading.current_thread())


class ReceiveWork(MessageWork):
    """A receive, which is the first of `works`; once done, it knows the sender."""

    def _wait(self) -> None:
        super()._wait()
        if self._error is None:
            self.source = self._works[0]._source_rank()


def as_dist_error(operation: str, error: Exception) -> Exception:
    """Return the DistError for gloo's RuntimeError; return other errors unchanged."""
    if not isinstance(error, RuntimeError) or isinstance(error, DistError):
        return error
    text = str(error).partition("\n")[0]
    if any(words in text.lower() for words in TIMED_OUT):
        return DistTimeoutError(
            f"gloo reports: {text}; it has closed its connections, so this group can't be used on{on_rank()}", operation
        )
    return DistBackendError(f"gloo reports: {text}{on_rank()}", operation)
