"""Convert mpi4py's buffer arguments, such as ``[array, (counts, displs), MPI.DOUBLE]``, to arrays of any device.

The rules are mpi4py's (``msgbuffer.pxi``): counts and displacements are in elements of the datatype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

from ..core.arrays import device_of, locate
from ..errors import on_rank

_NO_ARRAYS = frozenset({type(None), int, bool, str, float, np.int64, np.int32})


def device_of_buffers(arguments: Iterable[Any]) -> str:
    """Return the device of the arrays among a call's arguments; "cpu" if there are none, or only host arrays."""
    for each in arguments:
        if type(each) is np.ndarray:
            continue
        if type(each) in (list, tuple) and each:
            each = each[0]
        if type(each) is np.ndarray or type(each) in _NO_ARRAYS or type(each).__module__ == "mpi4py.MPI":
            continue
        try:
            device = device_of(each)
        except TypeError:  # mpi4py handles or refuses it
            continue
        if device != "cpu":
            return device
    return "cpu"


def is_in_place(message: Any) -> bool:
    """Return True for values that mpi4py treats as ``MPI.IN_PLACE``, including None (`is_IN_PLACE` in constant.pxi)."""
    return message is None or message is MPI.IN_PLACE


def buffer(where: str, message: Any, takes_lists: bool = False) -> tuple[str, Any, Any, Any]:
    """Return a buffer's device, its array, and the counts and displacements as given (None if omitted).

    `where` is "call: argument"; `takes_lists` is True for calls like ``Allgatherv``.
    """
    counts = displs = datatype = None
    array = message
    if isinstance(message, list | tuple):
        if not 2 <= len(message) <= 4:
            raise ValueError(f"{where} has {len(message)} items; expected [array, counts, displs, datatype]{on_rank()}")
        array, *rest = message
        if len(rest) > 1 or isinstance(rest[0], MPI.Datatype | str):
            datatype = rest.pop()
        if len(rest) == 1 and isinstance(rest[0], tuple if takes_lists else list | tuple):
            rest = list(rest[0])
        counts, displs = (*rest, None, None)[:2]
    call, argument = where.split(": ")
    if isinstance(array, np.ndarray):  # mpi4py sends a masked array's memory, too
        array = array.view(np.ndarray)
    device, view = locate(call, argument, array)
    return device, view if datatype is None else _typed(where, view, datatype, counts), counts, displs


def whole(where: str, message: Any, in_memory_order: bool = True) -> tuple[str, Any]:
    """Return the device and the array of a message's or a reduction's buffer; one in Fortran order transposed."""
    device, array, count, displ = buffer(where, message)
    if count is None and displ is None:
        is_turned = in_memory_order and array.flags.f_contiguous and not array.flags.c_contiguous
        return device, array.T if is_turned else array
    start, size = displ or 0, array.size
    end = size if count is None else start + count
    return device, _part(where, flat(where, array), start, end - start)


def parts(where: str, message: Any, ranks: int, takes_lists: bool) -> list[Any]:
    """Return each rank's part of a buffer; `takes_lists` means a count for each rank, as in ``Allgatherv``."""
    _, array, counts, displs = buffer(where, message, takes_lists)
    array = flat(where, array)
    if not takes_lists:
        start = displs or 0
        count = _equal(where, array.size - start, counts, ranks)
        return [_part(where, array, start + rank * count, count) for rank in range(ranks)]
    if counts is None:
        counts = [array.size // ranks + (array.size % ranks > rank) for rank in range(ranks)]
    counts = _of_each_rank(where, "counts", counts, ranks)
    if displs is None:
        displs = [0, *accumulate(counts[:-1])]
    elif isinstance(displs, int | np.integer):
        displs = [rank * int(displs) for rank in range(ranks)]
    displs = _of_each_rank(where, "displacements", displs, ranks)
    return [_part(where, array, displ, count) for displ, count in zip(displs, counts)]


def together(where: str, message: Any, ranks: int) -> Any:
    """Return the contiguous array of equal parts for all ranks in a buffer."""
    _, array, count, displ = buffer(where, message)
    array, start = flat(where, array), displ or 0
    return _part(where, array, start, ranks * _equal(where, array.size - start, count, ranks))


def flat(where: str, array: Any) -> Any:
    """Return a contiguous array as one dimension, in memory order."""
    if array.flags.c_contiguous:
        return array.reshape(-1)
    if array.flags.f_contiguous:
        return array.T.reshape(-1)
    raise ValueError(f"{where} is not contiguous: make a copy of it, whose parts have places in memory{on_rank()}")


@cache
def dtype_of(datatype: int) -> np.dtype[Any] | None:
    """Return the NumPy dtype of an MPI datatype's handle; None if it is not predefined or has no dtype."""
    given = MPI.Datatype.fromhandle(datatype)
    if not given.is_predefined:
        return None
    try:
        dtype = np.dtype(to_numpy_dtype(given))
    except (ValueError, TypeError):
        return None
    return np.dtype(np.uint8) if dtype.kind in "VS" and dtype.itemsize == 1 else dtype  # MPI.BYTE, MPI.CHAR


def _typed(where: str, array: Any, datatype: Any, counts: Any) -> Any:
    """View an array as elements of an MPI datatype; with a count, bytes behind the last whole element are left out."""
    if isinstance(datatype, str):
        dtype = np.dtype(datatype)
    else:
        found = dtype_of(datatype.handle)
        if found is None:
            name = datatype.Get_name() or "of the program's own"
            raise TypeError(
                f"{where} has the datatype {name}, and only MPI's own have a dtype: give a slice{on_rank()}"
            )
        dtype = found
    if array.dtype == dtype:
        return array
    array = flat(where, array)
    if counts is not None and array.nbytes % dtype.itemsize:
        array = array.view(np.uint8)[: array.nbytes // dtype.itemsize * dtype.itemsize]
    return array.view(dtype)


def _part(where: str, array: Any, start: int, count: int) -> Any:
    start, count = int(start), int(count)
    if start < 0 or count < 0 or start + count > array.size:
        raise ValueError(f"{where} has {array.size} elements, and not {count} from {start} on{on_rank()}")
    return array[start : start + count]


def _equal(where: str, size: int, count: Any, ranks: int) -> int:
    """Return the given count, or else an equal share of all elements."""
    if count is not None:
        return int(count)
    if size % ranks:
        raise ValueError(f"{where} has {size} elements, which {ranks} ranks can't share{on_rank()}")
    return size // ranks


def _of_each_rank(where: str, what: str, given: Any, ranks: int) -> Sequence[int]:
    numbers = [int(given)] * ranks if isinstance(given, int | np.integer) else [int(each) for each in given]
    if len(numbers) != ranks:
        raise ValueError(f"{where} has {len(numbers)} {what} for {ranks} ranks{on_rank()}")
    return numbers
