"""A reduction gives the same result whichever way it takes: through memory of the node, or through MPI."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.native import fastpath

from ..arrays import FLOATS, HALVES, assert_same, dtype_name
from ..matrix.cases import function
from ..matrix.test_matrix import has_form

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
NAMES = ["all_reduce", "all_reduce_coalesced", "reduce", "scan", "exscan", "reduce_scatter", "reduce_scatter_single"]
ROOT = SIZE - 1


@pytest.fixture
def group(process_group: hc.ProcessGroup) -> Iterator[hc.ProcessGroup]:
    with hc.new_group() as made:
        yield made


def result_of(name: str, form: str, op: str, values: Any, group: hc.ProcessGroup) -> Any:
    """Return what this rank gets of the reduction of all ranks' `values`, which have a row for each rank."""
    x, output = values.copy(), np.zeros_like(values[0])
    arguments: tuple[Any, ...] = (x, op)
    if name == "reduce":
        arguments = x, ROOT, op
    elif name == "all_reduce_coalesced":
        arguments = [x[:1], x[1:]], op
    elif name == "reduce_scatter":
        arguments = output, list(x), op
    elif name == "reduce_scatter_single":
        arguments = output, x, op
    options = {"async_op": True} if form == "async" else {}
    work = function(name, form)(*arguments, group=group, **options)
    if form == "persistent":
        work.start()
    if work is not None:
        work.wait()
    if form == "persistent":
        work.free()
    return output if "scatter" in name else x


def expected(name: str, ufunc: Any, everybody: list[Any]) -> Any:
    """Return what NumPy makes of it, in rank order; None where this rank gets nothing."""
    ranks = {"scan": RANK + 1, "exscan": RANK, "reduce": SIZE if RANK == ROOT else 0}.get(name, SIZE)
    if ranks == 0:
        return None
    with np.errstate(invalid="ignore"):  # NumPy warns of a NaN in a long double
        result = reduce(ufunc, everybody[:ranks])
    return result[RANK] if "scatter" in name else result


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize(("op", "ufunc"), [("min", np.minimum), ("max", np.maximum)])
@pytest.mark.parametrize("form", ["ordinary", "async", "persistent"])
def test_minimum_and_maximum_keep_nan(form: str, op: str, ufunc: Any, dtype: Any, group: hc.ProcessGroup) -> None:
    everybody = [np.arange(SIZE * 7).reshape(SIZE, 7).astype(dtype) * (-1) ** rank for rank in range(SIZE)]
    for rank, values in enumerate(everybody):
        values[:, rank % 7] = np.nan  # and the last column is a number everywhere
    for name in [name for name in NAMES if has_form(name, form)]:
        wanted = expected(name, ufunc, everybody)
        for _ in range(2 if form == "ordinary" else 1):
            found = result_of(name, form, op, everybody[RANK], group)
            if wanted is not None:
                np.testing.assert_array_equal(found.astype("f8"), wanted.astype("f8"), f"{name}, {form}")


@pytest.mark.parametrize("nbytes", [8, 4000, 60_000, 1_500_000])
@pytest.mark.parametrize("name", NAMES)
def test_a_blocking_sum_has_the_same_bits_from_the_first_call_on(
    name: str, nbytes: int, group: hc.ProcessGroup
) -> None:
    everybody = [np.random.default_rng(rank).normal(size=(SIZE, nbytes // 8)) for rank in range(SIZE)]
    first = result_of(name, "ordinary", "sum", everybody[RANK], group)
    for _ in range(10):
        hc.barrier(group)
    assert_same(result_of(name, "ordinary", "sum", everybody[RANK], group), first, name)


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "avg"])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, 1 << 16])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_half_precisions_have_the_bits_of_a_reduction_in_float32(
    dtype: Any, op: str, count: int, group: hc.ProcessGroup
) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)  # each value of the dtype: also subnormal ones, infinities and NaN
    rows = [
        np.random.default_rng(rank * SIZE + row).permutation(every)[:count]
        for rank in range(SIZE)
        for row in range(SIZE)
    ]
    rows[0] = every[:count]
    everybody = np.reshape(rows, (SIZE, SIZE, count)).view(dtype)
    ufunc = {"product": np.multiply, "min": np.minimum, "max": np.maximum}.get(op, np.add)
    for name in NAMES:
        if op == "avg" and "scan" in name:
            continue
        wanted = expected(name, ufunc, list(everybody.astype(np.float32)))
        found = result_of(name, "ordinary", op, everybody[RANK], group)
        if wanted is not None:
            rounded = (wanted / np.float32(SIZE) if op == "avg" else wanted).astype(dtype)
            is_nan = np.isnan(rounded.astype(np.float32))
            assert np.array_equal(np.isnan(found.astype(np.float32)), is_nan), name
            assert np.array_equal(found.view(np.uint16)[~is_nan], rounded.view(np.uint16)[~is_nan]), name


@pytest.mark.skipif(fastpath is None, reason="without the compiled extension all are in MPI's order")
@pytest.mark.parametrize(
    ("form", "name", "nbytes"),
    [
        *(("async", name, 1_500_000) for name in NAMES if name != "reduce_scatter"),
        *(("persistent", name, nbytes) for name in NAMES for nbytes in (8, 60_000) if has_form(name, "persistent")),
        ("persistent", "all_reduce", 1_500_000),
        ("persistent", "reduce_scatter_single", 1_500_000),
    ],
)
def test_a_persistent_sum_and_a_large_asynchronous_one_have_the_bits_of_a_blocking_one(
    form: str, name: str, nbytes: int, group: hc.ProcessGroup
) -> None:
    mine = np.random.default_rng(RANK).normal(size=(SIZE, nbytes // 8))
    assert_same(result_of(name, form, "sum", mine, group), result_of(name, "ordinary", "sum", mine, group), name)
