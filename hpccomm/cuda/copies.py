"""Copies of many arrays by a few kernels: the tables for ``copies.cu``, which are passed by value.

A kernel copies units of 1 to 16 bytes. CUDA accesses a unit only at multiples of its size; a misaligned access makes
every later CUDA call of the process fail. So the unit is the largest that divides the addresses, the strides and the
length of contiguous bytes. This works for every layout, also those that CuPy's kernels can't read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

UNITS = (1, 2, 4, 8, 16)  # bytes
THREADS = 256  # per block
MOST_BLOCKS = 1024  # for one copy
FEW, MANY = 4, 32  # maximum number of axes of a kernel
# The most copies of a kernel's table, by the number of axes. A kernel's arguments are limited to 4 kB, and CUDA copies
# them at each launch: hence the table of one copy, that of a strided array.
IN_A_TABLE = {FEW: (1, 32), MANY: (6,)}
# `struct Copy`: the addresses of both arrays, their strides in bytes along each axis, and the shape
COPY = {axes: struct.Struct(f"2Q{2 * axes}q{axes}I") for axes in (FEW, MANY)}
MOST_UNITS = (1 << 32) - 1  # in one copy
Pair = tuple[Any, Any]  # a target and a source, of the same shape and dtype
Axis = tuple[int, int, int]  # length, stride of the target, stride of the source
Row = tuple[int, int, list[Axis]]  # addresses of the target and of the source, axes in units


class Kernel(NamedTuple):
    """A kernel of ``copies.cu``: its template arguments."""

    unit: int  # bytes
    axes: int
    copies: int  # in its table


KERNELS = [Kernel(unit, axes, copies) for unit in UNITS for axes in (FEW, MANY) for copies in IN_A_TABLE[axes]]


class Copies(NamedTuple):
    """One launch."""

    kernel: Kernel
    device: int
    blocks: tuple[int, int]  # per copy; number of copies
    table: Any  # a NumPy array of one element


def prepared(pairs: Iterable[Pair]) -> list[Copies]:
    """Return the launches that copy each source to its target."""
    known: dict[tuple[int, int, int], list[Row]] = {}  # by the unit, the number of axes, and the GPU
    for target, source in pairs:
        if target.size:
            unit, axes = in_units(target, source)
            rows = known.setdefault((unit, FEW if len(axes) <= FEW else MANY, target.data.device_id), [])
            rows += in_parts(target.data.ptr, source.data.ptr, axes)
    launches = []
    for (unit, most_axes, device), rows in known.items():
        for start in range(0, len(rows), IN_A_TABLE[most_axes][-1]):
            some = rows[start : start + IN_A_TABLE[most_axes][-1]]
            blocks = max(min(-(-_count(axes) // THREADS), MOST_BLOCKS) for _, _, axes in some)
            kernel = Kernel(unit, most_axes, min(each for each in IN_A_TABLE[most_axes] if each >= len(some)))
            launches.append(Copies(kernel, device, (blocks, len(some)), table_of(kernel, some)))
    return launches


def in_units(target: Any, source: Any) -> tuple[int, list[Axis]]:
    """Return the unit in bytes, and as few axes as possible along which units are copied."""
    itemsize = target.itemsize
    axes = [axis for axis in zip(target.shape, target.strides, source.strides) if axis[0] != 1]
    joined = [(itemsize, 1, 1)]  # innermost first, in bytes
    for length, to, of in reversed(axes):
        inner, inner_to, inner_of = joined[-1]
        if (to, of) == (inner * inner_to, inner * inner_of):
            joined[-1] = inner * length, inner_to, inner_of
        else:
            joined.append((length, to, of))
    (together, *_), *outer = joined
    bits = target.data.ptr | source.data.ptr | together
    for _, to, of in outer:
        bits |= to | of
    unit = min(bits & -bits, UNITS[-1])
    inner_axis = [(together // unit, unit, unit)] if together != unit else []
    return unit, [*reversed(outer), *inner_axis]


def in_parts(target: int, source: int, axes: list[Axis]) -> Iterator[Row]:
    """Split a copy until it fits the kernel: along the shortest axis if it has too many axes, otherwise in half."""
    if len(axes) > MANY:
        shortest = axes.index(min(axes))
        length, to, of = axes[shortest]
        for i in range(length):
            yield from in_parts(target + i * to, source + i * of, axes[:shortest] + axes[shortest + 1 :])
    elif _count(axes) > MOST_UNITS:
        longest = axes.index(max(axes))
        length, to, of = axes[longest]
        for start, end in ((0, length // 2), (length // 2, length)):
            some = [*axes[:longest], (end - start, to, of), *axes[longest + 1 :]]
            yield from in_parts(target + start * to, source + start * of, some)
    else:
        yield target, source, axes


def _count(axes: list[Axis]) -> int:
    return prod(length for length, _, _ in axes)


def table_of(kernel: Kernel, rows: list[Row]) -> Any:
    """Return the kernel's ``struct Copies`` as an array of one element."""
    form, nothing = COPY[kernel.axes], [(1, 0, 0)] * kernel.axes
    table = bytearray(form.size * kernel.copies)
    for i, (target, source, own) in enumerate(rows):
        shape, to, of = zip(*nothing[len(own) :], *own)
        form.pack_into(table, i * form.size, target, source, *to, *of, *shape)
    return np.frombuffer(table, f"V{len(table)}")
