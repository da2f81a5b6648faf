"""Find an operation's inputs that share memory with its outputs, by sorting their addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..native import fastpath

Extent = tuple[int, int]


def all_unaliased(arrays: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return `arrays`, with a copy instead of each host array that shares memory with one of `outputs`."""
    if not all(isinstance(each, np.ndarray) for each in (*arrays, *outputs)):
        return list(arrays)
    shared = overlapping(*([extent(each, address_of(each)) for each in given] for given in (arrays, outputs)))
    return [array.copy(order="C") if is_shared else array for array, is_shared in zip(arrays, shared)]


def _address_of(array: Any) -> int:
    """Return the address of a host array's first element."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


address_of = _address_of if fastpath is None else fastpath.address_of


def extent(array: Any, address: int) -> Extent:
    """Return the lowest address of an array, and its highest plus 1; `address` is that of the first element."""
    if array.flags.c_contiguous:  # true for empty arrays
        return address, address + array.nbytes
    start = end = address
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        start, end = (start + reach, end) if reach < 0 else (start, end + reach)
    return start, end + array.itemsize


def overlapping(inputs: Iterable[Extent], outputs: Iterable[Extent]) -> list[bool]:
    """Return for each of `inputs` True if it shares an address with one of `outputs`."""
    from bisect import bisect_left  # late: `import hpccomm` imports this file

    written = sorted(each for each in outputs if each[0] < each[1])
    starts = [start for start, _ in written]
    ends = [*accumulate((end for _, end in written), max)]
    begun = ((start, end, bisect_left(starts, end)) for start, end in inputs)  # outputs that begin before the end
    return [start < end and count > 0 and ends[count - 1] > start for start, end, count in begun]


def sharing(extents: Sequence[Extent]) -> set[int]:
    """Return the indices of `extents` that share an address with another one."""
    shared: set[int] = set()
    last, reach = 0, 0  # the one that reaches furthest so far, and its end
    for start, end, i in sorted((*each, i) for i, each in enumerate(extents) if each[0] < each[1]):
        if start < reach:
            shared |= {i, last}
        if end > reach:
            last, reach = i, end
    return shared
