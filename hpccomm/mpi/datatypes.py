"""One table from NumPy's dtypes to MPI's, and one for the reductions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.reduce_op import ReduceOp
from ..native import fastpath

# dtypes that MPI reduces itself. float16 and bfloat16 are reduced in float32 (reductions.py): MPI has no
# bfloat16, and rounds float16 after every addition.
ARITHMETIC: dict[np.dtype[Any], MPI.Datatype] = {
    np.dtype(code): MPI.Datatype.fromcode(code) for code in "?bBhHiIlLqQfdgFDG"
}

# dtypes that are sent as MPI datatypes; all others are sent as bytes.
TYPED = ARITHMETIC | {np.dtype(np.float16): MPI.UINT16_T}

OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,  # divided afterwards
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}

# MPI_C_BOOL has only the logical operations (MPI-4.1 §6.9.2); they give NumPy's results on bools.
BOOL_OPS = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.BXOR: MPI.LXOR,
}


def _keeping_nan(op: ReduceOp, code: str) -> MPI.Op:
    """Return a MIN or MAX of floats that keeps NaN, as in NumPy; MPI does not define the result of its own for NaN."""
    if fastpath is not None:
        return MPI.Op.fromhandle(fastpath.make_op(MPI.__file__, "n" if op is ReduceOp.MIN else "x", code))
    reduce = np.minimum if op is ReduceOp.MIN else np.maximum

    def combine(values: Any, result: Any, _: MPI.Datatype) -> None:
        out = np.frombuffer(result, code)
        with np.errstate(invalid="ignore"):  # NumPy warns of a NaN in a long double
            reduce(np.frombuffer(values, code), out, out=out)

    return MPI.Op.Create(combine, commute=True)


NAN_OPS = {(op, np.dtype(code)): _keeping_nan(op, code) for op in (ReduceOp.MIN, ReduceOp.MAX) for code in "fdg"}

# The largest count that MPI takes in one call: MPI-4 has functions with 64-bit counts, which mpi4py uses by itself;
# before MPI-4, counts and displacements are C ints.
LARGEST_COUNT = 2**63 - 1 if MPI.VERSION >= 4 else 2**31 - 1


# Open MPI's vectorised operations saturate sums of 8- and 16-bit integers from 16 elements on (5.0.11, op/avx). So
# its sums of these are done in 32 bits: the low bits are the result of NumPy and MPICH.
SATURATES = MPI.get_vendor()[0] == "Open MPI"


@functools.cache
def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which arrays of `dtype` are reduced: a wider one for some, otherwise itself."""
    if dtype.name in ("float16", "bfloat16"):
        if fastpath is not None and dtype.name == "bfloat16":
            fastpath.learn_bfloat16(dtype.num)
        return np.dtype(np.float32)
    if SATURATES and dtype.kind in "iu" and dtype.itemsize < 4:
        return np.dtype(np.int32 if dtype.kind == "i" else np.uint32)
    return dtype


# Reductions without preparation: one look-up for the common case, by the ReduceOp or by its name. Bools need
# preparation: bytes other than 0 and 1 are True for NumPy, but MPI would use their values.
DIRECT: dict[tuple[Any, np.dtype[Any]], tuple[MPI.Datatype, MPI.Op]] = {
    (key, dtype): (datatype, NAN_OPS.get((op, dtype), OPS[op]))
    for op in OPS
    for dtype, datatype in ARITHMETIC.items()
    if op is not ReduceOp.AVG and dtype.kind in op.kinds and dtype.kind != "b" and accumulation_dtype(dtype) is dtype
    for key in (op, op.name.lower())
}


def message(array: Any) -> tuple[Any, MPI.Datatype] | tuple[Any, int, MPI.Datatype]:
    """Return the mpi4py buffer of a contiguous array: (memory, datatype), the count follows from the size."""
    datatype = TYPED.get(array.dtype)
    if datatype is None:
        array, datatype = as_bytes(array), MPI.BYTE
    if array.size > LARGEST_COUNT:
        return array, 1, _block(array.size, datatype.handle)
    return array, datatype


@functools.cache
def _block(count: int, handle: int) -> MPI.Datatype:
    """Return a datatype of `count` elements, to send one of it if `count` is too large for MPI."""
    datatype = MPI.Datatype.fromhandle(handle)
    step = min(LARGEST_COUNT, 2**30)
    whole, rest = divmod(count, step)
    rows = datatype.Create_contiguous(step)
    parts = [rows.Create_contiguous(whole), datatype.Create_contiguous(rest)]
    block = MPI.Datatype.Create_struct([1, 1], [0, whole * step * datatype.size], parts)
    for part in (rows, *parts):
        part.Free()
    return block.Commit()


def parts(flat: Any, counts: list[int]) -> tuple[Any, list[int], MPI.Datatype]:
    """Return the mpi4py buffer of a contiguous array with `counts[r]` elements for each rank r, in order."""
    datatype = TYPED.get(flat.dtype)
    if datatype is not None:
        return flat, counts, datatype
    return as_bytes(flat), [count * flat.dtype.itemsize for count in counts], MPI.BYTE


def as_bytes(array: Any) -> Any:
    """View a contiguous array, of any dtype and shape, as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)


def mpi_op(op: ReduceOp, dtype: np.dtype[Any]) -> MPI.Op:
    """Return MPI's operation for `op` on arrays of `dtype`."""
    if op.mpi_op is not None:
        return op.mpi_op
    if dtype.kind == "b":
        return BOOL_OPS[op]
    return NAN_OPS.get((op, dtype)) or OPS.get(op, MPI.SUM)  # PREMUL_SUM has multiplied already
