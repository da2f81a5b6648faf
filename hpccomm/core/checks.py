"""The checks of single arguments; `calls` combines them for each operation.

A check of an array returns its device, and a view that backends can trust. Error messages name the operation, the
argument, the given and the expected value, and the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from math import prod
from operator import attrgetter, eq, index, mul
from typing import Any

import numpy as np
from numpy import ndarray  # saves a look-up in every call

from ..errors import UnsupportedOperationError, on_rank
from .annotations import SplitSizes
from .arrays import Array, is_read_only, locate
from .operation_list import OPERATIONS
from .overlap import common
from .reduce_op import ReduceOp, ReduceOpLike, as_reduce_op

_dtype, _size, _writeable = map(attrgetter, ("dtype", "size", "flags.writeable"))
movable: set[np.dtype[Any]] = set()  # dtypes that have passed _check_dtype
_HINTS = {  # if one array was given instead of a list
    "scatter_list": ": list(np.split(array, n))",
    "gather_list": ": list(np.split(array, n))",
    **dict.fromkeys(("output_list", "input_list"), "; for one array there is the _single form"),
}
_SEPARATE = "write [np.empty(3) for _ in range(size)], not [np.empty(3)] * size"
_kinds: dict[Any, str] = {}  # results of _kind_of
_accepted: dict[tuple[Any, np.dtype[Any]], ReduceOp] = {}  # (op as given, dtype) that have passed `reduction`


def integer(what: str, value: Any) -> int:
    """Return `value`, a Python or NumPy integer, as an int; TypeError for bool and float."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return index(value)
        except TypeError:
            pass
    raise TypeError(f"{what} is {value!r}; expected an integer{on_rank()}")


def readable(operation: str, argument: str, array: Array) -> tuple[str, Any]:
    """Return the device and the view of an array that the operation only reads."""
    device, view = ("cpu", array) if type(array) is ndarray else locate(operation, argument, array)
    if device == "cpu" and view.dtype not in movable:
        _check_dtype(operation, argument, view.dtype)
    return device, view


def writable(operation: str, argument: str, array: Array) -> tuple[str, Any]:
    """Return the device and the view of an array that the operation writes."""
    device, view = ("cpu", array) if type(array) is ndarray else locate(operation, argument, array)
    if device == "cpu" and view.dtype not in movable:
        _check_dtype(operation, argument, view.dtype)
    is_writable = view.flags.writeable if device == "cpu" else not is_read_only(array)
    if not is_writable:
        raise ValueError(
            f"{operation}: {argument} is read-only, and the result would be written to it; communicate a copy, such as "
            f"{argument}.copy(){on_rank()}"
        )
    if 0 in getattr(view, "strides", ()):
        _refuse_repeats(operation, argument, view)
    return device, view


def _refuse_repeats(operation: str, argument: str, array: Any) -> None:
    if repeats(array):
        raise ValueError(
            f"{operation}: elements of {argument} share memory (strides {array.strides}), and each would get a result "
            f"of its own; give a copy{on_rank()}"
        )


def repeats(array: Any) -> bool:
    """Return True if several elements of an array share one address, as in the result of `broadcast_to`."""
    return array.size > 1 and any(length > 1 and not stride for length, stride in zip(array.shape, array.strides))


def array_list(operation: str, argument: str, arrays: Sequence[Array], check: Any = writable) -> tuple[str, list[Any]]:
    """Return the device and the views of a list of arrays on one device, of any dtypes."""
    if isinstance(arrays, np.ndarray) or not isinstance(arrays, Sequence):
        hint = _HINTS.get(argument, "") if isinstance(arrays, np.ndarray) else ""
        raise TypeError(
            f"{operation}: {argument} is a {type(arrays).__name__}; expected a list of arrays{hint}{on_rank()}"
        )
    if not arrays:
        raise ValueError(f"{operation}: {argument} is empty{on_rank()}")
    # All at once: there may be thousands of small arrays.
    if set(map(type, arrays)) == {ndarray} and set(map(_dtype, arrays)) <= movable and all(map(_writeable, arrays)):
        return "cpu", list(arrays)
    placed = [check(operation, f"{argument}[{i}]", array) for i, array in enumerate(arrays)]
    devices = {device for device, _ in placed}
    if len(devices) > 1:
        raise ValueError(
            f"{operation}: {argument} has arrays on {' and '.join(sorted(devices))}; one call, one device{on_rank()}"
        )
    return placed[0][0], [view for _, view in placed]


