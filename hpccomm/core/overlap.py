"""Which inputs of an operation share memory with its outputs, without comparing each with each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

Extent = tuple[int, int]


def extent(array: Any, address: int) -> Extent:
    """Return the lowest address of an array, and the one after its highest; `address` is that of its first element."""
    if array.flags.c_contiguous:  # an empty one is
        return address, address + array.nbytes
    start = end = address
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        start, end = (start + reach, end) if reach < 0 else (start, end + reach)
    return start, end + array.itemsize


def overlapping(inputs: Iterable[Extent], outputs: Iterable[Extent]) -> list[bool]:
    """Return for each of `inputs` whether it shares an address with one of `outputs`."""
    written = sorted(each for each in outputs if each[0] < each[1])
    starts = [start for start, _ in written]
    ends = [*accumulate((end for _, end in written), max)]
    begun = ((start, end, bisect_left(starts, end)) for start, end in inputs)  # how many outputs begin before the end
    return [start < end and count > 0 and ends[count - 1] > start for start, end, count in begun]
