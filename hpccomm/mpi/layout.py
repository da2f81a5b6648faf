"""Conversion between the user's arrays, of any layout, and the contiguous memory that MPI moves.

A contiguous array is its own buffer. Other arrays are packed before the call and, if MPI writes them, unpacked
afterwards: the functions for outputs return the buffer and the function that unpacks it, or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise, repeat
from operator import attrgetter, setitem
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..core.overlap import address_of
from . import datatypes
from .datatypes import as_bytes

Finish: TypeAlias = Callable[[], None] | None

APART_BYTES = 32 << 10  # of the first array of a list: smaller arrays are copied in less time than checked

shape_of, dtype_of, size_of, nbytes_of = map(attrgetter, ("shape", "dtype", "size", "nbytes"))


def is_plain(array: Any) -> bool:
    """Return whether MPI can work on the array's own memory: in C order, without gaps, aligned."""
    flags = array.flags
    return bool(flags.carray or (flags.c_contiguous and flags.aligned))  # carray: all of these and writeable, at once


def send_buffer(array: Any) -> Any:
    """Return a contiguous array with the values of `array`."""
    flags = array.flags
    return array if flags.carray or (flags.c_contiguous and flags.aligned) else array.copy(order="C")


def recv_buffer(array: Any) -> tuple[Any, Finish]:
    """Return a contiguous array that MPI may write, and the function that copies it to `array`; None if it is that."""
    if is_plain(array):
        return array, None
    buffer = np.empty(array.shape, array.dtype)
    return buffer, partial(setitem, array, ..., buffer)  # takes a third of np.copyto's time


def unaliased(array: Any, output: Any) -> Any:
    """Return a contiguous array with the values of `array`, outside the memory of `output` (MPI forbids overlap)."""
    if not is_plain(array):
        return array.copy(order="C")
    own_memory = array.base is None and output.base is None and array is not output
    return array if own_memory or not np.may_share_memory(array, output) else array.copy(order="C")


def unpacked(arrays: list[Any]) -> tuple[Any, list[int], Callable[[], None]]:
    """Return a flat array for the values of `arrays` (all of one dtype), their sizes, and the function that unpacks."""
    counts = list(map(size_of, arrays))
    flat = np.empty(sum(counts), arrays[0].dtype)
    return flat, counts, partial(unpack_into, flat, arrays)


def apart(arrays: list[Any]) -> tuple[Any, tuple[list[int], list[int]], MPI.Datatype] | None:
    """Return one mpi4py buffer over large arrays of one dtype, one for each rank, without a copy; None if impossible.

    Each rank decides alone: MPI sends the same messages to one piece of memory as to separate arrays.
    """
    if arrays[0].nbytes < APART_BYTES or not all(map(is_plain, arrays)):
        return None
    datatype = datatypes.TYPED.get(arrays[0].dtype)
    width = arrays[0].itemsize if datatype is not None else 1
    places = [(address_of(array), array.nbytes) for array in arrays]
    start, end = min(places)[0], max(map(sum, places))
    in_order = sorted(places)
    overlap = any(this + nbytes > following for (this, nbytes), (following, _) in pairwise(in_order))
    if overlap or any((each - start) % width for each, _ in places) or (end - start) // width > datatypes.LARGEST_COUNT:
        return None
    counts, displacements = zip(*((nbytes // width, (each - start) // width) for each, nbytes in places), strict=True)
    return MPI.buffer.fromaddress(start, end - start), (list(counts), list(displacements)), datatype or MPI.BYTE


def unpack_into(flat: Any, arrays: list[Any]) -> None:
    """Copy consecutive parts of `flat` into the arrays."""
    if not flat.nbytes:  # also for "V0"
        return
    shapes = set(map(shape_of, arrays))
    if len(shapes) == 1:  # NumPy splits twice as fast
        deque(map(setitem, arrays, repeat(...), flat.reshape(-1, *shapes.pop())), 0)
        return
    start = 0
    for array in arrays:
        end = start + array.size
        array[...] = flat[start:end].reshape(array.shape)
        start = end


def packed_any(arrays: list[Any], memory: Any = None) -> Any:
    """Return one flat array with the values of `arrays`; with their bytes, if their dtypes differ or have fields.

    It lies in `memory`, bytes of that size, or in new memory.
    """
    if len(set(map(dtype_of, arrays))) == 1 and arrays[0].dtype.names is None:  # NumPy would drop gaps between fields
        return np.concatenate(arrays, axis=None, out=None if memory is None else memory.view(arrays[0].dtype))
    return np.concatenate([as_bytes(np.ascontiguousarray(array)) for array in arrays], out=memory)


def unpacked_any(arrays: list[Any], memory: Any = None) -> tuple[Any, Callable[[], None]]:
    """Return a flat array for the result of `packed_any` on such arrays, and the function that unpacks it."""
    flat = np.empty(sum(map(nbytes_of, arrays)), np.uint8) if memory is None else memory
    if len(set(map(dtype_of, arrays))) == 1:
        flat = flat.view(arrays[0].dtype)
        return flat, partial(unpack_into, flat, arrays)
    return flat, partial(unpack_columns, flat.reshape(1, -1), arrays)


def unpack_columns(rows: Any, arrays: list[Any]) -> None:
    """Copy consecutive columns of `rows` into the arrays; `rows` are of their dtype, or bytes."""
    start = 0
    for array in arrays:
        if not array.nbytes:  # also for "V0"
            continue
        width = array.nbytes // rows.itemsize // len(rows)
        column = rows[:, start : start + width]
        if array.dtype != rows.dtype:
            column = np.ascontiguousarray(column).reshape(-1).view(array.dtype)
        array[...] = column.reshape(array.shape)
        start += width


def by_dtype(arrays: list[Any], *others: list[Any]) -> list[tuple[list[Any], ...]]:
    """Split lists of equal length by the dtypes of the first list, in order of first appearance."""
    if len(set(map(dtype_of, arrays))) == 1:
        return [(arrays, *others)]
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for row in zip(arrays, *others, strict=True):
        groups.setdefault(row[0].dtype, []).append(row)
    return [tuple(map(list, zip(*rows, strict=True))) for rows in groups.values()]
