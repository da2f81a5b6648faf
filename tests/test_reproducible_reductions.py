"""Reductions with REPRODUCIBLE_SUM: every element is the exact sum over the ranks, rounded once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.exact.rows import ExactRows, bits_of
from hpccomm.exact.sums import CHUNK, PRECISION

from .arrays import LAYOUTS
from .exact import Kind, bits, closest, every_kind, near_one, of_all_sizes

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)
DTYPES = [np.dtype(code) for code in ("f8", "f4", "f2", "c16", "c8")] + [np.dtype(ml_dtypes.bfloat16)]
both = pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        yield group


def done(work: hc.Work | None) -> None:
    if work is not None:
        work.wait()


def addends(kind: Kind, n: int, dtype: Any = np.float64) -> list[Any]:
    """All ranks' arrays."""
    dtype = np.dtype(dtype)
    small = 2.0**-910 if dtype != np.float64 and kind is not near_one else 1.0
    made = []
    for rank in range(SIZE):
        rng = np.random.default_rng([rank, n])
        with np.errstate(all="ignore"):
            array = (kind(rng, n) * small).astype(dtype)
            if dtype.kind == "c":
                array = array + (1j * near_one(rng, n)).astype(dtype)
        array[~np.isfinite(array)] = 1.0
        made.append(array)
    return made


