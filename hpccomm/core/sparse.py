"""all_reduce of sparse matrices of scipy and cupyx; patterns may differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import on_rank
from .arrays import locate
from .backend import Backend, finished
from .calls import Call
from .late import SPARSE_SUMS_ON_GPUS, late
from .options import Membership
from .reduce_op import ReduceOp, ReduceOpLike, as_reduce_op
from .work import Work


def all_reduce(
    group: Membership, backends: Mapping[str, Backend], matrix: Any, op: ReduceOpLike, async_op: bool
) -> tuple[Call, Callable[[], Work | None]]:
    """Return the checked call and the step of the operation that sums `matrix` over the ranks, in place.

    Each rank gathers all ranks' entries and adds them in rank order. On the host all ranks add the same numbers in the
    same order, so their results are bitwise equal; on GPUs CuPy chooses the order. Even with `async_op`, the exchange
    of the entry counts blocks until all ranks call it.
    """
    if as_reduce_op("all_reduce", op) is not ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse matrices can only be summed, not reduced with {op!r}{on_rank()}")
    if matrix.format not in ("csr", "csc", "coo"):
        raise TypeError(
            f"all_reduce: the sparse format {matrix.format!r} can't be reduced in place; "
            f"use .tocsr(), .tocsc() or .tocoo(){on_rank()}"
        )
    if matrix.ndim != 2:
        raise ValueError(f"all_reduce: the sparse array has {matrix.ndim} dimension(s); expected 2{on_rank()}")
    if matrix.dtype.kind not in "biufc":
        raise TypeError(f"all_reduce: SUM is not defined for a sparse matrix of dtype {matrix.dtype}{on_rank()}")
    device, _ = locate("all_reduce", "array.data", matrix.data)
    call = Call(("all_reduce_sparse", device, matrix, (matrix, ReduceOp.SUM)))
    sums = late(SPARSE_SUMS_ON_GPUS) if device == "cuda" else _all_reduce
    return call, partial(sums, group, backends, matrix, async_op)


def _all_reduce(group: Membership, backends: Mapping[str, Backend], matrix: Any, async_op: bool) -> Work | None:
    entry = np.dtype([("row", np.int64), ("column", np.int64), ("value", matrix.dtype)])
    coordinates = matrix.tocoo()
    mine = np.empty(coordinates.nnz, entry)
    mine["row"], mine["column"], mine["value"] = coordinates.row, coordinates.col, coordinates.data
    counts = counts_of_all(group, backends, matrix, mine.size)
    everybody = np.empty(counts.sum(), entry)
    parts = np.split(everybody, np.cumsum(counts)[:-1])
    work = backends["cpu"].all_gather(parts, mine, async_op)
    return finished(work, partial(_assign, matrix, everybody))


def counts_of_all(group: Membership, backends: Mapping[str, Backend], matrix: Any, count: int) -> np.ndarray:
    """Return each rank's number of entries; ValueError on all ranks if matrices differ in shape or dtype."""
    mine = np.array([count, *matrix.shape, ord(matrix.dtype.kind), matrix.dtype.itemsize], np.int64)
    every = np.empty((group.size, mine.size), np.int64)
    work = backends["cpu"].all_gather_single(every, mine, False)
    if work is not None:  # the backend has only asynchronous operations
        work.wait()
    differing = np.flatnonzero((every[:, 1:] != every[0, 1:]).any(axis=1))
    if differing.size:
        one, other = (
            f"{rows} x {columns} of {np.dtype(f'{chr(kind)}{itemsize}')}"
            for rows, columns, kind, itemsize in every[[0, differing[0]], 1:].tolist()
        )
        raise ValueError(
            f"all_reduce: the sparse matrix of rank {differing[0]} of the group is {other}, that of rank 0 {one}; "
            f"expected the same shape and dtype on all ranks{on_rank()}"
        )
    return every[:, 0]


def _assign(matrix: Any, entries: Any) -> None:
    """Make `matrix` the sum of `entries`."""
    import scipy.sparse

    summed = scipy.sparse.coo_array((entries["value"], (entries["row"], entries["column"])), shape=matrix.shape)
    assign_sum(matrix, summed)


def assign_sum(matrix: Any, coordinates: Any) -> None:
    """Make `matrix` the sum of the entries of a "coo" matrix; keep its class, shape and dtype."""
    result = coordinates.asformat(matrix.format)
    result.sum_duplicates()
    matrix.data = result.data.astype(matrix.dtype, copy=False)
    if matrix.format == "coo":
        matrix.row, matrix.col = result.row, result.col
        matrix.has_canonical_format = True
    else:
        matrix.indices, matrix.indptr = result.indices, result.indptr
