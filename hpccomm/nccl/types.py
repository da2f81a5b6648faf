"""One table for the dtypes and one for the reductions: what NumPy calls them, and nccl.h's numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.reduce_op import ReduceOp
from ..errors import UnsupportedOperationError, here

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
SUM, PROD, MAX, MIN, AVG = range(5)

# What NCCL reduces: its type, and how many of its elements one of NumPy's is.
_REDUCED: dict[Any, tuple[int, int]] = {
    np.dtype(name): row
    for name, row in {
        "bool": (UINT8, 1),
        "int8": (INT8, 1),
        "uint8": (UINT8, 1),
        "int32": (INT32, 1),
        "uint32": (UINT32, 1),
        "int64": (INT64, 1),
        "uint64": (UINT64, 1),
        "float16": (FLOAT16, 1),
        "float32": (FLOAT32, 1),
        "float64": (FLOAT64, 1),
        "complex64": (FLOAT32, 2),  # its two parts are summed apart
        "complex128": (FLOAT64, 2),
    }.items()
}

_OPS = {
    ReduceOp.SUM: SUM,
    ReduceOp.PRODUCT: PROD,
    ReduceOp.MIN: MIN,
    ReduceOp.MAX: MAX,
    ReduceOp.AVG: AVG,
}

# On bytes of 0 and 1, so that the sum of 256 is not 0.
_BOOL_OPS = {
    ReduceOp.SUM: MAX,
    ReduceOp.PRODUCT: MIN,
    ReduceOp.MIN: MIN,
    ReduceOp.MAX: MAX,
    ReduceOp.BAND: MIN,
    ReduceOp.BOR: MAX,
}


class Reduction(NamedTuple):
    """How NCCL reduces an array: NCCL's type, how many of its elements make one of the array's, NCCL's operation."""

    datatype: int
    width: int
    op: int


_moved: dict[Any, tuple[int, int]] = {}
_reductions: dict[tuple[Any, ReduceOp], Reduction] = {}  # NumPy takes microseconds to name a dtype


def moved(dtype: Any) -> tuple[int, int]:
    """Return the NCCL type in which arrays of `dtype` travel, and how many NCCL elements make one of theirs."""
    row = _moved.get(dtype)
    if row is None:
        row = _moved[dtype] = _reduced_type(dtype) or (UINT8, dtype.itemsize)
    return row


def reduced(operation: str, dtype: Any, op: ReduceOp) -> Reduction:
    """Return NCCL's reduction for arrays of `dtype` with `op`.

    Raises
    ------
    TypeError
        NCCL has no such type.
    UnsupportedOperationError
        It has no such operation.
    """
    known = _reductions.get((dtype, op))
    if known is not None:
        return known
    row = _reduced_type(dtype)
    if row is None:
        raise TypeError(
            f"{operation}: NCCL moves {dtype} arrays, but can't reduce them; convert to int32 or a floating-point "
            f"dtype, or let MPI reduce them: init_process_group('cpu:mpi,cuda:mpi'){here()}"
        )
    if dtype.kind == "b":
        nccl_op = _BOOL_OPS.get(op)
    elif op.factor is not None:
        nccl_op = SUM  # of arrays that have been multiplied
    else:
        nccl_op = _OPS.get(op)
    if nccl_op is None or (dtype.kind == "c" and nccl_op not in (SUM, AVG)):
        raise UnsupportedOperationError(
            f"NCCL has no {op!r} for {dtype} arrays; MPI has: init_process_group('cpu:mpi,cuda:mpi'){here()}", operation
        )
    made = Reduction(*row, nccl_op)
    if op.factor is None:  # there may be as many factors as calls
        _reductions[dtype, op] = made
    return made


def _reduced_type(dtype: Any) -> tuple[int, int] | None:
    if dtype.name == "bfloat16":  # of ml_dtypes
        return BFLOAT16, 1
    return _REDUCED.get(dtype)
