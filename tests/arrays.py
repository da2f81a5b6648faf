"""The one list of what arrays the tests use: dtypes, layouts, shapes, values, and NumPy's answers.

Every rank can compute what every other rank contributes, so the expected results never come from the code under test.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

import hpccomm as hc

BOOL = [np.dtype(bool)]
INTEGERS = [np.dtype(code) for code in "bBhHiIqQ"]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [*HALVES, np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.longdouble)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
NUMERIC = [*BOOL, *INTEGERS, *FLOATS, *COMPLEX]
MOVED_ONLY = [
    np.dtype([("id", "i4"), ("position", "f8", (3,))]),
    np.dtype("M8[ns]"),
    np.dtype("m8[s]"),
    np.dtype("S3"),
    np.dtype("U2"),
    np.dtype(ml_dtypes.float8_e4m3fn),
]
ALL_DTYPES = NUMERIC + MOVED_ONLY

SHAPES = [(), (0,), (1,), (5,), (3, 4), (0, 3)]


def dtype_name(dtype: np.dtype[Any]) -> str:
    return "structured" if dtype.names else dtype.name


# -- layouts: the same values, laid out differently --------------------------------------------------


def contiguous(values: Any) -> Any:
    return np.array(values, order="C")


def strided(values: Any) -> Any:
    every_other = (*(slice(None, None, 2) for _ in values.shape), ...)  # "..." keeps 0-d arrays arrays
    spread = np.zeros(tuple(2 * n for n in values.shape), values.dtype)[every_other]
    spread[...] = values
    return spread


def backwards(values: Any) -> Any:
    flipped = (*(slice(None, None, -1) for _ in values.shape), ...)
    return contiguous(values[flipped])[flipped]


def fortran(values: Any) -> Any:
    return np.array(values, order="F")


def unaligned(values: Any) -> Any:
    memory = np.zeros(values.nbytes + 1, np.uint8)[1:]
    shifted = memory[: values.nbytes].view(values.dtype).reshape(values.shape)
    shifted[...] = values
    return shifted


def uneven(values: Any) -> Any:
    """Rows of which each second one begins at no multiple of the element size, although the first does."""
    if not values.ndim:
        return unaligned(values)
    pitch = values[:1].nbytes + max(values.itemsize // 2, 1)
    memory = np.zeros(max(len(values) * pitch, 1), np.uint8)
    rows = np.ndarray(values.shape, values.dtype, memory, 0, (pitch, *contiguous(values).strides[1:]))
    rows[...] = values
    return rows


def uneven_backwards(values: Any) -> Any:
    return uneven(values[::-1])[::-1] if values.ndim else unaligned(values)


LAYOUTS = [contiguous, strided, backwards, fortran, unaligned]


# -- values: small whole numbers, so that sums and products are exact in every dtype and order ------


def values(dtype: np.dtype[Any], shape: tuple[int, ...], rank: int, salt: int = 0) -> Any:
    """What `rank` contributes."""
    random = np.random.default_rng([rank, salt, *shape])
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.kind == "c":
        return (random.integers(1, 3, shape) + 1j * random.integers(-1, 2, shape)).astype(dtype)
    if dtype.kind in "SU":
        return random.integers(10, 99, shape).astype(dtype)
    if dtype.names:
        return np.array(random.integers(0, 99, shape)).astype(dtype)
    return random.integers(1, 4, shape).astype("i8").astype(dtype)


# -- NumPy's answers ---------------------------------------------------------------------------------

FACTOR = 2  # of PREMUL_SUM

REDUCTIONS = {
    "SUM": (hc.ReduceOp.SUM, np.add),
    "AVG": (hc.ReduceOp.AVG, np.add),
    "PRODUCT": (hc.ReduceOp.PRODUCT, np.multiply),
    "MIN": (hc.ReduceOp.MIN, np.minimum),
    "MAX": (hc.ReduceOp.MAX, np.maximum),
    "BAND": (hc.ReduceOp.BAND, np.bitwise_and),
    "BOR": (hc.ReduceOp.BOR, np.bitwise_or),
    "BXOR": (hc.ReduceOp.BXOR, np.bitwise_xor),
    "PREMUL_SUM": (hc.ReduceOp.PREMUL_SUM(FACTOR), np.add),
}


def reductions_of(dtype: np.dtype[Any]) -> list[str]:
    """The reductions that hpccomm promises for a dtype (docs: reductions and dtypes)."""
    if dtype.kind == "b":
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    if dtype.kind in "iu":
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
    if dtype.kind == "c":
        return ["SUM", "AVG", "PRODUCT", "PREMUL_SUM"]
    return ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"]


def reduced(name: str, contributions: list[Any]) -> Any:
    """What `name` makes of the contributions, computed by NumPy (half precisions in float32)."""
    dtype = contributions[0].dtype
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    operands = [np.asarray(each).astype(wide) for each in contributions]
    if name == "PREMUL_SUM":
        operands = [(each * FACTOR).astype(wide) for each in operands]
    result = reduce(REDUCTIONS[name][1], operands)
    if name == "AVG":
        result = result / len(operands)
    return np.asarray(result).astype(wide).astype(dtype)


def assert_same(actual: Any, expected: Any, *case: object) -> None:
    """The same shape, dtype and bits."""
    expected = np.asarray(expected)
    assert actual.shape == expected.shape, case
    assert actual.dtype == expected.dtype, case
    assert np.array_equal(actual.view(np.ndarray), expected), (*case, actual, expected)
