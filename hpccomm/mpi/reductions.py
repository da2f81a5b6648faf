"""Preparation and completion of MPI's reductions: wider dtypes, AVG's division, PREMUL_SUM's product, bytes of bools.

Overflow warnings of NumPy are off: MPI does not warn either, and a warning turned into an error would stop one rank.
"""

from __future__ import annotations

from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..core.reduce_op import ReduceOp
from ..core.work import InPlace
from .datatypes import ARITHMETIC, accumulation_dtype, mpi_op
from .layout import Finish, recv_buffer, send_buffer

AVG = ReduceOp.AVG  # a look-up in a class is slow


class Plan(NamedTuple):
    """The reduction that MPI makes for a ReduceOp and a dtype."""

    datatype: MPI.Datatype
    op: MPI.Op
    dtype: np.dtype[Any]  # of the arrays that MPI reduces
    changes: bool  # whether those have other values or another dtype than the program's arrays
    reduces: ReduceOp | None  # the op that reduces their values; None: only MPI knows it


_plans: dict[tuple[ReduceOp, np.dtype[Any]], Plan] = {}


def plan(op: ReduceOp, dtype: np.dtype[Any]) -> Plan:
    """Return MPI's reduction for `op` on arrays of `dtype`."""
    found = _plans.get((op, dtype))
    if found is None:
        wide = dtype if op.mpi_op is not None else accumulation_dtype(dtype)
        is_bool = dtype.kind == "b" and op.mpi_op is None
        changes = wide is not dtype or op.factor is not None or is_bool
        reduces = (
            None if is_bool or op.mpi_op is not None else ReduceOp.SUM if op is AVG or op.factor is not None else op
        )
        found = Plan(ARITHMETIC[wide], mpi_op(op, wide), wide, changes, reduces)
        if op.factor is None and op.mpi_op is None:  # a program may make any number of other ops
            _plans[op, dtype] = found
    return found


def narrow(array: Any) -> tuple[Any, Finish]:
    """Return the buffer in which memory of the node reduces a half precision in place, and the step afterwards."""
    buffer = send_buffer(array)
    return buffer, None if buffer is array else partial(setitem, array, ..., buffer)


def in_place(array: Any, op: ReduceOp, ranks: int) -> tuple[Any, Plan, Finish]:
    """Return the buffer in which MPI reduces `array`, its plan, and the step that completes `array` afterwards."""
    how = plan(op, array.dtype)
    buffer = reduction_input(array, op) if how.changes else send_buffer(array)
    if buffer is array:
        return array, how, InPlace(np.divide, array, array.dtype.type(ranks), array) if op is AVG else None
    return buffer, how, partial(_deliver, array, buffer, op, ranks)


def reduction_input(array: Any, op: ReduceOp, out: Any = None) -> Any:
    """Return the contiguous array that a rank contributes: `out`, if given; otherwise `array` itself where possible."""
    how = plan(op, array.dtype)
    if out is None:
        if not how.changes:
            return send_buffer(array)
        out = np.empty(array.shape, how.dtype)
    if how.changes and how.dtype.kind == "b":
        from ..core.arithmetic import truth

        return truth(array, out)
    if op.factor is not None:
        from ..core.arithmetic import multiplied

        return multiplied(array.astype(how.dtype, copy=False), op, out)
    out[...] = array  # to a wider dtype, exactly
    return out


def reduction_output(output: Any, op: ReduceOp, ranks: int) -> tuple[Any, Finish]:
    """Return the contiguous array that MPI writes to, and the step that puts the result into `output`."""
    wide = plan(op, output.dtype).dtype
    if wide is not output.dtype:
        buffer = np.empty(output.shape, wide)
    else:
        buffer, unpack = recv_buffer(output)
        if op is not AVG:
            return buffer, unpack
        if buffer is output:
            return buffer, InPlace(np.divide, buffer, buffer.dtype.type(ranks), buffer)
    return buffer, partial(_deliver, output, buffer, op, ranks)


def _deliver(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> None:
    """Put the reduced values into `output`. It may be called again: the buffer stays as it is."""
    if op is AVG:
        with np.errstate(all="ignore"):
            np.divide(buffer, ranks, out=output, casting="unsafe")
    elif output.dtype.itemsize == 2 and output.dtype is not buffer.dtype:  # a half precision may overflow
        with np.errstate(all="ignore"):
            output[...] = buffer  # rounds to nearest
    else:
        output[...] = buffer
