"""What a reduction needs around MPI's: a wider dtype for some, AVG's division, PREMUL_SUM's product, bytes of bools.

NumPy's warnings of overflow are off in here: MPI does not warn either, and where warnings are errors, one in the middle
of an operation would leave the ranks apart.
"""

from __future__ import annotations

from functools import partial
from operator import setitem
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.reduce_op import ReduceOp
from .datatypes import DIRECT, accumulation_dtype, arithmetic_type, mpi_op
from .layout import Finish, recv_buffer, send_buffer

AVG = ReduceOp.AVG  # a look-up in a class is slow


def in_place(array: Any, op: ReduceOp, ranks: int) -> tuple[Any, MPI.Datatype, MPI.Op, Finish]:
    """Return (buffer, datatype, MPI operation, what to do afterwards) to reduce `array` where it is."""
    direct = DIRECT.get((op, array.dtype))
    if direct is None:  # AVG, a wider dtype, bool, a product first, an operation of the program's own
        buffer = reduction_input(array, op)
        direct = mpi_type_and_op(buffer.dtype, op)
        return (
            buffer,
            *direct,
            None if buffer is array and op is not AVG else partial(_deliver, array, buffer, op, ranks),
        )
    buffer = send_buffer(array)
    return buffer, *direct, None if buffer is array else partial(setitem, array, ..., buffer)


def reduction_input(array: Any, op: ReduceOp) -> Any:
    """Return the contiguous array that a rank contributes: `array` itself where possible, never changed."""
    if op.mpi_op is None:
        if array.dtype.kind == "b":
            return np.not_equal(array.view(np.uint8), 0, out=np.empty(array.shape, bool))
        wide = accumulation_dtype(array.dtype)
        if wide is not array.dtype:
            array = array.astype(wide, order="C")
    if op.factor is not None:
        return multiplied(array, op, np.empty(array.shape, array.dtype))
    return send_buffer(array)


def reduction_output(output: Any, op: ReduceOp, ranks: int) -> tuple[Any, Finish]:
    """Return the contiguous array that MPI writes the reduced values to, and how they get into `output`."""
    if op.mpi_op is None and accumulation_dtype(output.dtype) is not output.dtype:
        wide = np.empty(output.shape, accumulation_dtype(output.dtype))
        return wide, partial(_deliver, output, wide, op, ranks)
    buffer, unpack = recv_buffer(output)
    if op is AVG:
        return buffer, partial(_deliver, output, buffer, op, ranks)
    return buffer, unpack


def mpi_type_and_op(dtype: np.dtype[Any], op: ReduceOp) -> tuple[MPI.Datatype, MPI.Op]:
    """Return MPI's datatype and operation for a buffer made by `reduction_input` or `reduction_output`."""
    return arithmetic_type(dtype, op), mpi_op(op, dtype)


def multiplied(array: Any, op: ReduceOp, out: Any) -> Any:
    """Return PREMUL_SUM's product, in `out`."""
    with np.errstate(all="ignore"):
        return np.multiply(array, op.factor, out=out, casting="same_kind")


def _deliver(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> None:
    if op is AVG:
        np.divide(buffer, ranks, out=buffer)
    if buffer is not output:
        if output.dtype.itemsize == 2 and output.dtype.kind not in "iu":  # a half precision may overflow
            with np.errstate(all="ignore"):
                output[...] = buffer  # rounds to nearest
        else:
            output[...] = buffer
