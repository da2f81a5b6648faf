"""Arithmetic of all host transports before and after a reduction; like the reduction, it never warns."""

from __future__ import annotations

from typing import Any

import numpy as np

from .reduce_op import ReduceOp

# ufuncs by name of the reduction
UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "AVG": np.add,  # divided afterwards
    "PREMUL_SUM": np.add,  # multiplied before
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def multiplied(array: Any, op: ReduceOp, out: Any) -> Any:
    """Multiply `array` by the factor of a PREMUL_SUM, into `out`; return `out`."""
    factor = int(op.factor) if array.dtype.kind in "iu" else op.factor  # NumPy refuses uint8 times int64
    with np.errstate(all="ignore"):
        return np.multiply(array, factor, out=out, casting="same_kind")


def truth(array: Any, out: Any = None) -> Any:
    """Return an array of bools with bytes 0 and 1 only: memory viewed as bools may hold other bytes."""
    return np.not_equal(array.view(np.uint8), 0, out=np.empty(array.shape, bool) if out is None else out)
