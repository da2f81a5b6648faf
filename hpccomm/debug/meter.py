"""The meter: counts the bytes of this process's operations while ``hpccomm top`` asks for them, and its memory."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ..core.calls import Call
from ..core.dispatcher import Dispatcher
from ..core.hooks import Operation
from ..native import fastpath
from .held import clock
from .sources import SOURCES

if TYPE_CHECKING:
    from ..core.hooks import RemovableHandle

LEASE = 60.0  # seconds after the last question for which it counts


class Meter:
    """Counts the bytes of all arrays of operations.

    The fast paths' C code always counts them. A hook would switch off the fast path for GPU arrays, and can't be
    registered by another thread while the program opens a `coalescing` block; so the dispatcher calls this object.
    """

    def __init__(self) -> None:
        self._bytes = 0  # of operations that did not take a fast path
        self._ends = 0.0  # the time at which it stops
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Count from now on; stop a while after the last call."""
        self._ends = clock() + LEASE
        if Dispatcher.meter is None:
            Dispatcher.meter = self
            self._handles = [source.register_hook(self) for source in SOURCES]

    def look(self, now: float) -> None:
        """Stop if nobody has asked for a while."""
        if self._ends and now > self._ends:
            self._ends, Dispatcher.meter = 0.0, None
            while self._handles:
                self._handles.pop().remove()

    def total(self) -> int | None:
        """Return the bytes counted so far; None while it does not count."""
        return self._bytes + (0 if fastpath is None else int(fastpath.noted_bytes())) if self._ends else None

    def count(self, call: Call) -> None:
        """Count an operation of a group."""
        self._bytes += Operation(None, call.name, 0, call.device, False, call.named).nbytes

    def begin(self, operation: Operation) -> None:
        """Count a call of mpi4py's communicators: this object is also a hook."""
        self._bytes += operation.nbytes

    def end(self, operation: Operation) -> None:
        """Do nothing."""


def resident_bytes() -> int:
    """Return the bytes of memory that this process uses; 0 if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
