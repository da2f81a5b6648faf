"""What every transport on the host computes around its reductions, without NumPy's warnings: none of theirs warns."""

from __future__ import annotations

from typing import Any

import numpy as np

from .reduce_op import ReduceOp


def multiplied(array: Any, op: ReduceOp, out: Any) -> Any:
    """Return PREMUL_SUM's product, in `out`."""
    with np.errstate(all="ignore"):
        return np.multiply(array, op.factor, out=out, casting="same_kind")


def truth(array: Any, out: Any = None) -> Any:
    """Return bools whose bytes are 0 or 1: memory that is viewed as bools may hold others."""
    return np.not_equal(array.view(np.uint8), 0, out=np.empty(array.shape, bool) if out is None else out)