def exact(arrays: list[Any], dtype: Any) -> Any:
    """The exact sum of each element, rounded once."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        real, imag = (exact([getattr(each, name) for each in arrays], part) for name in ("real", "imag"))
        return (real + 1j * imag).astype(dtype)
    sums = [closest(sum(map(Fraction, column)), dtype) for column in zip(*(each.tolist() for each in arrays))]
    with np.errstate(over="ignore"):
        return np.array(sums).astype(dtype)


def assert_are(array: Any, expected: Any) -> None:
    assert array.dtype == expected.dtype
    assert bits(array) == bits(expected), (array, expected)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_the_closest_number(kind: Kind, dtype: Any) -> None:
    given = addends(kind, 30, dtype)
    expected = exact(given, dtype)
    for async_op in (False, True):
        mine = given[RANK].copy()
        done(hc.all_reduce(mine, "reproducible_sum", async_op=async_op))
        assert_are(mine, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2 * CHUNK + 3,)], ids=str)
def test_layouts_and_shapes(layout: Any, shape: tuple[int, ...]) -> None:
    given = [np.random.default_rng(rank).standard_normal(shape) for rank in range(SIZE)]
    mine = layout(np.asarray(given[RANK]))
    hc.all_reduce(mine, hc.ReduceOp.REPRODUCIBLE_SUM)
    expected = [math.fsum(column) for column in zip(*map(np.ravel, given))]
    np.testing.assert_array_equal(mine, np.reshape(expected, shape))


@several
def test_neither_the_order_of_the_ranks_nor_ranks_that_add_nothing_change_a_bit(world: hc.ProcessGroup) -> None:
    given = addends(of_all_sizes, 200)
    expected = exact(given[:2], np.float64)
    mine = given[RANK].copy() if RANK < 2 else np.zeros(200)
    hc.all_reduce(mine, "reproducible_sum")
    assert_are(mine, expected)
    group = hc.new_group([1, 0], sort_ranks=False)
    if RANK < 2:
        mine = given[RANK].copy()
        hc.all_reduce(mine, "reproducible_sum", group)
        assert_are(mine, expected)
    hc.destroy_process_group(group)


@pytest.mark.parametrize("values", [[INF, 1.0, NAN], [INF, -INF, INF], [-0.0, 1e308, -INF], [0.0, 5e-324, -1e308]])
def test_special_values(values: list[float]) -> None:
    given = [np.roll(values, rank) for rank in range(SIZE)]
    mine = given[RANK].copy()
    hc.all_reduce(mine, "reproducible_sum")
    for value, column in zip(mine.tolist(), zip(*given)):
        if any(map(math.isnan, column)) or {INF, -INF} <= {*column}:
            assert math.isnan(value)
        elif not all(map(math.isfinite, column)):
            assert value == next(each for each in column if math.isinf(each))
        else:
            assert value == closest(sum(map(Fraction, column), Fraction(0)))
            assert not (value == 0 and np.signbit(value))


# -- other operations --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
def test_reduce_and_the_scans(dtype: str, async_op: bool) -> None:
    given = addends(near_one, 50, dtype)
    mine = given[RANK].copy()
    done(hc.reduce(mine, SIZE - 1, "reproducible_sum", async_op=async_op))
    assert_are(mine, exact(given, dtype) if RANK == SIZE - 1 else given[RANK])
    mine = given[RANK].copy()
    done(hc.scan(mine, "reproducible_sum", async_op=async_op))
    assert_are(mine, exact(given[: RANK + 1], dtype))
    mine = given[RANK].copy()
    done(hc.exscan(mine, "reproducible_sum", async_op=async_op))
    assert_are(mine, exact(given[:RANK], dtype) if RANK else given[0])


@both
@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
def test_reduce_scatter(dtype: str, async_op: bool) -> None:
    given = addends(near_one, 6 * SIZE, dtype)
    expected = exact(given, dtype)
    output = np.zeros((2, 3), dtype)
    done(hc.reduce_scatter_single(output, given[RANK], "reproducible_sum", async_op=async_op))
    assert_are(output.reshape(-1), expected[6 * RANK : 6 * RANK + 6])
    sizes = [1, *[6] * (SIZE - 2), 11] if SIZE > 1 else [6]
    ends = np.cumsum(sizes)
    output = np.zeros(sizes[RANK], dtype)
    inputs = np.split(given[RANK], ends[:-1])
    done(hc.reduce_scatter(output, inputs, "reproducible_sum", async_op=async_op))
    assert_are(output, expected[ends[RANK] - sizes[RANK] : ends[RANK]])


@pytest.mark.filterwarnings("error")
def test_nothing_warns_or_raises() -> None:
    given = [np.array([1e308, 1e-308, 5e-324, 1.0]), np.array([6e4, 6e-8, 1.0], np.float16)]
    with np.errstate(all="raise"):
        for values in given:
            mine = values.copy() if RANK == 0 else np.zeros_like(values)
            hc.all_reduce(mine, "reproducible_sum")
            assert_are(mine, values)
            hc.all_reduce(values.copy(), "reproducible_sum")  # too large for float16 on two ranks and more


def test_integers_are_summed_as_ever() -> None:
    mine = np.arange(5) + RANK
    hc.all_reduce(mine, "reproducible_sum")
    np.testing.assert_array_equal(mine, SIZE * np.arange(5) + sum(range(SIZE)))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_gradient_buckets(op: str) -> None:
    given = [[array.astype(dtype) for array, dtype in zip(addends(near_one, 40), ("f8",) * SIZE)] for dtype in "ab"]
    small = [array.astype("f4") for array in given[0]]
    buckets = hc.GradientBuckets([np.zeros(40), np.zeros(40), np.zeros(40, "f4")], 500, op, reproducible=True)
    for _ in range(2):
        for i, values in enumerate([*given, small]):
            buckets.arrays[i][...] = values[RANK]
            buckets.ready(i)
        buckets.wait()
        for array, values in zip(buckets.arrays, [*given, small]):
            assert_are(array, exact(values, array.dtype) / array.dtype.type(SIZE if op == "avg" else 1))


# -- the digits, of more ranks than there are --------------------------------------------------------


@pytest.mark.serial
@pytest.mark.parametrize("kind", [near_one, of_all_sizes], ids=["near one", "of all sizes"])
@pytest.mark.parametrize("ranks", [1, 2, 1000, 4096])
def test_digits_of_many_ranks_have_room_in_an_int64(kind: Kind, ranks: int) -> None:
    columns = np.stack([kind(np.random.default_rng(7), ranks), np.full(ranks, 1.0), np.full(ranks, -(2.0 - 2.0**-52))])
    columns = np.repeat(columns, 3, axis=0)  # more than a few sums
    whole, *sums = [ExactRows(9, bits_of(columns), ranks, 0) for _ in range(ranks + 1)]
    assert ranks * (1 << whole.width) <= 1 << 63
    for each, column in zip(sums, columns.T):
        each.cut(column)
        whole.memory += each.memory
    assert_are(whole.rounded(np.dtype(np.float64)), np.array([math.fsum(row) for row in columns]))


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("exponent", [-1074, -130, -30, 0, 900])
def test_all_ways_of_rounding_are_one(dtype: str, exponent: int) -> None:
    rng = np.random.default_rng([abs(exponent), len(dtype)])
    sums = ExactRows(5000, (exponent + 60, -exponent, 0), 3, 0)
    memory = sums.memory
    assert len(memory) == 2
    memory[...] = rng.integers(-(1 << 53), 1 << 53, memory.shape) >> rng.integers(0, 53, memory.shape)
    memory[1] >>= sums.width - 9
    memory[0, :600] = np.repeat([1 << 29, 1 << 28, 3 << 28], 200) + np.tile([-1, 0, 1], 200)  # near a tie
    at_once = sums.rounded(np.dtype(dtype))
    with np.errstate(all="ignore"):
        by_digits = sums._all_closest(memory, np.dtype(dtype)).astype(dtype)
    assert_are(at_once, by_digits)
    few = ExactRows(8, (exponent + 60, -exponent, 0), 3, 0)
    for start in range(0, 600, 8):
        few.memory[...] = memory[:, start : start + 8]
        assert_are(few.rounded(np.dtype(dtype)), at_once[start : start + 8])
    exact = [(int(low) + (int(high) << sums.width)) * Fraction(2) ** exponent for low, high in memory[:, ::100].T]
    with np.errstate(over="ignore"):
        expected = [math.copysign(closest(each, dtype), each) for each in exact]
        assert_are(at_once[::100], np.array(expected).astype(dtype))


# -- what is refused ---------------------------------------------------------------------------------


def in_a_block() -> None:
    with hc.coalescing():
        hc.all_reduce(np.ones(2), "reproducible_sum")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: hc.all_reduce(np.ones(2, np.longdouble), "reproducible_sum"),
            TypeError,
            "not defined for array's dty",
        ),
        (lambda: hc.all_reduce(np.ones(2, bool), "reproducible_sum"), TypeError, "not defined for array's dtype bool"),
        (
            lambda: hc.all_reduce_init(np.ones(2), "reproducible_sum"),
            hc.UnsupportedOperationError,
            "all_reduce_init: there is no reproducible sum of this form; call one of all_reduce, reduce, scan",
        ),
        (
            lambda: hc.all_reduce_coalesced([np.ones(2)], "reproducible_sum"),
            hc.UnsupportedOperationError,
            "all_reduce_coalesced: there is no reproducible sum",
        ),
        (in_a_block, hc.UnsupportedOperationError, r"all_reduce: no reproducible sum in a coalescing\(\) block"),
        (
            lambda: hc.GradientBuckets([np.ones(2), np.arange(3)], reproducible=True),
            TypeError,
            r"GradientBuckets: ReduceOp\.AVG is not defined for arrays\[1\]'s dtype int64; convert to a floating",
        ),
        (
            lambda: hc.GradientBuckets([np.ones(2)], op="max", reproducible=True),
            ValueError,
            "reproducible=True is for the ops sum and avg, not ReduceOp.MAX",
        ),
    ],
)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@several
@both
def test_other_sizes_and_dtypes_are_refused_on_all_ranks(async_op: bool) -> None:
    for mine in (np.ones(2 + (RANK == 1)), np.ones(2, "f8" if RANK else "f4")):
        with pytest.raises(ValueError, match=r"all_reduce: the arrays have [23] float.. numbers here"):
            done(hc.all_reduce(mine, "reproducible_sum", async_op=async_op))


def test_kinds_of_dtypes_have_a_precision() -> None:
    for dtype in DTYPES:
        part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
        assert PRECISION[part.name] == ml_dtypes.finfo(part).nmant + 1
