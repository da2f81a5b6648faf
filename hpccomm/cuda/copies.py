"""Copies of many arrays by few kernels: the tables that ``copies.cu`` works through, each given by value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # by their size in bytes
THREADS = 256  # of a block
MOST_BLOCKS = 1024  # for one copy
MOST_COPIES, MOST_AXES = 32, 4  # in a table; arguments of a kernel have room for 4 kB
# `struct Copy`: the addresses of two arrays, with how many bytes it is from one element to the next along each axis
COPY = np.dtype(
    [("target", "u8"), ("source", "u8"), ("to", "i8", MOST_AXES), ("of", "i8", MOST_AXES), ("shape", "u4", MOST_AXES)]
)
Pair = tuple[Any, Any]  # a target and a source, of one shape and dtype


class Copies(NamedTuple):
    """One launch."""

    itemsize: int
    device: int
    blocks: tuple[int, int]  # for each copy, and copies
    table: Any  # a NumPy array of one element


def prepared(pairs: Iterable[Pair]) -> tuple[list[Copies], list[Pair]]:
    """Return the launches that copy these arrays, and the pairs that the kernel does not know how to copy."""
    known: dict[tuple[int, int], list[Pair]] = {}
    others = []
    for target, source in pairs:
        if target.itemsize in NUMBERS and target.ndim <= MOST_AXES and target.size < 1 << 32:
            known.setdefault((target.itemsize, target.data.device_id), []).append((target, source))
        else:
            others.append((target, source))
    launches = []
    for (itemsize, device), alike in known.items():
        for start in range(0, len(alike), MOST_COPIES):
            some = alike[start : start + MOST_COPIES]
            blocks = max(min(-(-target.size // THREADS), MOST_BLOCKS) for target, _ in some)
            launches.append(Copies(itemsize, device, (max(blocks, 1), len(some)), table_of(some)))
    return launches, others


def table_of(pairs: Sequence[Pair]) -> Any:
    """Return the kernel's ``struct Copies`` as an array of one element."""
    table = np.zeros(MOST_COPIES, COPY)
    for row, (target, source) in zip(table, pairs):
        before = (0,) * (MOST_AXES - target.ndim)
        row["target"], row["source"] = target.data.ptr, source.data.ptr
        row["to"], row["of"] = before + target.strides, before + source.strides
        row["shape"] = (1,) * len(before) + target.shape
    return table.view(f"V{table.nbytes}")
