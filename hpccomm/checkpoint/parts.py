"""Parts of a global array, read from the ranks' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import files

PathOf = Callable[[str], Path]  # returns the path of a rank's file, by its name in the manifest


def length_of(described: dict[str, Any]) -> int:
    """Return the number of rows of an array: its length along the sharded axis; 1 for a 0-d array."""
    return sum(shard["length"] for shard in described["shards"])


def read_part(path_of: PathOf, block: int, described: dict[str, Any], begin: int, end: int) -> Any:
    """Return the rows from `begin` to `end` of an array, with its original axis order; verify every byte."""
    rows, row = empty_rows(described, end - begin), files.row_bytes(described)
    for number, low, _, target in pieces_of(described, begin, end, rows):
        shard, data = described["shards"][number], files.as_bytes(target)
        if len(data):
            path, size = path_of(shard["file"]), shard["length"] * row
            files.patiently(partial(files.read_bytes, path, shard, size, block, low * row, data))
    return in_place(described, rows)


def pieces_of(described: dict[str, Any], begin: int, end: int, rows: Any) -> Iterator[tuple[int, int, int, Any]]:
    """Yield the number of each shard with rows from `begin` to `end`, its first and last such row, and their place."""
    start = done = 0
    for number, shard in enumerate(described["shards"]):
        low, high = max(begin - start, 0), min(end - start, shard["length"])
        if low < high:
            yield number, low, high, rows[done : done + high - low]
            done += high - low
        start += shard["length"]


def empty_rows(described: dict[str, Any], count: int) -> Any:
    """Return a new array for `count` rows as they are stored, with the sharded axis first."""
    axis, shape = described.get("axis", 0), described["shape"]
    return np.empty([count, *shape[:axis], *shape[axis + 1 :]], files.dtype_from_text(described["dtype"]))


def in_place(described: dict[str, Any], rows: Any) -> Any:
    """Return stored rows in the original axis order, C-contiguous."""
    if not described["shape"]:
        return rows.reshape(())
    return np.asarray(np.moveaxis(rows, 0, described.get("axis", 0)), order="C")