def reductions(operation: str, argument: str, arrays: list[Any], op: ReduceOpLike) -> ReduceOp:
    """Check that `op` can reduce each of `arrays`; return it as a ReduceOp."""
    reduce_op = as_reduce_op(operation, op)
    for dtype in set(map(_dtype, arrays)):
        i = next(i for i, array in enumerate(arrays) if array.dtype == dtype)
        reduction(operation, f"{argument}[{i}]", arrays[i], reduce_op)
    return reduce_op


def one_for_each_rank(
    operation: str, argument: str, arrays: Sequence[Array], ranks: int, check: Any = writable
) -> tuple[str, list[Any]]:
    """Return the device and the views of a list with one array per rank, all on one device and of one dtype."""
    device, views = array_list(operation, argument, arrays, check)
    if len(views) != ranks:
        from ..process.alone import start_more

        raise ValueError(
            f"{operation}: {argument} has {len(views)} array{'s' * (len(views) != 1)}, "
            f"but the group has {ranks} rank{'s' * (ranks != 1)}{start_more()}{on_rank()}"
        )
    for i, view in enumerate(views):
        if view.dtype != views[0].dtype:
            raise TypeError(
                f"{operation}: {argument}[{i}] is {view.dtype}, but {argument}[0] is {views[0].dtype}{on_rank()}"
            )
        if check is writable and 0 in getattr(view, "strides", ()):
            _refuse_repeats(operation, f"{argument}[{i}]", view)
    if check is writable:
        apart(operation, argument, views)
    return device, views


def one_or_more(given: Any) -> Any:
    """Return an iterable object; anything else is one item."""
    return given if np.iterable(given) else (given,)


def apart(operation: str, argument: str, outputs: list[Any], remedy: str = _SEPARATE, columns: int = 0) -> None:
    """Raise if two arrays have common elements: one result would replace the other.

    `columns`: the arrays of several lists of this length, one list after the other.
    """
    if (places := common(outputs)) is not None:
        one, other = (
            f"{argument}[{i // columns}][{i % columns}]" if columns else f"{argument}[{i}]" for i in sorted(places)
        )
        raise ValueError(
            f"{operation}: {one} and {other} share memory, and one result would replace the other; {remedy}{on_rank()}"
        )


def reducible(
    operation: str, argument: str, array: Array, op: ReduceOpLike, check: Any = writable
) -> tuple[str, Any, ReduceOp]:
    """Return the device and the view of an array to be reduced in place, and the op.

    `check` is `readable` if this rank does not write the array.
    """
    if type(array) is ndarray and (check is readable or array.flags.writeable):
        try:
            return "cpu", array, _accepted[op, array.dtype]
        except (KeyError, TypeError):  # a new pair, or an unhashable op
            pass
    device, view = check(operation, argument, array)
    with suppress(KeyError, TypeError):
        return device, view, _accepted[op, view.dtype]
    return device, view, reduction(operation, argument, view, op)


def alike(operation: str, names: str, device: str, array: Any, other_device: str, other: Any) -> None:
    """Raise if two arrays of one call differ in device or dtype."""
    if device != other_device:
        raise ValueError(f"{operation}: {names} are on {device} and {other_device}; one call, one device{on_rank()}")
    if array.dtype != other.dtype:
        raise TypeError(f"{operation}: {names} are {array.dtype} and {other.dtype}; expected the same dtype{on_rank()}")


def multiple(operation: str, large_name: str, large: Any, small_name: str, small: Any, ranks: int) -> None:
    """Raise unless `large` has `ranks` times the elements of `small`."""
    if large.size != ranks * small.size:
        raise ValueError(
            f"{operation}: {large_name} has {large.size} elements; expected {ranks * small.size}, "
            f"{ranks} ranks times the {small.size} of {small_name}{on_rank()}"
        )


