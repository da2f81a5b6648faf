"""What a reduction needs around MPI's: float32 for the half precisions, AVG's division, PREMUL_SUM's product."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.reduce_op import ReduceOp
from .datatypes import DIRECT, arithmetic_type, mpi_op
from .layout import Finish, for_reading, for_writing, is_plain

_wider: dict[Any, Any] = {}


def wider(dtype: Any) -> Any:
    """Return the dtype in which arrays of `dtype` are accumulated: float32 for the half precisions, else itself."""
    if dtype not in _wider:
        _wider[dtype] = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
    return _wider[dtype]


def in_place(array: Any, op: ReduceOp, ranks: int) -> tuple[Any, MPI.Datatype, MPI.Op, Finish]:
    """Return (buffer, datatype, MPI operation, what to do afterwards or None) to reduce `array` in place."""
    direct = DIRECT.get((op, array.dtype))
    if direct is not None and is_plain(array):
        return array, *direct, None
    given = operand(array, op)
    if given is not array:
        return given, *described(given, op), partial(_deliver, array, given, op, ranks)
    return array, *described(array, op), partial(_divide, array, ranks) if op is ReduceOp.AVG else None


def operand(array: Any, op: ReduceOp) -> Any:
    """Return this rank's contribution as a contiguous array that is only read: `array` itself where possible."""
    if op.mpi_op is None and wider(array.dtype) is not array.dtype:
        array = array.astype(wider(array.dtype), order="C")
    if op.factor is not None:
        return np.multiply(array, op.factor, out=np.empty(array.shape, array.dtype), casting="same_kind")
    return for_reading(array)


def receiver(output: Any, op: ReduceOp, ranks: int) -> tuple[Any, Finish]:
    """Return a contiguous array for the reduced values, and the function that copies them to `output` (or None)."""
    if op.mpi_op is None and wider(output.dtype) is not output.dtype:
        wide = np.empty(output.shape, wider(output.dtype))
        return wide, partial(_deliver, output, wide, op, ranks)
    buffer, unpack = for_writing(output)
    if op is ReduceOp.AVG:
        return buffer, partial(_deliver, output, buffer, op, ranks)
    return buffer, unpack


def described(buffer: Any, op: ReduceOp) -> tuple[MPI.Datatype, MPI.Op]:
    """Return MPI's datatype and operation for a buffer made by `operand` or `receiver`."""
    return arithmetic_type(buffer.dtype, op), mpi_op(op, buffer.dtype)


def _deliver(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> None:
    if op is ReduceOp.AVG:
        _divide(buffer, ranks)
    if buffer is not output:
        np.copyto(output, buffer, casting="unsafe")  # float32 to half precision rounds to nearest


def _divide(buffer: Any, ranks: int) -> None:
    np.divide(buffer, ranks, out=buffer)
