"""Large reductions in segments.

Segments stay in the cache, avoid page faults in the temporary array that both MPIs allocate above 32 MiB, and keep
every count below 2^31. ``hpccomm bench all_reduce reduce_scatter_single -b 1M -e 256M`` measures the gain on a machine.
Segments of broadcast and all_gather were no faster than one call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from .layout import size_of


def segments(buffer: Any, nbytes: int) -> Sequence[Any]:
    """Return flat pieces of a contiguous array, each of at most `nbytes`."""
    flat = buffer.reshape(-1)
    step = max(1, nbytes // buffer.itemsize)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def columns(arrays: Sequence[Any], output: Any, memory: Any) -> Iterator[tuple[Any, Any]]:
    """Yield packed pieces of arrays of one size, one array for each rank, and the place of each piece in `output`.

    A piece has some elements of every array. All pieces are packed into the same bytes of `memory`.
    """
    parts, flat = [array.reshape(-1) for array in arrays], output.reshape(-1)
    step = max(1, memory.size // (len(parts) * flat.itemsize))
    packed = (
        np.empty(len(parts), flat.dtype) if step == 1 else memory[: len(parts) * step * flat.itemsize].view(flat.dtype)
    )
    for start in range(0, flat.size, step):
        target = flat[start : start + step]
        piece = packed[: len(parts) * target.size]
        np.concatenate([part[start : start + step] for part in parts], out=piece)
        yield piece, target


def runs(arrays: list[Any], most: int, measure: Callable[[Any], int] = size_of) -> list[tuple[list[Any], int]]:
    """Return runs of neighbours in `arrays`, each with its number of elements: at most `most`, or one array's.

    `measure` may count bytes instead.
    """
    ends = list(accumulate(map(measure, arrays)))
    if ends[-1] <= most:
        return [(arrays, ends[-1])]
    cut, start, before = [], 0, 0
    while start < len(arrays):
        stop = max(start + 1, bisect_right(ends, before + most))
        cut.append((arrays[start:stop], ends[stop - 1] - before))
        start, before = stop, ends[stop - 1]
    return cut


def runs_of_lists(lists: Sequence[Sequence[Any]], most: int) -> Iterator[slice]:
    """Yield the runs of neighbours in lists of arrays: of each list at most `most` bytes, or one array.

    The compiled extension, which other ranks may use, cuts in the same way.
    """
    start, sums = 0, [0] * len(lists)
    for i, arrays in enumerate(zip(*lists, strict=True)):
        sums = [each + array.nbytes for each, array in zip(sums, arrays)]
        if i > start and max(sums) > most:
            yield slice(start, i)
            start, sums = i, [array.nbytes for array in arrays]
    yield slice(start, None)
