"""Preparation and completion of MPI's reductions: wider dtypes, AVG's division, PREMUL_SUM's product, bytes of bools.

NumPy's warnings of overflow are off in here: MPI does not warn either, and where warnings are errors, one in the middle
of an operation would leave the ranks apart.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..core.arithmetic import multiplied, truth
from ..core.reduce_op import ReduceOp
from ..core.work import InPlace
from .datatypes import accumulation_dtype, arithmetic_type, mpi_op
from .layout import Finish, recv_buffer, send_buffer

AVG = ReduceOp.AVG  # a look-up in a class is slow


class Plan(NamedTuple):
    """How MPI makes the reduction of some ReduceOp and dtype."""

    datatype: MPI.Datatype
    op: MPI.Op
    dtype: np.dtype[Any]  # to reduce in
    changes: bool  # whether the values are other than the array's own


_plans: dict[tuple[ReduceOp, np.dtype[Any]], Plan] = {}


def plan(op: ReduceOp, dtype: np.dtype[Any]) -> Plan:
    """Return the reduction that MPI makes of `op` and `dtype`."""
    found = _plans.get((op, dtype))
    if found is None:
        wide = dtype if op.mpi_op is not None else accumulation_dtype(dtype)
        is_bool = dtype.kind == "b" and op.mpi_op is None
        changes = wide is not dtype or op.factor is not None or is_bool
        found = Plan(arithmetic_type(wide, op), mpi_op(op, wide), wide, changes)
        if op.factor is None and op.mpi_op is None:  # there are but a few of these
            _plans[op, dtype] = found
    return found


def in_place(array: Any, op: ReduceOp, ranks: int) -> tuple[Any, Plan, Finish]:
    """Return the buffer in which MPI reduces `array`, how it does, and what is to be done afterwards."""
    how = plan(op, array.dtype)
    buffer = reduction_input(array, op) if how.changes else send_buffer(array)
    if buffer is array:
        return array, how, InPlace(np.divide, array, ranks, array) if op is AVG else None
    return buffer, how, partial(_deliver, array, buffer, op, ranks)


def reduction_input(array: Any, op: ReduceOp) -> Any:
    """Return the contiguous array that a rank contributes: `array` itself where possible, never changed."""
    how = plan(op, array.dtype)
    if not how.changes:
        return send_buffer(array)
    if how.dtype is not array.dtype:
        array = array.astype(how.dtype)
    elif how.dtype.kind == "b":
        return truth(array)
    if op.factor is not None:
        return multiplied(array, op, np.empty(array.shape, array.dtype))
    return send_buffer(array)


def reduction_output(output: Any, op: ReduceOp, ranks: int) -> tuple[Any, Finish]:
    """Return the contiguous array that MPI writes the reduced values to, and how they get into `output`."""
    wide = plan(op, output.dtype).dtype
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
