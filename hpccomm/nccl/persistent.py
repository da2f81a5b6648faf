"""Persistent operations on GPU arrays: planned once, then started again and again, also by a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from ..core.persistent_work import PersistentWork
from ..core.work import Work
from ..errors import DistTimeoutError
from .connection import Connection
from .plan import Plan

FAST = {
    "broadcast", "all_reduce", "all_reduce_coalesced", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single",
}  # fmt: skip
START, RUN = 2, 3  # as in native/gpu.pxi


class NCCLPersistentWork(PersistentWork):
    """A plan and its arrays; each start has its own Work, unless a CUDA graph captures it."""

    _fast: Callable[[int], Any] | None = None  # begins it on the fast path, or returns None

    def __init__(self, connection: Connection, plan: Plan, arrays: Any) -> None:
        self._connection = connection
        self._plan: Plan | None = plan
        self._arrays = arrays
        self._work: Work | None = None  # of the last start; None if that was captured

    def use(self, path: Any, operation: str, arguments: tuple[Any, ...]) -> None:
        """Begin the operation on a fast path, if that has it and takes the arrays; not with settings of its own."""
        if operation in FAST and path.is_open:
            self._fast = partial(path.again, operation, arguments)

    def start(self) -> None:
        """See PersistentWork.start."""
        if self.is_active or self._freed:
            self.refuse_to_start()
        if self._fast is None or (work := self._fast(START)) is None:
            return super().start()
        self._work, self.is_active = work, True

    def run(self) -> None:
        """See PersistentWork.run: on the current stream, like a blocking operation."""
        if self.is_active or self._freed:
            self.refuse_to_start()
        if self._fast is None or self._fast(RUN) is None:
            super().run()

    def begin(self) -> Work | None:
        assert self._plan is not None, "it has been freed"
        self._work = self._connection.start(self._plan, self._arrays)
        return self._work

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make the current stream wait for the operation; with a `timeout`, block the host."""
        if self._work is None or not self.is_active:
            return super().wait(timeout)
        try:
            self._work.wait(timeout)
        except DistTimeoutError:  # it stays in flight
            raise
        except Exception:
            self.is_active = False
            raise
        self.is_active = False
        return True

    def poll(self) -> bool:
        if self._work is None or not self._work.is_completed():
            return self._work is None
        return self._work.wait()  # raises its error

    def block(self) -> None:
        """Return at once: `wait` calls it only if the start was captured."""

    def release(self) -> None:
        self._plan = self._arrays = self._work = self._fast = None  # an operation in flight keeps its own references
