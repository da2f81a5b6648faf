"""Preparation and completion of MPI's reductions: wider dtypes, AVG's division, PREMUL_SUM's product, bytes of bools.

NumPy's warnings of overflow are off in here: MPI does not warn either, and where warnings are errors, one in the middle
of an operation would leave the ranks apart.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..core.reduce_op import ReduceOp
from ..core.work import InPlace
from .datatypes import accumulation_dtype, arithmetic_type, mpi_op
from .layout import Finish, recv_buffer, send_buffer

AVG = ReduceOp.AVG  # a look-up in a class is slow

# (MPI's datatype, MPI's operation, the dtype to reduce in, whether the values are other than the array's own)
Plan: TypeAlias = "tuple[MPI.Datatype, MPI.Op, np.dtype[Any], bool]"
_plans: dict[tuple[ReduceOp, np.dtype[Any]], Plan] = {}


def plan(op: ReduceOp, dtype: np.dtype[Any]) -> Plan:
    """Return the reduction that MPI makes of `op` and `dtype`."""
    found = _plans.get((op, dtype))
    if found is None:
        wide = dtype if op.mpi_op is not None else accumulation_dtype(dtype)
        is_bool = dtype.kind == "b" and op.mpi_op is None
        changes = wide is not dtype or op.factor is not None or is_bool
        found = arithmetic_type(wide, op), mpi_op(op, wide), wide, changes
        if op.factor is None and op.mpi_op is None:  # there are but a few of these
            _plans[op, dtype] = found
    return found


def in_place(array: Any, op: ReduceOp, ranks: int) -> tuple[Any, MPI.Datatype, MPI.Op, Finish]:
    """Return (buffer, datatype, MPI operation, what to do afterwards or None) to reduce `array` in place."""
    datatype, operation, _, changes = plan(op, array.dtype)
    buffer = reduction_input(array, op) if changes else send_buffer(array)
    if buffer is array:
        return array, datatype, operation, InPlace(np.divide, array, ranks, array) if op is AVG else None
    return buffer, datatype, operation, partial(_deliver, array, buffer, op, ranks)


def reduction_input(array: Any, op: ReduceOp) -> Any:
    """Return the contiguous array that a rank contributes: `array` itself where possible, never changed."""
    _, _, wide, changes = plan(op, array.dtype)
    if not changes:
        return send_buffer(array)
    if wide is not array.dtype:
        array = array.astype(wide)
    elif wide.kind == "b":
        return np.not_equal(array.view(np.uint8), 0, out=np.empty(array.shape, bool))
    if op.factor is not None:
        return multiplied(array, op, np.empty(array.shape, array.dtype))
    return send_buffer(array)


def reduction_output(output: Any, op: ReduceOp, ranks: int) -> tuple[Any, Finish]:
    """Return the contiguous array that MPI writes the reduced values to, and how they get into `output`."""
    _, _, wide, _ = plan(op, output.dtype)
    if wide is not output.dtype:
        buffer = np.empty(output.shape, wide)
    else:
        buffer, unpack = recv_buffer(output)
        if op is not AVG:
            return buffer, unpack
        if buffer is output:
            return buffer, InPlace(np.divide, buffer, ranks, buffer)
    return buffer, partial(_deliver, output, buffer, op, ranks)


def mpi_type_and_op(dtype: np.dtype[Any], op: ReduceOp) -> tuple[MPI.Datatype, MPI.Op]:
    """Return MPI's datatype and operation for a buffer made by `reduction_input` or `reduction_output`."""
    return arithmetic_type(dtype, op), mpi_op(op, dtype)


def multiplied(array: Any, op: ReduceOp, out: Any) -> Any:
    """Return PREMUL_SUM's product, in `out`."""
    with np.errstate(all="ignore"):
        return np.multiply(array, op.factor, out=out, casting="same_kind")


def _deliver(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> None:
    """Put the reduced values into `output`; the buffer stays as it is, so that this may be done again."""
    if op is AVG:
        with np.errstate(all="ignore"):
            np.divide(buffer, ranks, out=output, casting="unsafe")
    elif output.dtype.itemsize == 2 and output.dtype is not buffer.dtype:  # a half precision may overflow
        with np.errstate(all="ignore"):
            output[...] = buffer  # rounds to nearest
    else:
        output[...] = buffer
