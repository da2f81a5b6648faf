"""all_reduce of the sparse matrices of scipy and cupyx, whose patterns may differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import here
from .arrays import locate
from .reduce_op import ReduceOp, ReduceOpLike, as_reduce_op
from .work import Work

if TYPE_CHECKING:
    from .operations import Operations


def all_reduce(group: Operations, matrix: Any, op: ReduceOpLike, async_op: bool) -> Work | None:
    """Sum `matrix` over the ranks, in place: everybody's entries are gathered and added in rank order.

    On the host every rank adds the same numbers in the same order, so all end with bitwise the same matrix; the order
    on GPUs is CuPy's. With `async_op` the exchange of the entry counts still waits for the other ranks.
    """
    if as_reduce_op("all_reduce", op) is not ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse matrices can only be summed, not reduced with {op!r}{here()}")
    if matrix.format not in ("csr", "csc", "coo"):
        raise TypeError(
            f"all_reduce: the sparse format {matrix.format!r} can't be reduced in place; "
            f"use .tocsr(), .tocsc() or .tocoo(){here()}"
        )
    if matrix.ndim != 2:
        raise ValueError(f"all_reduce: the sparse array has {matrix.ndim} dimension(s); expected 2{here()}")
    if matrix.dtype.kind not in "biufc":
        raise TypeError(f"all_reduce: SUM is not defined for a sparse matrix of dtype {matrix.dtype}{here()}")

    if _is_cupyx(matrix):
        return _all_reduce_on_gpu(group, matrix, async_op)

    entry = np.dtype([("row", np.int64), ("column", np.int64), ("value", matrix.dtype)])
    coordinates = matrix.tocoo()
    mine = np.empty(coordinates.nnz, entry)
    mine["row"], mine["column"], mine["value"] = coordinates.row, coordinates.col, coordinates.data
    counts = np.empty(group.size, np.int64)
    group.all_gather_single(counts, np.array([mine.size], np.int64), False)
    everybody = np.empty(counts.sum(), entry)
    parts = np.split(everybody, np.cumsum(counts)[:-1])

    work = group.all_gather(parts, mine, async_op)
    if work is None:
        _assign(matrix, everybody)
        return None
    work.finish_with(lambda: _assign(matrix, everybody), matrix)
    return work


def _is_cupyx(matrix: Any) -> bool:
    """Say whether the entries are on a GPU. (There, a dtype can't hold row, column and value together.)"""
    return locate("all_reduce", "array.data", matrix.data)[0] == "cuda"


def _all_reduce_on_gpu(group: Operations, matrix: Any, async_op: bool) -> Work | None:
    """Gather everybody's rows, columns and values as three arrays, and add up the entries on each GPU."""
    from ..cuda import seam

    runtime = seam.runtime()
    coordinates = matrix.tocoo()
    mine = [coordinates.row, coordinates.col, coordinates.data]
    device = matrix.data.data.device_id
    stream = runtime.current_stream(device)
    counts = np.empty(group.size, np.int64)
    group.all_gather_single(counts, np.array([coordinates.data.size], np.int64), False)
    everybody = [runtime.empty((int(counts.sum()),), each.dtype, device, stream) for each in mine]
    ends = np.cumsum(counts)
    outputs = [
        [each[end - count : end] for each in everybody]
        for count, end in zip(counts.tolist(), ends.tolist(), strict=True)
    ]

    def assign() -> None:
        rows, columns, values = everybody
        runtime.sum_entries(matrix, rows, columns, values, device, runtime.current_stream(device))

    work = group.all_gather_coalesced(outputs, mine, async_op)
    if work is None:
        assign()
        return None
    work.finish_with(assign, matrix)
    return work


def _assign(matrix: Any, entries: Any) -> None:
    """Make `matrix` the sum of `entries`."""
    import scipy.sparse

    summed = scipy.sparse.coo_array((entries["value"], (entries["row"], entries["column"])), shape=matrix.shape)
    assign_sum(matrix, summed)


def assign_sum(matrix: Any, coordinates: Any) -> None:
    """Make `matrix` the sum of the entries of a matrix in the format "coo", keeping its class, shape and dtype."""
    result = coordinates.asformat(matrix.format)
    result.sum_duplicates()
    matrix.data = result.data.astype(matrix.dtype, copy=False)
    if matrix.format == "coo":
        matrix.row, matrix.col = result.row, result.col
        matrix.has_canonical_format = True
    else:
        matrix.indices, matrix.indptr = result.indices, result.indptr
