"""Exact sums: floating-point numbers as integers at fixed powers of two, which have the same sum in any order.

``(x + M) - M`` with M = 1.5 * 2^k rounds x to a multiple of 2^(k-52), the *grid*. The remainder goes to the next grid,
49 bits below, until it is zero (J. Demmel, H. D. Nguyen: Parallel Reproducible Summation, IEEE Transactions on
Computers 64, 2015; their algorithm stops after some grids). All x + M have the exponent of M, so their bits as integers
are bits(M) + x / 2^(k-52). This file sums these integers, and `rows.py` combines the sums of all grids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import frexp, ldexp
from typing import Any

import numpy as np

from ..errors import DistError, on_rank

CHUNK = 1 << 14  # elements at once: three copies of them stay in the cache
PART = CHUNK // 2  # elements at once with many temporary arrays: small enough for malloc to reuse their memory
SPARE = 3  # bits: the sum of CHUNK elements below 2^(k-1-SPARE) fits in 63 bits
LAST_BIT = -1074  # 2^-1074 is the smallest float64
HUGE = 2.0**1000  # x + M might overflow from here on
SMALLEST = [2.0**LAST_BIT, 0.0]
PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # bits


def largest(values: Any) -> float:
    """Return the largest absolute value of a non-empty array; inf or nan if the array contains one."""
    return max(float(np.maximum.reduce(values, axis=None)), -float(np.minimum.reduce(values, axis=None)))


def grid_sums(values: Any, top: float) -> Iterator[tuple[Any, int]]:
    """Yield pairs (int64 sums, exponent of their unit) that add up to the sum of each row of float64.

    The rows have at most CHUNK columns; `top` is the largest absolute value and finite.
    """
    if top >= HUGE:
        is_huge = np.abs(values) >= HUGE
        scaled = np.where(is_huge, values, 0.0) * 2.0**-128
        yield from ((sums, exponent + 128) for sums, exponent in grid_sums(scaled, top * 2.0**-128))
        values = np.where(is_huge, 0.0, values)
        top = largest(values)
    above = frexp(top)[1]  # all values are below 2^above
    moved, rest = np.empty(values.shape), values
    while top:
        k = max(above + 1 + SPARE, -1022)  # a smaller k would make the grid finer than float64
        magic = ldexp(1.5, k)
        np.add(rest, magic, out=moved)
        sums = np.add.reduce(moved.view(np.int64), axis=-1)
        bits = _wrapped(values.shape[-1] * (((k + 1023) << 52) + (1 << 51)))  # the bits of magic
        yield np.subtract(sums, bits), k - 52  # `-` would warn if a scalar wraps around
        np.subtract(moved, magic, out=moved)
        if not np.not_equal(moved, rest).any():
            return
        rest = np.subtract(rest, moved, out=None if rest is values else rest)
        above = k - 53


def _wrapped(number: int) -> np.int64:
    """Return an integer modulo 2^64, as int64 arithmetic wraps it."""
    return np.int64((number + (1 << 63)) % (1 << 64) - (1 << 63))


def need_subnormals() -> None:
    """Raise DistError if this thread flushes subnormal numbers to 0, because sums would not be exact."""
    if SMALLEST[0] + SMALLEST[1] == 0.0:  # from a list, because Python adds constants when it compiles
        raise DistError(
            "a library has switched this thread to flush subnormal numbers to zero (gcc's -ffast-math does, when it is "
            f"loaded), and sums would not be exact; build it with -mno-daz-ftz, or sum in another thread{on_rank()}"
        )


def contiguous(*arrays: Any) -> Iterator[Sequence[Any]]:
    """Yield 1-D arrays of the same size as float64, in chunks if they have to be converted."""
    if all(each.dtype == np.float64 and each.flags.c_contiguous for each in arrays):
        yield arrays
        return
    for start in range(0, arrays[0].size, CHUNK):
        yield [np.ascontiguousarray(each[start : start + CHUNK], np.float64) for each in arrays]


def count_specials(values: Any) -> tuple[Any, Any, Any]:
    """Return the counts of nan, inf and -inf in each row."""
    masks = np.isnan(values), np.isposinf(values), np.isneginf(values)
    nans, plus, minus = (np.count_nonzero(mask, axis=-1) for mask in masks)
    return nans, plus, minus


def product_with_error(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Return the rounded x * y, its rounding error, and a mask of exact pairs (Dekker and Veltkamp).

    A pair is not exact if a step overflows or loses bits below 2^-1074. It is exact if a factor is 0.
    """
    with np.errstate(all="ignore"):
        product = x * y
        (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
        error = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
    size = np.abs(product)
    is_exact = (size > 2.0**-960) & (size < 2.0**1020) & (np.abs(x) < 2.0**990) & (np.abs(y) < 2.0**990)
    if not is_exact.all():
        is_exact |= ((x == 0) & np.isfinite(y)) | ((y == 0) & np.isfinite(x))
        error[(x == 0) | (y == 0)] = 0.0
    return product, error, is_exact


def _halves(x: Any) -> tuple[Any, Any]:
    """Return two numbers of 26 bits whose sum is x."""
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the parts of a complex number."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
