"""Sums that have the same bits on any number of ranks, for any distribution of the numbers.

Numbers are added as integers without rounding, and the sum is rounded once (`exact/sums.py`). So every result is the
floating-point number closest to the exact one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api.collectives import all_reduce
from ..api.world import member
from ..core import checks
from ..core.group import ProcessGroup
from ..core.late import ON_THE_HOST, late
from ..core.reduce_op import ReduceOp
from ..errors import UnsupportedOperationError, on_rank
from .rows import ANY_PRODUCTS, ANYTHING, NOTHING, Bits, ExactRows, bits_of
from .sums import PRECISION, real_dtype

if TYPE_CHECKING:
    from ..core.annotations import Array, Integer
    from ..core.non_member import Group


def reproducible_sum(array: Array, axis: Integer | Sequence[Integer] | None = None, group: Group | None = None) -> Any:
    """Sum all elements of all ranks' arrays, with the same bits on any number of ranks, in any order, with any MPI.

    Parameters
    ----------
    array : array
        An array of any layout. Its dtype is the same on all ranks. If `axis` is None, its shape may differ, and it may
        be empty. A GPU array is copied to the host and added there.
    axis : int or tuple of int, optional
        The axes of the local arrays to sum over, besides the ranks; ``()`` sums over the ranks only. The remaining
        shape is the same on all ranks. Default: all axes.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    numpy scalar or numpy.ndarray
        The number closest to the exact sum, on every rank, on the host, in the dtype of `array`: an array of the
        remaining axes, or a scalar if there are none. For integers and bool it is NumPy's sum in int64 or uint64, which
        wraps around.

    Raises
    ------
    TypeError
        There is no exact sum for the dtype of `array` (longdouble, datetimes ...), or `array` is not an array.
    ValueError
        `array` has no such axis; or the ranks' arrays differ in remaining shape or in dtype (on all ranks).
    UnsupportedOperationError
        `array` is neither on the host nor on a GPU, or the call is inside a coalescing() block.

    Notes
    -----
    nan, or inf and -inf together, give nan. A sum beyond the largest number is inf, but partial sums may be beyond it.
    A sum of 0 is +0.0. The ranks first compare dtypes and, with `axis`, agree on the range of exponents, in a message.

    Examples
    --------
    >>> x = np.array([1e100, 1.0, -1e100]) if hc.get_rank() == 0 else np.zeros(0)
    >>> float(hc.reproducible_sum(x)), float(np.sum([1e100, 1.0, -1e100]))
    (1.0, 0.0)
    >>> y = np.full((1000, 2), 0.1) if hc.get_rank() == 0 else np.zeros((0, 2))
    >>> hc.reproducible_sum(y, axis=0)
    array([100., 100.])
    """
    name = "reproducible_sum"
    values = _host(name, "array", array)
    axes = _axes(name, axis, values.ndim)
    if not (ranks := _ranks(name, group)):
        return None
    if len(axes) < values.ndim:
        return _sum_over_axes(name, values, axes, group, ranks)
    _agreed(name, [NOTHING], None, values.dtype, group)
    if values.dtype.kind in "biu":
        return _over_ranks(np.asarray(values.sum()), group)[()]
    sums = []
    for part in _real_parts(values):
        sums.append(ExactRows(1, ANYTHING, ranks))
        sums[-1].add(part.ravel("K")[None])
    return _rounded(sums, values.dtype, group)


def reproducible_dot(x: Array, y: Array, group: Group | None = None) -> Any:
    """Sum the products of all elements of all ranks' `x` and `y`, with the same bits on any number of ranks.

    Parameters
    ----------
    x, y : array
        Arrays of the same shape and dtype. Other ranks' arrays may have another shape. Complex numbers are not
        conjugated: ``reproducible_dot(x.conj(), y)`` is NumPy's vdot.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    numpy scalar
        The number closest to the exact sum of the exact products, in the dtype of `x`, on every rank. For integers and
        bool it is an int64 or uint64, which wraps around.

    Raises
    ------
    TypeError
        As for :func:`reproducible_sum`, or the dtypes differ.
    ValueError
        The shapes differ.
    UnsupportedOperationError
        As for :func:`reproducible_sum`.

    Notes
    -----
    Products outside 1e-289 to 1e+307 are computed in Python, which takes 1 us for each.

    Examples
    --------
    >>> x = np.array([1e200, 1.0, -1e200]) if hc.get_rank() == 0 else np.zeros(0)
    >>> float(hc.reproducible_dot(x, np.full(x.size, 1e200)))  # the products are too large for float64
    1e+200
    """
    name = "reproducible_dot"
    a, b = _host(name, "x", x), _host(name, "y", y)
    checks.alike(name, "x and y", "cpu", a, "cpu", b)
    if a.shape != b.shape:
        raise ValueError(f"{name}: x and y have the shapes {a.shape} and {b.shape}; expected the same{on_rank()}")
    if not (ranks := _ranks(name, group)):
        return None
    _agreed(name, [NOTHING], None, a.dtype, group)
    if a.dtype.kind in "biu":
        wide = np.dtype(np.uint64 if a.dtype.kind == "u" else np.int64)
        return _over_ranks(np.asarray((a.astype(wide) * b.astype(wide)).sum()), group)[()]
    left, right = ([part.ravel() for part in _real_parts(each)] for each in (a, b))
    sums = [ExactRows(1, ANY_PRODUCTS, ranks) for _ in left]
    sums[0].add_products(left[0], right[0])
    if len(sums) == 2:
        sums[0].add_products(left[1], right[1], is_subtracted=True)
        sums[1].add_products(left[0], right[1])
        sums[1].add_products(left[1], right[0])
    return _rounded(sums, a.dtype, group)


def reproducible_norm(x: Array, group: Group | None = None) -> Any:
    """Return the Euclidean norm of all elements of all ranks' `x`, with the same bits on any number of ranks.

    Parameters
    ----------
    x : array
        An array of any shape, which may differ between ranks. Its dtype is the same on all ranks. Integers and bool are
        converted to float64.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    numpy scalar
        The number closest to the exact root of the exact sum, on every rank, in the dtype of `x` (for complex numbers,
        the dtype of their parts). Squares may be too large or too small for the dtype.

    Raises
    ------
    TypeError, UnsupportedOperationError
        As for :func:`reproducible_sum`.

    Examples
    --------
    >>> x = np.array([3e300, 4e300]) if hc.get_rank() == 0 else np.zeros(0)
    >>> float(hc.reproducible_norm(x))
    5e+300
    """
    name = "reproducible_norm"
    values = _host(name, "x", x)
    if not (ranks := _ranks(name, group)):
        return None
    _agreed(name, [NOTHING], None, values.dtype, group)
    if values.dtype.kind in "biu":
        values = values.astype(np.float64)
    total = ExactRows(1, ANY_PRODUCTS, ranks)
    for part in _real_parts(values):
        flat = part.ravel("K")
        total.add_products(flat, flat)
    return _rounded([total], real_dtype(values.dtype), group, of_roots=True)


def _host(operation: str, argument: str, array: Array) -> Any:
    device, view = checks.readable(operation, argument, array)
    if device not in ("cpu", "cuda", "rocm"):
        raise UnsupportedOperationError(f"{operation}: {argument} is on {device}; copy it to the host first{on_rank()}")
    if view.dtype.kind not in "biu" and real_dtype(view.dtype).name not in PRECISION:
        raise TypeError(
            f"{operation}: {argument} is {view.dtype}; expected float64 or less, complex, integers or bool{on_rank()}"
        )
    return view if device == "cpu" else late(ON_THE_HOST)(view)


def _ranks(operation: str, group: Group | None) -> int:
    """Return the number of ranks; outside the group, warn and return 0. Raise inside a coalescing() block."""
    members = member(group)
    if isinstance(members, ProcessGroup):
        members.dispatcher.refuse_in_block(operation)
        return members.size
    members.warn(operation)
    return 0


def _axes(operation: str, axis: Integer | Sequence[Integer] | None, dimensions: int) -> tuple[int, ...]:
    """Return the axes as sorted, non-negative numbers."""
    if axis is None:
        return tuple(range(dimensions))
    given = [checks.integer(f"{operation}: axis", each) for each in checks.one_or_more(axis)]
    axes = {each % dimensions for each in given if -dimensions <= each < dimensions}
    if len(axes) < len(given):
        raise ValueError(
            f"{operation}: axis is {axis!r}; expected different axes of the {dimensions} of array{on_rank()}"
        )
    return tuple(sorted(axes))


def _real_parts(values: Any) -> list[Any]:
    return [values.real, values.imag] if values.dtype.kind == "c" else [values]


def _over_ranks(integers: Any, group: Group | None) -> Any:
    all_reduce(integers, group=group)
    return integers


def _rounded(sums: Sequence[ExactRows], dtype: np.dtype[Any], group: Group | None, of_roots: bool = False) -> Any:
    """Add all ranks' `sums`, one for each part of a number of `dtype`, in one message; return the rounded number."""
    flat = _over_ranks(np.concatenate([each.memory for each in sums], axis=None), group)
    for each, memory in zip(sums, flat.reshape(len(sums), *sums[0].memory.shape)):
        each.memory[...] = memory
    return np.concatenate([each.rounded(real_dtype(dtype), of_roots) for each in sums]).view(dtype)[0]


