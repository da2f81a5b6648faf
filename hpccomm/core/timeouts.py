"""Time-outs in seconds, and the pauses of a loop that polls."""

from __future__ import annotations

import os
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

KEEP_TIME: set[CodeType] = set()  # functions that raise when they have waited too long: the watchdog leaves it to them
sched_yield = getattr(os, "sched_yield", partial(time.sleep, 0))  # which macOS lacks


def as_seconds(timeout: timedelta | float, what: str = "timeout") -> float:
    """Return a timeout in seconds; TypeError if it is neither a timedelta nor a number."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"{what} is {timeout!r}; expected a timedelta or a number of seconds{on_rank()}")
    return float(timeout)


def keeps_time(function: F) -> F:
    """Note a function that raises by itself when it has waited too long."""
    KEEP_TIME.add(function.__code__)
    return function


def pauses(longest: float = 1e-3) -> Iterator[float]:
    """Yield the seconds to `pause` between polls: often 0, then a microsecond more each time."""
    yield from repeat(0.0, 200)
    yield from (k * 1e-6 for k in range(1, round(longest * 1e6)))
    yield from repeat(longest)


def pause(seconds: float) -> None:
    """Sleep; for 0, let others go on who wait for this core or the GIL.

    ``time.sleep(0)`` is no such thing: it sets a timer, and takes 60 us and more (Linux's timer slack is 50 us).
    """
    if seconds:
        time.sleep(seconds)
    else:
        sched_yield()