def like(operation: str, names: str, device: str, array: Any, other_device: str, other: Any) -> None:
    """Raise if two arrays of one call differ in device, dtype or number of elements."""
    alike(operation, names, device, array, other_device, other)
    if array.size != other.size:
        raise ValueError(
            f"{operation}: {names} have {array.size} and {other.size} elements; expected as many{on_rank()}"
        )


def pairs(
    operation: str, ranks: int, device: str, other_device: str, outputs_name: str, outputs: list[Any],
    inputs_name: str, inputs: list[Any], is_output_larger: bool,
) -> None:  # fmt: skip
    """Raise unless two lists are pairs of equal device and dtype, one with `ranks` times the other's elements."""
    if len(outputs) != len(inputs):
        raise ValueError(
            f"{operation}: there are {len(outputs)} {outputs_name} and {len(inputs)} {inputs_name}; "
            f"expected pairs{on_rank()}"
        )
    large, small = (outputs, inputs) if is_output_larger else (inputs, outputs)
    if (
        device == other_device == "cpu"
        and list(map(_dtype, large)) == list(map(_dtype, small))
        and all(map(eq, map(_size, large), map(mul, map(_size, small), repeat(ranks))))
    ):  # the ordinary case, all at once
        return
    for i, (output, array) in enumerate(zip(outputs, inputs, strict=True)):
        first, second = f"{outputs_name}[{i}]", f"{inputs_name}[{i}]"
        alike(operation, f"{first} and {second}", device, output, other_device, array)
        names = (first, second) if is_output_larger else (second, first)
        multiple(operation, names[0], large[i], names[1], small[i], ranks)


def reduction(operation: str, argument: str, array: Any, op: ReduceOpLike) -> ReduceOp:
    """Check that `op` can reduce `array`; return it as a ReduceOp."""
    given, op = op, as_reduce_op(operation, op)
    kind = _kinds.get(array.dtype) or _kind_of(array.dtype)
    if kind not in op.kinds or _is_half_for_mpi(array.dtype, op):
        raise TypeError(
            f"{operation}: {op!r} is not defined for {argument}'s dtype {array.dtype}{_instead(array, op)}{on_rank()}"
        )
    if op is ReduceOp.REPRODUCIBLE_SUM:
        return _reproducible(operation, argument, array.dtype)
    if op.factor is not None:
        _check_factor(operation, array.dtype, op)
    elif (
        isinstance(given, ReduceOp | str)
        and op.mpi_op is None
        and (array.dtype in movable or (array.dtype.isbuiltin == 1 and array.dtype.isnative))
    ):  # only a few pairs
        _accepted[given, array.dtype] = op
    return op


def _reproducible(operation: str, argument: str, dtype: Any) -> ReduceOp:
    """Return REPRODUCIBLE_SUM, or SUM for integers: their sums do not round."""
    if dtype.kind in "iu":
        return ReduceOp.SUM
    takes = [name for name, spec in OPERATIONS.items() if spec.reduces and not name.endswith(("_coalesced", "_sparse"))]
    if operation not in takes:
        raise UnsupportedOperationError(
            f"{operation}: there is no reproducible sum of this form; call one of {', '.join(takes)}{on_rank()}"
        )
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise TypeError(f"{operation}: REPRODUCIBLE_SUM is not defined for {argument}'s dtype {dtype}{on_rank()}")
    return ReduceOp.REPRODUCIBLE_SUM


def _kind_of(dtype: Any) -> str:
    """Return NumPy's letter for a dtype's kind; "-" if it has no arithmetic."""
    if not hasattr(dtype, "name"):  # another library's dtype
        raise TypeError(f"{dtype} is no dtype of NumPy's or CuPy's: convert the array to one that is{on_rank()}")
    if dtype.name == "bfloat16":  # NumPy's kind is V
        kind = "f"
    elif getattr(dtype, "isbuiltin", 1) == 2:  # ml_dtypes' other types are storage formats
        kind = "-"
    else:
        kind = dtype.kind
    _kinds[dtype] = kind
    return kind


