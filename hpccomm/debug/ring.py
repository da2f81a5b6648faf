"""The last operations of this process on the compiled fast path, from its ring buffer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CodeType

import numpy as np

from ..native import fastpath
from ..process.settings import from_here
from .records import EPOCH, Record


def ring_records(groups: Mapping[int, tuple[str, str]], since: int = 0) -> dict[int, Record]:
    """Return the records in the ring buffer with serial numbers above `since`, the oldest first.

    `groups` has the keys and names of groups by `FastPath.place`; operations of other groups are left out. Times are
    exact to 4 ms, unless operations are recorded.
    """
    found = {}
    for serial, place, name, number, code, nbytes, elements, op, peer, tag, async_op, *times, has_failed, where in (
        () if fastpath is None else fastpath.ring_rows(since)
    ):
        if place in groups:
            dtype = _dtypes().get(code)
            text, alike = ("", 0) if dtype is None else (str(dtype), nbytes // dtype.itemsize)
            if fastpath is not None and code == fastpath.BFLOAT16_NUMBER:
                text, alike = "bfloat16", nbytes // 2
            count = alike if elements < 0 else elements
            began, ended = (EPOCH + each if each else 0.0 for each in times)
            state = "failed" if has_failed else "completed" if ended else "in flight"
            said = "" if where is None else line(*where)
            found[serial] = Record(
                name, number, *groups[place], text, count, nbytes, op, peer, tag, async_op, began, ended, state, said
            )
    return found


def last() -> int:
    """Return the serial number of the last operation; 0 before the first."""
    return 0 if fastpath is None else int(fastpath.last_serial())


@functools.lru_cache(maxsize=4096)
def line(code: CodeType, instruction: int) -> str:
    """Return an instruction's file and line, ``"train.py:91"``, relative to the working directory at the start."""
    number = next((at for start, end, at in code.co_lines() if start <= instruction < end and at), code.co_firstlineno)
    return f"{from_here(code.co_filename)}:{number}"


@functools.cache
def _dtypes() -> dict[int, np.dtype[np.generic]]:
    """Return NumPy's own dtypes by their type numbers."""
    return {each.num: each for each in map(np.dtype, np.typecodes["All"])}
