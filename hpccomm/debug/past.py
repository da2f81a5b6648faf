"""The last operations of this process that took the compiled fast path: the room remembers them, and always does."""

from __future__ import annotations

import functools
from types import CodeType
from typing import NamedTuple

import numpy as np

from ..native import room


class Past(NamedTuple):
    """One of them; times are those of `time.perf_counter`, to 4 ms unless operations are recorded."""

    serial: int  # in this process
    place: int  # of its fast path: `FastPath.place`
    name: str
    number: int
    dtype: str
    elements: int
    nbytes: int
    op: str
    peer: int | None
    tag: int | None
    async_op: bool
    began: float
    ended: float  # 0 while it is in flight
    has_failed: bool
    where: tuple[CodeType, int] | None  # where lines are recorded

    @property
    def state(self) -> str:
        """``"in flight"``, ``"completed"`` or ``"failed"``."""
        return "failed" if self.has_failed else "completed" if self.ended else "in flight"


def past(since: int = 0) -> list[Past]:
    """Return the operations with a serial number above `since` that are remembered, the oldest first."""
    if room is None:
        return []
    found = []
    for serial, place, name, number, code, nbytes, elements, op, peer, tag, async_op, *end in room.past(since):
        dtype = _dtypes().get(code)
        text, alike = ("", 0) if dtype is None else (str(dtype), nbytes // dtype.itemsize)
        elements = alike if elements < 0 else elements
        began, ended, has_failed, where = end
        found.append(
            Past(
                serial, place, name, number, text, elements, nbytes, op, peer, tag, async_op, began, ended, has_failed,
                where,
            )
        )  # fmt: skip
    return found


def last() -> int:
    """Return the serial number of the last operation; 0 before the first."""
    return 0 if room is None else int(room.last_serial())


@functools.cache
def _dtypes() -> dict[int, np.dtype[np.generic]]:
    """Return NumPy's own dtypes by their numbers."""
    return {each.num: each for each in map(np.dtype, np.typecodes["All"])}
