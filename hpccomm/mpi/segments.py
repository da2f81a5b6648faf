"""Large reductions in segments.

Above 32 MiB both MPIs allocate a temporary per call, and pay its page faults; from 8 MiB on the pieces also stay in the
cache. How much that is worth on your machine: ``hpccomm bench all_reduce reduce_scatter_single -b 1M -e 256M``.
Segments also keep every count below 2^31.

Segments of broadcast and all_gather were no faster than one call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from .layout import size_of


def segments(buffer: Any, nbytes: int) -> Sequence[Any]:
    """Return a contiguous array in flat pieces of at most `nbytes`; the array itself if it is no larger."""
    if buffer.nbytes <= nbytes:
        return (buffer,)
    flat = buffer.reshape(-1)
    step = max(1, nbytes // buffer.itemsize)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def columns(array: Any, output: Any, ranks: int, nbytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield an `array` of one part for each rank as pieces of at most `nbytes`, each with its place in `output`.

    A piece has a piece of every part, packed into memory that the next one uses again.
    """
    parts, flat = array.reshape(ranks, -1), output.reshape(-1)
    step = max(1, nbytes // (ranks * array.itemsize))
    packed = np.empty(ranks * step, array.dtype)
    for start in range(0, flat.size, step):
        target = flat[start : start + step]
        piece = packed[: ranks * target.size]
        np.copyto(piece.reshape(ranks, -1), parts[:, start : start + step])
        yield piece, target


def runs(arrays: list[Any], most: int) -> list[tuple[list[Any], int]]:
    """Return a list of arrays as lists of neighbours with at most `most` elements, and how many; larger ones alone."""
    ends = list(accumulate(map(size_of, arrays)))
    if ends[-1] <= most:
        return [(arrays, ends[-1])]
    cut, start, before = [], 0, 0
    while start < len(arrays):
        stop = max(start + 1, bisect_right(ends, before + most))
        cut.append((arrays[start:stop], ends[stop - 1] - before))
        start, before = stop, ends[stop - 1]
    return cut
