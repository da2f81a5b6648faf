"""Reductions of values: numbers, arrays and containers of them go in, and the result comes out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from ..core.arrays import locate
from ..core.group import ProcessGroup
from ..core.non_member import Group
from ..core.reduce_op import SUM, ReduceOp, ReduceOpLike, as_reduce_op
from ..errors import on_rank
from .world import member

T = TypeVar("T")
COUNTING = (SUM, ReduceOp.PRODUCT, ReduceOp.AVG, ReduceOp.REPRODUCIBLE_SUM)  # they take Python's bool as 0 or 1


def all_reduced(value: T, op: ReduceOpLike = SUM, group: Group | None = None) -> T:
    """Return `value` reduced over all ranks; every rank gets the same result.

    :func:`all_reduce` works in place on an array, ``all_reduced`` returns a new value. A container costs one operation
    for all its numbers and arrays, not one for each.

    Parameters
    ----------
    value : number, array, or a dict, list or tuple of them
        None stays None. Structure, dtypes and sizes are the same on every rank; keys that are text may be in any order.
        A Python int is an int64, and a Python bool is an int for sums, products and averages: ``all_reduced(flag)``
        counts the ranks with True.
    op : ReduceOp, str or MPI.Op
        As for :func:`all_reduce`. The average of Python ints is a float.
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    as `value`
        Python's numbers, NumPy's scalars and arrays keep their type; arrays are new ones.

    Raises
    ------
    OverflowError
        An int, or its sum or product over as many ranks, can be too large for an int64.
    TypeError
        A leaf is neither a number nor an array.
    UnsupportedOperationError
        The call is inside a coalescing() block.

    Examples
    --------
    >>> hc.all_reduced(0.5)  # on 4 ranks: 2.0
    0.5
    >>> hc.all_reduced({"loss": 2.0, "seen": 10}, "avg")  # a dict of two floats
    {'loss': 2.0, 'seen': 10.0}
    """
    reduction = as_reduce_op("all_reduced", op)
    found = member(group)
    if isinstance(found, ProcessGroup):
        found.dispatcher.refuse_in_block("all_reduced")
    leaves: list[Any] = []
    _collect(value, reduction, max(1, found.size), leaves)
    devices = [locate("all_reduced", "value", leaf)[0] for leaf in leaves]
    for device in sorted(set(devices)):
        arrays = [leaf for leaf, place in zip(leaves, devices) if place == device]
        if len(arrays) > 1 and reduction is not ReduceOp.REPRODUCIBLE_SUM:
            found.all_reduce_coalesced(arrays, reduction)
            continue
        for array in arrays:
            found.all_reduce(array, reduction)
    return _rebuilt(value, iter(leaves))  # type: ignore[no-any-return]


def _collect(value: Any, op: ReduceOp, ranks: int, leaves: list[Any]) -> None:
    """Append a new array for each number and array of `value` to `leaves`."""
    if isinstance(value, dict | list | tuple):
        for each in [value[key] for key in _keys(value)] if isinstance(value, dict) else value:
            _collect(each, op, ranks, leaves)
    elif isinstance(value, bool | int):
        # The product of 64 twos is too large.
        counts = op in COUNTING or op.factor is not None
        bound = abs(value) ** min(ranks, 64) if op is ReduceOp.PRODUCT else value * (ranks if counts else 1)
        bound *= max(1, abs(op.factor or 1))
        if not -(1 << 63) <= bound < 1 << 63:
            raise OverflowError(f"all_reduced: {value} is too large for an int64; give a float{on_rank()}")
        is_flag = isinstance(value, bool) and not counts
        leaves.append(np.array([value], float if op is ReduceOp.AVG else bool if is_flag else np.int64))
    elif isinstance(value, float | complex | np.generic):
        leaves.append(np.array([value]))
    elif hasattr(value, "dtype") and (copied := getattr(value, "copy", None) or getattr(value, "clone", None)):
        leaves.append(copied())
    elif value is not None:
        raise TypeError(f"all_reduced: {value!r} is neither a number nor an array; convert it first{on_rank()}")


def _keys(value: dict[Any, Any]) -> list[Any]:
    """Return the keys; sorted if they are text, because ranks may have inserted them in different orders."""
    return sorted(value) if all(isinstance(key, str) for key in value) else list(value)


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """Return `value` with the reduced leaves."""
    if isinstance(value, dict):
        result = copy.copy(value)  # also of a defaultdict
        for key in _keys(value):  # update() of a Counter would add
            result[key] = _rebuilt(value[key], leaves)
        return result
    if isinstance(value, list | tuple):
        each = [_rebuilt(one, leaves) for one in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    leaf: Any = None if value is None else next(leaves)
    if isinstance(value, np.generic):
        return leaf[0]
    return leaf.item() if isinstance(value, bool | int | float | complex) else leaf
