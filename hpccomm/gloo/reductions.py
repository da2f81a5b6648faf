"""What a reduction needs around gloo's: the dtypes and reductions that it lacks, made of those that it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch.distributed

from ..core.arithmetic import multiplied, truth
from ..core.reduce_op import ReduceOp
from ..core.work import Once
from ..errors import UnsupportedOperationError, here

OPS: Any = torch.distributed.ReduceOp

# The dtypes that gloo reduces, which have bfloat16 too; and wider ones for others, in which every result fits or wraps.
OWN = {np.dtype(code) for code in ("f2", "f4", "f8", "i1", "u1", "i4", "i8")}
WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(code): np.dtype(wide) for code, wide in (("i2", "i4"), ("u2", "i4"), ("u4", "i8"))
}
# Those of which the sums, products and bits are the same in another dtype of the same width.
ALIKE: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype("u8"): np.dtype("i8")}
PARTS: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype("c8"): np.dtype("f4"), np.dtype("c16"): np.dtype("f8")}
LOGICAL = {"SUM": "MAX", "PRODUCT": "MIN", "BAND": "MIN", "BOR": "MAX"}  # of the bytes 0 and 1
SUMS = ("SUM", "AVG", "PREMUL_SUM")

Finish: TypeAlias = "Callable[[], None] | None"


def contribution(operation: str, array: Any, op: ReduceOp, copied: bool = False) -> tuple[Any, Any, Any]:
    """Return (memory, tensor, gloo's reduction) of what this rank contributes; `array` itself where that can be."""
    wide, seen_as, name = plan(operation, array.dtype, op)
    if op.factor is not None:
        array = multiplied(array, op, np.empty(array.shape, array.dtype))
    if array.dtype.kind == "b":
        array = truth(array)
    elif wide != array.dtype:
        array = array.astype(wide, order="C")
    elif copied or not array.flags.carray:
        array = array.copy(order="C")
    return array, as_tensor(array, seen_as), getattr(OPS, name)


def room(operation: str, output: Any, op: ReduceOp) -> tuple[Any, Any]:
    """Return (memory, tensor) for reduced values that go to `output`; `output` itself where that can be."""
    wide, seen_as, _ = plan(operation, output.dtype, op)
    buffer = output if wide == output.dtype and output.flags.carray else np.empty(output.shape, wide)
    return buffer, as_tensor(buffer, seen_as)


def delivery(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> Finish:
    """Return what puts reduced values into `output`, also when it is called again; None where they are there."""
    if buffer is not output:
        return lambda: _deliver(output, buffer, op, ranks)
    return Once(partial(np.divide, output, ranks, output)) if op is ReduceOp.AVG else None


def _deliver(output: Any, buffer: Any, op: ReduceOp, ranks: int) -> None:
    with np.errstate(all="ignore"):
        if op is ReduceOp.AVG:
            np.divide(buffer.reshape(output.shape), ranks, out=output, casting="unsafe")
        else:
            output[...] = buffer.reshape(output.shape)


def plan(operation: str, dtype: np.dtype[Any], op: ReduceOp) -> tuple[np.dtype[Any], np.dtype[Any], str]:
    """Return (the dtype to reduce in, as what gloo sees its memory, the name of gloo's reduction)."""
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
        f"gloo can't reduce {dtype} by {op!r}; 'cpu:mpi' instead of 'cpu:gloo' can{here()}", operation
    )


def as_tensor(array: Any, seen_as: np.dtype[Any]) -> Any:
    """View contiguous memory as a tensor of one dimension."""
    flat = array.reshape(-1)
    if seen_as.name == "bfloat16":  # which torch does not know from NumPy
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(flat.view(seen_as))


def as_bytes(array: Any) -> Any:
    """View contiguous memory as a tensor of bytes: what is only moved may be of any dtype."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
