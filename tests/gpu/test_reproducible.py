"""Reproducible sums of GPU arrays: those of the same arrays on the host, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from ..arrays import backwards, contiguous, fortran, strided
from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
every_layout = pytest.mark.parametrize("layout", [contiguous, strided, backwards, fortran])


def numbers(rank: int, shape: tuple[int, ...] = (6, 5), dtype: Any = np.float64) -> Any:
    rng = np.random.default_rng([rank, 3])
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 9, shape)).astype(dtype)


@pytest.mark.usefixtures("process_group")
@every_layout
@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "i8"])
def test_sums_dot_products_and_norms(layout: Any, dtype: str) -> None:
    on_host = numbers(RANK, dtype=dtype)
    on_gpu = gpus.array(on_host, layout)
    for axis in (None, 0, (), (0, 1)):
        expected = hc.reproducible_sum(on_host, axis)
        result = hc.reproducible_sum(on_gpu, axis)
        assert isinstance(result, np.ndarray | np.generic)
        assert result.tobytes() == expected.tobytes()
    assert hc.reproducible_dot(on_gpu, on_gpu).tobytes() == hc.reproducible_dot(on_host, on_host).tobytes()
    assert hc.reproducible_norm(on_gpu).tobytes() == hc.reproducible_norm(on_host).tobytes()
    np.testing.assert_array_equal(gpus.values(on_gpu), on_host)


@every_layout
@pytest.mark.parametrize("async_op", [False, True])
def test_reductions(groups: list[hc.ProcessGroup], layout: Any, async_op: bool) -> None:
    for group in groups:
        for dtype in ("f8", "f4", "c16"):
            on_host = numbers(RANK, dtype=dtype)
            on_gpu = gpus.array(on_host, layout)
            for array in (on_host, on_gpu):
                work = hc.all_reduce(array, "reproducible_sum", group, async_op)
                if work is not None:
                    work.wait()
            assert gpus.values(on_gpu).tobytes() == on_host.tobytes()


def test_the_last_values_that_were_written_are_summed(groups: list[hc.ProcessGroup]) -> None:
    on_gpu = gpus.array(np.zeros(4))
    gpus.write(on_gpu, np.full(4, 0.1))
    hc.all_reduce(on_gpu, "reproducible_sum", groups[0])
    expected = np.full(4, 0.1)
    hc.all_reduce(expected, "reproducible_sum", groups[0])
    np.testing.assert_array_equal(gpus.values(on_gpu), expected)


def test_reduce_scatter(groups: list[hc.ProcessGroup]) -> None:
    group = groups[0]
    on_host = numbers(RANK, (SIZE, 4))
    expected, output = np.zeros(4), gpus.array(np.zeros(4))
    hc.reduce_scatter_single(expected, on_host, "reproducible_sum", group)
    hc.reduce_scatter_single(output, gpus.array(on_host), "reproducible_sum", group)
    np.testing.assert_array_equal(gpus.values(output), expected)