def _sum_over_axes(operation: str, values: Any, axes: tuple[int, ...], group: Group | None, ranks: int) -> Any:
    kept = [i for i in range(values.ndim) if i not in axes]
    shape = tuple(values.shape[i] for i in kept)
    if values.dtype.kind in "biu":
        _agreed(operation, [NOTHING], shape, values.dtype, group)
        return _over_ranks(values.sum(axis=axes), group)
    if not axes:
        _agreed(operation, [NOTHING], shape, values.dtype, group)
        result = values.copy()
        all_reduce(result, ReduceOp.REPRODUCIBLE_SUM, group)
        return result
    columns = prod(values.shape[i] for i in axes)
    parts = [part.transpose(*kept, *axes).reshape(prod(shape), columns) for part in _real_parts(values)]
    bits = _agreed(operation, [bits_of(part) for part in parts], shape, values.dtype, group)
    result = np.empty(shape, values.dtype)
    for out, part in zip(_real_parts(result), parts):
        rows = ExactRows(len(part), bits, ranks)
        rows.add(part)
        _over_ranks(rows.memory, group)
        out[...] = rows.rounded(out.dtype).reshape(shape)
    return result


def _agreed(
    operation: str, bits: list[Bits], shape: tuple[int, ...] | None, dtype: np.dtype[Any], group: Group | None
) -> Bits:
    """Return the largest `bits` of all ranks; raise ValueError if dtype or shape (None: any) differ between ranks."""
    code = zlib.crc32(f"{shape} {dtype}".encode())
    message = np.array([*np.max(bits, axis=0), code, -code], np.int64)
    all_reduce(message, "max", group)
    first, second, has_specials, largest, smallest = message.tolist()
    if largest != -smallest:
        rest = f"what remains of array is {dtype} of the shape {shape} here, but has another shape or dtype"
        rest = f"the dtype is {dtype} here, but another" if shape is None else rest
        raise ValueError(f"{operation}: {rest} on another rank{on_rank()}")
    return first, second, has_specials
