"""Tables of nccl.h's numbers for NumPy's dtypes and for reductions."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ..core.reduce_op import ReduceOp
from ..errors import UnsupportedOperationError, on_rank

# nccl.h's ncclDataType_t: NumPy's names in the order of its numbers
NAMES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
UINT8, FLOAT32, FLOAT64, BFLOAT16 = 1, 7, 8, 9
SUM, PROD, MAX, MIN, AVG = range(5)

# The datatype in which NCCL reduces a dtype, and the number of its elements in one element of the dtype.
_REDUCED: dict[Any, tuple[int, int]] = {np.dtype(name): (number, 1) for number, name in enumerate(NAMES)} | {
    np.dtype("bool"): (UINT8, 1),
    np.dtype("complex64"): (FLOAT32, 2),  # real and imaginary parts are summed separately
    np.dtype("complex128"): (FLOAT64, 2),
}

_OPS = {ReduceOp.SUM: SUM, ReduceOp.PRODUCT: PROD, ReduceOp.MIN: MIN, ReduceOp.MAX: MAX, ReduceOp.AVG: AVG}

# On bytes of 0 and 1: with SUM, 256 ones would be 0.
_BOOL_OPS = {ReduceOp.MIN: MIN, ReduceOp.PRODUCT: MIN, ReduceOp.BAND: MIN} | {
    ReduceOp.MAX: MAX, ReduceOp.SUM: MAX, ReduceOp.BOR: MAX,
}  # fmt: skip


class Reduction(NamedTuple):
    """NCCL's datatype of a reduction, the number of its elements in one element of the array, and NCCL's operation."""

    datatype: int
    width: int
    op: int

    def of(self, array: Any) -> tuple[int, int, int]:
        """Return NCCL's count, datatype and operation for an array."""
        return array.size * self.width, self.datatype, self.op


# Results of `moved` and `reduced`: NumPy takes microseconds to name a dtype.
known_moves: dict[Any, tuple[int, int]] = {}
known_reductions: dict[tuple[Any, ReduceOp], Reduction] = {}


def moved(dtype: Any) -> tuple[int, int]:
    """Return the NCCL datatype that moves arrays of `dtype`, and the number of its elements in one of theirs."""
    row = known_moves.get(dtype)
    if row is None:
        row = known_moves[dtype] = _reduced_type(dtype) or (UINT8, dtype.itemsize)
    return row


def moved_array(array: Any) -> tuple[int, int]:
    """Return NCCL's count and datatype to move an array."""
    datatype, width = moved(array.dtype)
    return array.size * width, datatype


def reduced(operation: str, dtype: Any, op: ReduceOp) -> Reduction:
    """Return NCCL's reduction for arrays of `dtype` with `op`; TypeError or UnsupportedOperationError without one."""
    known = known_reductions.get((dtype, op))
    if known is not None:
        return known
    row = _reduced_type(dtype)
    if row is None:
        raise TypeError(
            f"{operation}: NCCL moves {dtype} arrays, but can't reduce them; convert to int32 or a floating-point "
            f"dtype, or let MPI reduce them: init_process_group('cpu:mpi,cuda:mpi'){on_rank()}"
        )
    nccl_op = SUM if op.factor is not None else number_of_op(dtype, op)  # SUM of arrays that have been multiplied
    if nccl_op is None:
        raise UnsupportedOperationError(
            f"NCCL has no {op!r} for {dtype} arrays; MPI has: init_process_group('cpu:mpi,cuda:mpi'){on_rank()}",
            operation,
        )
    made = Reduction(*row, nccl_op)
    is_accepted = ("f" if dtype.kind == "V" else dtype.kind) in op.kinds  # not every caller calls `checks`
    if op.factor is None and is_accepted:  # there may be as many factors as calls
        known_reductions[dtype, op] = made
    return made


def number_of_op(dtype: Any, op: ReduceOp) -> int | None:
    """Return NCCL's operation for an op without a factor; None if it has none for arrays of `dtype`."""
    number = (_BOOL_OPS if dtype.kind == "b" else _OPS).get(op)
    return None if dtype.kind == "c" and number not in (SUM, AVG) else number


def rows() -> dict[Any, tuple[int, int, dict[ReduceOp, int]]]:
    """Return NCCL's datatype, the number of its elements in one of the dtype, and its operations, for each dtype."""
    ml_dtypes = sys.modules.get("ml_dtypes")
    dtypes = [*_REDUCED, *([] if ml_dtypes is None else [np.dtype(ml_dtypes.bfloat16)])]
    found = {}
    for dtype in dtypes:
        kind = "f" if dtype.kind == "V" else dtype.kind
        numbers = {op: number_of_op(dtype, op) for op in {**_OPS, **_BOOL_OPS} if kind in op.kinds}
        ops = {op: number for op, number in numbers.items() if number is not None}
        found[dtype] = *moved(dtype), ops
    return found


def _reduced_type(dtype: Any) -> tuple[int, int] | None:
    if dtype.name == "bfloat16":  # of ml_dtypes
        return BFLOAT16, 1
    return _REDUCED.get(dtype)
