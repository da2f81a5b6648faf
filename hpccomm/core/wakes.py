"""Waiting for other threads, in C only: a signal handler that raises inside threading.Event leaves its lock held."""

from __future__ import annotations

import threading
from contextlib import suppress
from operator import attrgetter
from queue import Empty, SimpleQueue

LOOKS_AGAIN = 0.1  # seconds; a handler may raise between `acquire` and `release`, and other threads wait, too


class Condition(threading.Condition):
    """A condition whose `with` calls the lock itself: no handler runs between taking it and the block."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class Event:
    """A flag that one thread sets, and others wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._waits = threading.Lock()
        self._waits.acquire()

    def is_set(self) -> bool:
        """Return whether it has been set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and let the waiting threads go on."""
        if not self._is_set:
            self._is_set = True
            self._waits.release()

    def wait(self) -> None:
        """Wait until it is set."""
        while not self._is_set:
            if self._waits.acquire(timeout=LOOKS_AGAIN):
                self._waits.release()


class Bell:
    """It wakes the one thread that waits for it."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread, now or when it waits next."""
        self._rings.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a ring; return whether there was one in that time."""
        with suppress(Empty):
            self._rings.get(timeout=seconds)
            with suppress(Empty):
                while True:
                    self._rings.get_nowait()
            return True
        return False
