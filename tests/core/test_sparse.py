from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import hpccomm as hc

pytestmark = pytest.mark.usefixtures("process_group")

SHAPE = (7, 5)


def dense(rank: int, dtype: Any) -> Any:
    """A pattern of its own for each rank; rank 1's is empty."""
    random = np.random.default_rng(rank)
    values = random.integers(1, 9, SHAPE) * (random.random(SHAPE) < (0.0 if rank == 1 else 0.4))
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("flavour", ["matrix", "array"])
@pytest.mark.parametrize("async_op", [False, True])
def test_sum_of_different_patterns(
    groups: list[hc.ProcessGroup], dtype: Any, kind: str, flavour: str, async_op: bool
) -> None:
    make = getattr(sp, f"{kind}_{flavour}")
    for group in groups:
        matrix = make(dense(hc.get_rank(), dtype))
        work = hc.all_reduce(matrix, "sum", group, async_op)
        if async_op:
            assert work.result() is matrix
        else:
            assert work is None
        assert type(matrix) is type(make(SHAPE))
        assert matrix.dtype == dtype
        expected = sum((dense(rank, dtype) for rank in group.ranks[1:]), dense(group.ranks[0], dtype))
        assert np.array_equal(matrix.toarray(), expected)
        assert matrix.nnz == np.count_nonzero(expected)
        assert np.array_equal((matrix @ np.ones(5)), expected @ np.ones(5))


def test_duplicate_entries_are_added(process_group: hc.ProcessGroup) -> None:
    matrix = sp.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 2))
    hc.all_reduce(matrix)
    assert matrix.toarray()[0, 1] == 3 * process_group.size


def test_an_async_sum_that_is_complete_at_once(process_group: hc.ProcessGroup) -> None:
    work = hc.all_reduce(sp.csr_array((3, 3)), async_op=True)
    future = work.get_future()
    assert future.wait(60).nnz == 0


@pytest.mark.parametrize("op", ["max", "avg", hc.ReduceOp.PREMUL_SUM(2)])
def test_other_reductions_are_refused(op: Any) -> None:
    with pytest.raises(ValueError, match="sparse matrices can only be summed"):
        hc.all_reduce(sp.csr_array(np.eye(3)), op)


def test_other_formats_are_refused() -> None:
    with pytest.raises(TypeError, match=r"format 'lil' can't be reduced in place; use .*tocsr\(\)"):
        hc.all_reduce(sp.lil_array((3, 3)))
    with pytest.raises(ValueError, match=r"has 1 dimension\(s\); expected 2"):
        hc.all_reduce(sp.coo_array(np.ones(3)))
    object_matrix = sp.csr_array(np.eye(2))
    object_matrix.data = object_matrix.data.astype(object)
    with pytest.raises(TypeError, match="SUM is not defined for a sparse matrix of dtype object"):
        hc.all_reduce(object_matrix)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((7, 6), "f8"), ((6, 5), "f8"), ((5, 7), "f8"), ((7, 5), "f4"), ((7, 5), "i8")]
)
def test_other_shapes_and_dtypes_fail_on_all_ranks(
    process_group: hc.ProcessGroup, kind: str, async_op: bool, shape: Any, dtype: str
) -> None:
    last = process_group.size - 1
    if last:
        matrix = getattr(sp, f"{kind}_array")(np.ones(shape if process_group.rank == last else SHAPE, dtype))
        if process_group.rank != last:
            matrix = matrix.astype("f8")
        before = matrix.toarray()
        differs = (
            f"rank {last} of the group is {shape[0]} x {shape[1]} of {np.dtype(dtype)}, that of rank 0 7 x 5 of float64"
        )
        with pytest.raises(ValueError, match=differs):
            hc.all_reduce(matrix, async_op=async_op)
        assert np.array_equal(matrix.toarray(), before)
    check = np.ones(1)
    hc.all_reduce(check)
    assert check[0] == process_group.size


def test_other_operations_take_no_sparse_matrix() -> None:
    with pytest.raises(TypeError, match="array is a csr_array; expected a NumPy or CuPy array"):
        hc.broadcast(sp.csr_array((2, 2)), 0)
