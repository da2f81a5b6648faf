"""Find arrays of an operation that share memory, by sorting their addresses."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import SimpleNamespace
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


def _own_all_memory(arrays: list[Any]) -> bool:
    """Return True for different host arrays that are no views."""
    is_known = set(map(type, arrays)) == {np.ndarray} and all(map(operator.attrgetter("flags.owndata"), arrays))
    return is_known and len(set(map(id, arrays))) == len(arrays)


_are_all_apart = _own_all_memory if fastpath is None else fastpath.are_all_apart


def common(arrays: list[Any]) -> tuple[int, int] | None:
    """Return the places of two arrays that have common elements, or None."""
    if _are_all_apart(arrays):
        return None  # soon, because there may be thousands
    before: list[tuple[int, int]] = []  # ends and places of arrays that reach beyond the start of this one
    hosts = list(map(_at_its_address, arrays))
    for start, end, j in sorted((*extent(each, address_of(each)), j) for j, each in enumerate(hosts) if each.size):
        before = [each for each in before if each[0] > start]
        for _, i in before:
            if np.shares_memory(hosts[i], hosts[j]):
                return i, j
        before.append((end, j))
    return None


def read_and_written(inputs: list[Any], outputs: list[Any]) -> tuple[int, int] | None:
    """Return the places of an input and of another call's output that have common elements, or None.

    The outputs are apart. The input of a call in place is its output, or a part of it.
    """
    if all(map(operator.is_, inputs, outputs)) or _are_all_apart([*outputs, *inputs]):
        return None
    from bisect import bisect_left  # late: `import hpccomm` imports this file

    hosts = list(map(_at_its_address, outputs))
    written = sorted((*extent(each, address_of(each)), j) for j, each in enumerate(hosts) if each.size)
    ends = [*accumulate((end for _, end, _ in written), max)]
    for i, each in enumerate(map(_at_its_address, inputs)):
        start, end = extent(each, address_of(each))
        k = bisect_left(written, (end,))
        while k and ends[k - 1] > start:
            k -= 1
            j = written[k][2]
            if i != j and np.shares_memory(each, hosts[j]):
                return i, j
    return None


def _at_its_address(array: Any) -> Any:
    """Return a host array with the addresses of one of CuPy's, to compare them; an empty one if they are not known."""
    if isinstance(array, np.ndarray):
        return array
    address = getattr(getattr(array, "data", None), "ptr", 0)
    if not address:
        return np.empty(0)
    place = {"shape": array.shape, "strides": array.strides, "data": (address, False), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__={**place, "typestr": f"|V{array.itemsize}"}))


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
