"""Prepare and complete gloo's reductions; map missing dtypes and reductions to those that gloo has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch.distributed

from ..core.arithmetic import multiplied, truth
from ..core.reduce_op import ReduceOp
from ..core.work import Once
from ..errors import UnsupportedOperationError, on_rank

OPS: Any = torch.distributed.ReduceOp

# The dtypes that gloo reduces, besides bfloat16; and wider dtypes for others, in which every result fits or wraps.
OWN = {np.dtype(code) for code in ("f2", "f4", "f8", "i1", "u1", "i4", "i8")}
WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(code): np.dtype(wide) for code, wide in (("i2", "i4"), ("u2", "i4"), ("u4", "i8"))
}
# Dtypes that have the same sums, products and bits as another dtype of the same width.
ALIKE: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype("u8"): np.dtype("i8")}
PARTS: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype("c8"): np.dtype("f4"), np.dtype("c16"): np.dtype("f8")}
LOGICAL = {"SUM": "MAX", "PRODUCT": "MIN", "BAND": "MIN", "BOR": "MAX"}  # for the bytes 0 and 1
SUMS = ("SUM", "AVG", "PREMUL_SUM")

Finish: TypeAlias = "Callable[[], None] | None"


def send_tensor(operation: str, array: Any, op: ReduceOp, copied: bool = False) -> tuple[Any, Any, Any]:
    """Return (memory, tensor, gloo's reduction) for this rank's input; the memory is `array` itself if possible."""
    wide, viewed_as, name = gloo_reduction(operation, array.dtype, op)
    if op.factor is not None:
        array = multiplied(array, op, np.empty(array.shape, array.dtype))
    if array.dtype.kind == "b":
        array = truth(array)
    elif wide != array.dtype:
        array = array.astype(wide, order="C")
    elif copied or not array.flags.carray:
        array = array.copy(order="C")
    return array, as_tensor(array, viewed_as), getattr(OPS, name)


def recv_tensor(operation: str, output: Any, op: ReduceOp) -> tuple[Any, Any]:
    """Return (memory, tensor) for gloo's result; the memory is `output` itself if possible."""
    wide, viewed_as, _ = gloo_reduction(operation, output.dtype, op)
    buffer = output if wide == output.dtype and output.flags.carray else np.empty(output.shape, wide)
    return buffer, as_tensor(buffer, viewed_as)


def unpacking(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> Finish:
    """Return a repeatable function that copies gloo's result to `output` and divides it for AVG; None if not needed."""
    if buffer is not output:
        return lambda: _unpack(output, buffer, op, ranks)
    return Once(partial(np.divide, output, ranks, output)) if op is ReduceOp.AVG else None


def _unpack(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> None:
    with np.errstate(all="ignore"):
        if op is ReduceOp.AVG:
            np.divide(buffer.reshape(output.shape), ranks, out=output, casting="unsafe")
        else:
            output[...] = buffer.reshape(output.shape)


def gloo_reduction(operation: str, dtype: np.dtype[Any], op: ReduceOp) -> tuple[np.dtype[Any], np.dtype[Any], str]:
    """Return the dtype to reduce in, the dtype of gloo's view of it, and the name of gloo's reduction."""
    name = "SUM" if op.name in SUMS else op.name
    if op.mpi_op is None:
        if dtype.kind == "b":
            return dtype, np.dtype("u1"), LOGICAL.get(name, name)
        if dtype in OWN or dtype.name == "bfloat16":
            return dtype, dtype, name
        if dtype in WIDER:
            return WIDER[dtype], WIDER[dtype], name
        if dtype in ALIKE and name not in ("MIN", "MAX"):
            return dtype, ALIKE[dtype], name
        if dtype in PARTS and name == "SUM":
            return dtype, PARTS[dtype], name
    raise UnsupportedOperationError(
        f"gloo can't reduce {dtype} by {op!r}; 'cpu:mpi' instead of 'cpu:gloo' can{on_rank()}", operation
    )


def as_tensor(array: Any, viewed_as: np.dtype[Any]) -> Any:
    """Return a view of contiguous memory as a 1-D tensor."""
    flat = array.reshape(-1)
    if viewed_as.name == "bfloat16":  # torch does not accept it from NumPy
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(flat.view(viewed_as))


def as_bytes(array: Any) -> Any:
    """Return a view of contiguous memory as a tensor of bytes."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