def _is_half_for_mpi(dtype: Any, op: ReduceOp) -> bool:
    """Return True for float16 and bfloat16 with an ``MPI.Op``: MPI has no datatype for them."""
    return op.mpi_op is not None and _kinds[dtype] == "f" and dtype.itemsize == 2


def _instead(array: Any, op: ReduceOp) -> str:
    if array.dtype.name.startswith("float8"):  # NCCL rounds to 8 bits after each addition: 16 + 1 is 16
        return "; it is a format to store and to send, so convert to float16 or float32 first"
    if op is ReduceOp.AVG:
        return "; convert to a floating-point dtype, or use SUM and divide"
    if _is_half_for_mpi(array.dtype, op):
        return "; convert to float32 first"
    if _kinds[array.dtype] in "-V":
        return "; convert to a numeric dtype first"
    return ""


def _check_factor(operation: str, dtype: np.dtype[Any], op: Any) -> None:
    factor_kind = np.asarray(op.factor).dtype.kind
    allowed = {"i": "biu", "u": "biu", "c": "biufc"}.get(dtype.kind, "biuf")
    fits = dtype.kind not in "iu" or (factor_kind in "biu" and np.iinfo(dtype).min <= op.factor <= np.iinfo(dtype).max)
    if np.ndim(op.factor) or factor_kind not in allowed or not fits:
        raise TypeError(
            f"{operation}: the factor {op.factor!r} can't multiply a {dtype} array in its own dtype{on_rank()}"
        )


def _check_dtype(operation: str, argument: str, dtype: Any) -> None:
    if dtype.hasobject:
        raise TypeError(
            f"{operation}: {argument} holds Python objects (dtype {dtype}); "
            f"use the *_object functions, or give it a numeric dtype{on_rank()}"
        )
    # ml_dtypes' own types count as native
    if not dtype.isnative:
        raise TypeError(
            f"{operation}: {argument} has a foreign byte order (dtype {dtype}); "
            f"use {argument}.astype({argument}.dtype.newbyteorder('=')){on_rank()}"
        )
    movable.add(dtype)


def has_splits(split_sizes: SplitSizes) -> bool:
    """Return True if split sizes were given; an empty list counts as none."""
    return split_sizes is not None and (not _has_length(split_sizes) or len(split_sizes) > 0)


def _has_length(given: Any) -> bool:
    return hasattr(given, "__len__") and getattr(given, "shape", None) != ()


def splits(operation: str, argument: str, array: Any, given: SplitSizes, ranks: int) -> list[int]:
    """Return the number of elements of `array` for each rank, from the given numbers of rows."""
    shape = array.shape or (1,)
    row = prod(shape[1:])
    if given is None or not has_splits(given):
        if shape[0] % ranks:
            raise ValueError(
                f"{operation}: {argument} has {shape[0]} rows, which {ranks} ranks can't share equally; "
                f"pass {argument}_split_sizes{on_rank()}"
            )
        return [shape[0] // ranks * row] * ranks
    if not _has_length(given):
        raise TypeError(f"{operation}: {argument}_split_sizes is {given!r}; expected a list of integers{on_rank()}")
    counts = [integer(f"{operation}: an entry of {argument}_split_sizes", count) for count in given]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != shape[0]:
        raise ValueError(
            f"{operation}: {argument}_split_sizes is {counts}; expected {ranks} non-negative numbers "
            f"that add up to the {shape[0]} rows of {argument}{on_rank()}"
        )
    return [count * row for count in counts]


def same_new_array(operation: str, wishes: Sequence[tuple[tuple[int, ...], Any]]) -> None:
    """Raise if ranks ask for arrays of different shapes or dtypes; `wishes` has each rank's, in rank order."""
    for rank, (shape, dtype) in enumerate(wishes):
        if (shape, dtype) != wishes[0]:
            raise ValueError(
                f"{operation}: rank {rank} of the group asks for shape {shape} and dtype {dtype}, but rank 0 "
                f"for {wishes[0][0]} and {wishes[0][1]}; all ranks must ask for the same{on_rank()}"
            )
