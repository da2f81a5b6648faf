"""all_reduce of cupyx.scipy.sparse matrices."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import hpccomm as hc

from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")


class Matrix:
    """The part of a cupyx.scipy.sparse matrix that hpccomm uses, without CuPy's code, which needs a GPU."""

    format = "coo"
    ndim = 2

    def __init__(self, matrix: Any) -> None:
        coordinates = matrix.tocoo()
        self.shape, self.dtype, self.nnz = matrix.shape, matrix.dtype, coordinates.nnz
        self.row, self.col, self.data = map(gpus.array, (coordinates.row, coordinates.col, coordinates.data))

    def tocoo(self) -> Matrix:
        return self

    def assign(self, rows: Any, columns: Any, values: Any) -> None:
        self.result = scipy.sparse.coo_array((values, (rows, columns)), shape=self.shape).toarray()


@pytest.fixture
def matrix(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """This rank's matrix on the GPU, and the sum of all ranks' as NumPy makes it."""
    everybody = [
        scipy.sparse.random_array((7, 5), density=0.1 * rank, random_state=np.random.default_rng(rank)).tocsr()
        for rank in range(process_group.size)  # rank 0's has no entry
    ]
    mine = everybody[process_group.rank]
    total = sum(each.toarray() for each in everybody)
    if gpus.is_real():
        import cupyx.scipy.sparse

        return cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(mine)), total
    module = SimpleNamespace(issparse=lambda array: isinstance(array, Matrix))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.sparse", module)
    return Matrix(mine), total


@pytest.mark.parametrize("async_op", [False, True])
def test_matrices_of_different_patterns(matrix: tuple[Any, Any], async_op: bool) -> None:
    mine, total = matrix
    work = hc.all_reduce(mine, async_op=async_op)
    if work is not None:
        assert work.result() is mine
    result = mine.toarray().get() if gpus.is_real() else mine.result
    np.testing.assert_allclose(result, total, rtol=1e-14)


def test_only_sums(matrix: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="sparse matrices can only be summed"):
        hc.all_reduce(matrix[0], "max")
