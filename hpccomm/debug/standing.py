"""Measure how long the main thread has been in one call of C, where a library such as HDF5 may wait for other ranks.

Python's main thread runs calls queued with `Py_AddPendingCall` as soon as it returns from C, and at every turn of a
Python loop. The queued call is ``sem_post``, which is not Python code and can't fail.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from . import stacks
from .held import clock

SEMAPHORE_BYTES = 64  # sem_t has 32 with glibc
BUSY = 0.2  # of a core: more means that threads compute; the watchdog needs a tenth of that
_semaphores: list[Any] = []  # kept alive, because a queued call may still need them


class Standing:
    """Polls the main thread of this process."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        _semaphores.append(self._semaphore)
        self._try_wait = libc.sem_trywait
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._is_known = libc.sem_init(self._semaphore, 0, 0) == 0
        self._is_left = False  # a call is queued that has not run
        self._moved, self._computed = clock(), time.process_time()

    def look(self, now: float) -> float:
        """Return the seconds that the main thread has been in one call of C; call it repeatedly."""
        if self._is_left and self._try_wait(self._semaphore) == 0:
            self._is_left = False
            self._moved, self._computed = now, time.process_time()
        if not self._is_left and self._is_known:
            leave: Any = ctypes.pythonapi.Py_AddPendingCall
            self._is_left = leave(self._post, ctypes.cast(self._semaphore, ctypes.c_void_p)) == 0
        return now - self._moved if self._is_left else 0.0

    def seconds(self) -> float:
        """Return the same for a verdict: 0 if the program has other threads that compute."""
        stands = self.look(clock())
        has_threads = stacks.threads_of_the_program() != [threading.main_thread()]
        return 0.0 if has_threads and time.process_time() - self._computed > BUSY * stands else stands
