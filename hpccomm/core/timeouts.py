"""Time-outs in seconds, and the pauses of a loop that polls."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import repeat
from numbers import Real

from ..errors import here


def as_seconds(timeout: timedelta | float, what: str = "timeout") -> float:
    """Return a timeout in seconds; TypeError if it is neither a timedelta nor a number."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise TypeError(f"{what} is {timeout!r}; expected a timedelta or a number of seconds{here()}")
    return float(timeout)


def pauses(longest: float = 1e-3) -> Iterator[float]:
    """Yield the seconds to sleep between polls: 0, for others on the same core, then a microsecond more each time."""
    yield from repeat(0.0, 50)
    yield from (k * 1e-6 for k in range(round(longest * 1e6)))
    yield from repeat(longest)
