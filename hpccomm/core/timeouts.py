"""Timeouts in seconds, and the pauses of polling loops."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import repeat
from numbers import Real
from types import CodeType
from typing import TYPE_CHECKING, TypeVar

from ..errors import on_rank

if TYPE_CHECKING:
    F = TypeVar("F", bound=Callable[..., object])

MAIN = threading.main_thread().ident  # MPI_Finalize runs there, and can't stop other threads inside MPI
KEEP_TIME: set[CodeType] = set()  # functions with their own time limit, to which the watchdog leaves the error
sched_yield = getattr(os, "sched_yield", partial(time.sleep, 0))  # macOS lacks it


def as_seconds(timeout: timedelta | float, what: str = "timeout") -> float:
    """Return a timeout in seconds; TypeError if it is neither a timedelta nor a number."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"{what} is {timeout!r}; expected a timedelta or a number of seconds{on_rank()}")
    return float(timeout)


def time_to_wait(name: str, timeout: timedelta | float) -> float:
    """Accept a time of 0 or more; return it in seconds."""
    seconds = as_seconds(timeout, f"{name}: timeout")
    if not seconds >= 0:
        raise ValueError(f"{name}: timeout is {timeout}; expected 0 or more seconds{on_rank()}")
    return seconds


def after(timeout: timedelta | float) -> str:
    """Return " after 3 s" for a message; "" if there was no time."""
    return f" after {as_seconds(timeout):g} s" if timeout else ""


def keeps_time(function: F) -> F:
    """Mark a function that raises an error by itself after too long a wait."""
    KEEP_TIME.add(function.__code__)
    return function


def pauses() -> Iterator[float]:
    """Yield the seconds to `pause` between polls: 200 times 0, then a microsecond more each time, up to 1 ms."""
    yield from repeat(0.0, 200)
    yield from (k * 1e-6 for k in range(1, 1000))
    yield from repeat(1e-3)


def pause(seconds: float) -> None:
    """Sleep; for 0, only yield the core and the GIL to waiting threads.

    ``time.sleep(0)`` would set a timer, and take 60 us or more (Linux's timer slack is 50 us).
    """
    if seconds:
        time.sleep(seconds)
    else:
        sched_yield()
