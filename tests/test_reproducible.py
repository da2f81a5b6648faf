"""Sums without rounding: the answers are those of `math.fsum` and of fractions; every rank knows all ranks' data."""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.exact import rows as exact_rows
from hpccomm.exact.sums import CHUNK, HUGE, SPARE
from hpccomm.native import fastpath

from .arrays import INTEGERS, LAYOUTS
from .exact import (
    KINDS,
    Kind,
    assert_is,
    bits,
    cancelling,
    closest,
    every_kind,
    near_a_tie,
    near_one,
    subnormal,
    total,
)

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)
FLOATS = [np.dtype(code) for code in ("f8", "f4", "f2")] + [np.dtype(ml_dtypes.bfloat16)]
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        yield group


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(exact_rows, "two_grid_sums", lambda *_: None)
        monkeypatch.setattr(exact_rows, "product_sums", lambda *_: None)
        monkeypatch.setattr(exact_rows, "add_rows", None)
        monkeypatch.setattr(exact_rows, "extent", lambda _: None)


in_both_ways = pytest.mark.usefixtures("way")


def parts(values: Any, rng: np.random.Generator) -> Any:
    """This rank's part of an array that is cut in random places, so that parts may be empty."""
    ends = np.sort(rng.integers(0, len(values) + 1, SIZE - 1))
    return np.split(values, ends)[RANK]


# -- the sum -----------------------------------------------------------------------------------------


def test_the_oracle_is_that_of_python() -> None:
    for kind in (near_one, cancelling, subnormal, near_a_tie):
        values = kind(np.random.default_rng(5), 50)
        assert closest(total(values)) == math.fsum(values)
    for value in (0.1, 65519.0, 65520.0, 3e-8, 1e-9):
        with np.errstate(over="ignore"):
            assert closest(Fraction(value), np.float16) == np.float16(value)


@in_both_ways
@every_kind
@pytest.mark.parametrize("n", [3, 100, 3 * CHUNK + 5])
def test_a_sum_is_the_closest_number_whatever_the_split_and_the_order(kind: Kind, n: int) -> None:
    rng = np.random.default_rng([n, KINDS.index(kind)])
    values = kind(rng, n)
    expected = closest(total(values))
    for _ in range(4):
        assert_is(hc.reproducible_sum(parts(values, rng)), expected)
        values = rng.permutation(values)
    assert_is(hc.reproducible_sum(values if RANK == SIZE - 1 else values[:0]), expected)


@pytest.mark.serial
@in_both_ways
@every_kind
def test_the_messages_of_any_number_of_ranks_have_one_sum(kind: Kind) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    values = kind(rng, 3000)
    expected = closest(total(values))
    for ranks in (*range(1, 9), 1000):
        own = np.split(rng.permutation(values), np.sort(rng.integers(0, 3001, ranks - 1)))
        whole, *sums = [exact_rows.ExactRows(1, exact_rows.ANYTHING, ranks) for _ in (0, *own)]
        for each, part in zip(sums, own):
            each.add(part[None])
            whole.memory += each.memory
        assert_is(whole.rounded(np.dtype(np.float64))[0], expected)


@every_kind
def test_the_group_of_one_rank_has_the_same_bits(kind: Kind, world: hc.ProcessGroup) -> None:
    values = kind(np.random.default_rng(9), 1000)
    alone, _ = hc.new_subgroups(1)
    own = parts(values, np.random.default_rng(1))
    assert bits(hc.reproducible_sum(own)) == bits(hc.reproducible_sum(values, group=alone))
    assert bits(hc.reproducible_dot(own, own)) == bits(hc.reproducible_dot(values, values, group=alone))
    assert bits(hc.reproducible_norm(own)) == bits(hc.reproducible_norm(values, alone))
    hc.destroy_process_group(alone)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_sum_is_rounded_once_to_the_dtype(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    with np.errstate(over="ignore"):
        for scale in (1.0, float(ml_dtypes.finfo(dtype).smallest_normal), float(ml_dtypes.finfo(dtype).max)):
            for _ in range(10):
                values = (np.ldexp(rng.uniform(-1, 1, 40), rng.integers(-20, 1, 40)) * scale).astype(dtype)
                expected = closest(total(values.astype(float)), dtype)
                assert_is(hc.reproducible_sum(parts(values, rng)), expected, dtype)


@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16])
def test_a_sum_is_not_rounded_to_float64_first(dtype: Any) -> None:
    half = float(ml_dtypes.finfo(dtype).eps) / 2
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    values = np.array([1.0, half, smallest], dtype)  # float64 has no room for the last one, which decides
    expected = 1.0 + 2 * half
    assert_is(hc.reproducible_sum(parts(values, np.random.default_rng(0))), expected, dtype)
    rows = values[:, None] if RANK == 0 else np.zeros((0, 1), dtype)
    assert_is(hc.reproducible_sum(rows, axis=0)[0], expected, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (200, 100)], ids=str)
def test_layouts_and_shapes(layout: Any, shape: tuple[int, ...]) -> None:
    given = [np.random.default_rng([rank, 7]).standard_normal(shape) for rank in range(SIZE)]
    expected = math.fsum(value for array in given for value in np.ravel(array))
    own = layout(np.asarray(given[RANK]))
    before = own.copy()
    assert_is(hc.reproducible_sum(own), expected)
    assert_is(hc.reproducible_dot(own, own), closest(sum((squares(array) for array in given), Fraction(0))))
    assert (own == before).all()


@in_both_ways
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([INF, 1.0], INF),
        ([-INF, 1e308, 1e308], -INF),
        ([INF, -INF], NAN),
        ([NAN, INF], NAN),
        ([NAN], NAN),
        ([1e308, 1e308], INF),
        ([-1e308, -1e308, 1e300], -INF),
        ([1.7976931348623157e308, 9.9e291], 1.7976931348623157e308),
        ([1.7976931348623157e308, 2.0**970], INF),
        ([-0.0, -0.0], 0.0),
        ([], 0.0),
    ],
)
def test_special_values(values: list[float], expected: float) -> None:
    for shift in range(SIZE):
        own = np.array(values)[(RANK + shift) % SIZE :: SIZE]
        assert_is(hc.reproducible_sum(own), expected)
        assert_is(hc.reproducible_sum(np.stack([own, own]), axis=1)[1], expected)
        assert_is(hc.reproducible_dot(own, np.ones(own.size)), expected)


@in_both_ways
def test_complex_numbers_are_summed_in_parts() -> None:
    for dtype, part in (("c16", np.float64), ("c8", np.float32)):
        rng = np.random.default_rng(8)
        values = (cancelling(rng, 300) * 2.0**-110 + 1j * near_one(rng, 300)).astype(dtype)
        result = hc.reproducible_sum(parts(values, rng))
        assert result.dtype == dtype
        assert_is(result.real, closest(total(values.real), part), part)
        assert_is(result.imag, closest(total(values.imag), part), part)


@pytest.mark.parametrize("dtype", [bool, *INTEGERS], ids=str)
@pytest.mark.parametrize("axis", [None, 0, ()])
def test_integers_are_those_of_numpy(dtype: Any, axis: Any) -> None:
    given = [np.random.default_rng(rank).integers(0, 100, (4, 3)).astype(dtype) for rank in range(SIZE)]
    result = hc.reproducible_sum(given[RANK], axis=axis)
    expected = sum(np.sum(array, axis=axis) for array in given)
    assert result.dtype == expected.dtype
    assert (result == expected).all()
    dot = hc.reproducible_dot(given[RANK], given[RANK])
    assert dot == sum(int(value) ** 2 for array in given for value in array.ravel())


@pytest.mark.serial
@pytest.mark.skipif(fastpath is None, reason="no compiled extension")
@pytest.mark.parametrize("n", [*range(10), 1023, CHUNK])
def test_the_compiled_extension_sums_what_two_grids_have_room_for(n: int) -> None:
    rng = np.random.default_rng(n)
    for low, high in ((-44, 0), (-1074, -1040), (950, 990)):
        values = np.ldexp(rng.uniform(-1, 1, n), rng.integers(low, high, n))
        parts = exact_rows.two_grid_sums(values, 0, CHUNK, SPARE, HUGE)
        if n == 0:
            assert parts is None
            continue
        assert parts is not None
        end, integers = parts
        assert end == n
        assert sum(number * Fraction(2) ** exponent for number, exponent in integers) == total(values)
    for other in (INF, -INF, NAN, -NAN, 2.0**1000, 2.0**-200):
        values = np.ones(n + 1)
        values[rng.integers(n + 1)] = other
        assert exact_rows.two_grid_sums(values, 0, CHUNK, SPARE, HUGE) is None or (n == 0 and other == 2.0**-200)


@in_both_ways
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.filterwarnings("error")
def test_a_sum_that_is_too_large_is_infinite_without_a_warning(dtype: str) -> None:
    values = np.full(3, np.finfo(dtype).max, dtype)
    with np.errstate(all="raise"):
        assert hc.reproducible_sum(values) == np.inf
        assert hc.reproducible_sum(-values) == -np.inf
        assert hc.reproducible_norm(values) == np.inf


@pytest.mark.parametrize("n", [4096, 3 * 4096, CHUNK])  # 4096 times the bits of 1.5 * 2^k are 2^63, modulo 2^64
def test_nothing_warns_or_raises_where_integers_wrap_around(n: int) -> None:
    with np.errstate(all="raise"):
        for value in (-1.0, 1.0, 2.0**-1074):
            own = np.full(n if RANK == 0 else 0, value)
            assert_is(hc.reproducible_sum(own), n * value)
            assert_is(hc.reproducible_sum(own.reshape(1, -1), axis=1)[0], n * value)


@pytest.mark.serial
@pytest.mark.skipif(fastpath is None, reason="no compiled extension")
def test_the_compiled_extension_goes_on_until_a_number_does_not_fit() -> None:
    values = np.random.default_rng(1).uniform(-1, 1, 100)
    for other in (4.0, -4.0, NAN, INF, 1.1 * 2.0**-90):
        values[70] = other
        for calls in (
            lambda start: exact_rows.two_grid_sums(values, start, 10, SPARE, HUGE),
            lambda start: exact_rows.product_sums(values, np.ones(100), start, 10, SPARE, HUGE),
        ):
            end, integers = calls(20)  # type: ignore[misc]
            assert end == 70
            assert sum(number * Fraction(2) ** exponent for number, exponent in integers) == total(values[20:70])
            assert (calls(70) is None) is (abs(other) != 4)


@pytest.mark.serial
@pytest.mark.skipif(fastpath is None, reason="no compiled extension")
@pytest.mark.parametrize("n", [*range(1, 10), 1023])
def test_the_compiled_extension_adds_up_products_and_their_errors(n: int) -> None:
    rng = np.random.default_rng(n)
    for low, high in ((-10, 10), (-470, -452), (470, 488)):
        x, y = (np.ldexp(rng.uniform(0.5, 1, n), rng.integers(low, high, n)) for _ in range(2))
        y *= rng.choice([-1.0, 1.0], n)
        x[::3] = 0.0
        found = exact_rows.product_sums(x, y, 0, CHUNK, SPARE, HUGE)
        assert found is not None
        assert found[0] == n
        expected = sum((Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist())), Fraction(0))
        assert sum(number * Fraction(2) ** exponent for number, exponent in found[1]) == expected


@several
def test_a_rank_outside_the_group_is_warned_and_gets_nothing() -> None:
    group = hc.new_group([0])
    if RANK == 0:
        assert_is(hc.reproducible_norm(np.array([3.0, 4.0]), group), 5.0)
        hc.destroy_process_group(group)
        return
    with pytest.warns(RuntimeWarning, match="reproducible_sum: this rank is not in"):
        assert hc.reproducible_sum(np.ones(2), group=group) is None
    assert hc.reproducible_dot(np.ones(2), np.ones(2), group) is None
    assert hc.reproducible_norm(np.ones(2), group) is None


# -- over axes ---------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (-2, -1), (), (0, 1, 2), None])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_axes(kind: Kind, axis: Any, dtype: Any) -> None:
    shape = (5, 4, 3)
    with np.errstate(over="ignore", under="ignore"):
        given = [
            (kind(np.random.default_rng([rank, 1]), 60) * (1 if dtype == "f8" else 2.0**-900 * 2.0**-2)).astype(dtype)
            for rank in range(SIZE)
        ]
    given = [array.reshape(shape) for array in given]
    result = hc.reproducible_sum(given[RANK], axis=axis)
    exact = [np.vectorize(Fraction, otypes=[object])(array.astype(float)) for array in given]
    expected = np.asarray(sum(np.asarray(each.sum(axis=axis)) for each in exact))
    assert result.shape == expected.shape
    for value, number in zip(np.ravel(result), expected.ravel()):
        assert_is(value, closest(number, dtype), dtype)


@in_both_ways
@pytest.mark.parametrize("shape", [(40000, 3), (3, 40000), (1000, 100), (70000, 1), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_any_length(shape: tuple[int, int], axis: int) -> None:
    given = np.random.default_rng(4).standard_normal(shape) * 2.0 ** np.arange(shape[1]).clip(0, 90)
    given[:, ::2] *= -1
    result = hc.reproducible_sum(given, axis=axis)
    expected = [math.fsum(np.repeat(row, SIZE)) for row in np.moveaxis(given, axis, -1)]
    assert bits(result) == bits(np.array(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout(layout: Any) -> None:
    given = [np.random.default_rng([rank, 5]).standard_normal((30, 40)) for rank in range(SIZE)]
    for axis in (0, 1):
        expected = [math.fsum(row) for row in np.moveaxis(np.concatenate(given, axis), axis, 1)]
        assert bits(hc.reproducible_sum(layout(given[RANK]), axis=axis)) == bits(np.array(expected))


def test_rows_have_different_special_values() -> None:
    rows = np.array([[INF, 1.0], [-INF, 1.0], [INF, -INF], [NAN, 1.0], [1e308, 1e308], [0.1, 0.2]])
    own = rows[:, RANK::SIZE] if RANK < 2 else rows[:, :0]
    np.testing.assert_array_equal(hc.reproducible_sum(own, axis=1), [INF, -INF, NAN, NAN, INF, math.fsum([0.1, 0.2])])
    result = hc.reproducible_sum(own * (1 + 1j), axis=1) if SIZE == 1 else None
    assert result is None or np.isnan(result[3])


@pytest.mark.serial
@pytest.mark.parametrize("ranks", [1, 1023, 1 << 20, (1 << 31) - 1])
@pytest.mark.parametrize("rows", [1, 9])
def test_carries_are_taken_before_digits_overflow(rows: int, ranks: int) -> None:
    sums = exact_rows.ExactRows(rows, (1024, 1074, 0), ranks)
    expected = Fraction(0)
    for i in range(5000):
        number, exponent = (1 << 62) - 1 - i, (-i % 7) - 30
        sums._add_integers(0, -number, exponent)
        sums._add_integers(slice(None), np.full(rows, number), exponent)
        expected += number * Fraction(2) ** exponent
    sums.add(np.zeros((rows, 0)))
    assert ranks * int(abs(sums.digits).max()) < 1 << 63  # so the other ranks' can be added
    result = sums.rounded(np.dtype("f8"))
    assert_is(result[0], 0.0)
    for value in result[1:]:
        assert_is(value, closest(expected))


# -- products ----------------------------------------------------------------------------------------


def squares(values: Any) -> Fraction:
    return sum((Fraction(value) ** 2 for value in np.ravel(values).tolist()), Fraction(0))


@in_both_ways
@every_kind
@pytest.mark.parametrize("other", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_a_dot_product_is_the_closest_number(kind: Kind, other: Kind) -> None:
    rng = np.random.default_rng([KINDS.index(kind), KINDS.index(other)])
    x, y = kind(rng, 200), other(rng, 200)
    x[5] = y[8] = 0.0
    expected = closest(sum((Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist())), Fraction(0)))
    for _ in range(3):
        ends = np.sort(rng.integers(0, 201, SIZE - 1))
        assert_is(hc.reproducible_dot(np.split(x, ends)[RANK], np.split(y, ends)[RANK]), expected)
        order = rng.permutation(200)
        x, y = x[order], y[order]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_of_all_dtypes(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal(100).astype(dtype) for _ in range(2))
    pairs = zip(x.tolist(), y.tolist())
    ends = np.sort(rng.integers(0, 101, SIZE - 1))
    result = hc.reproducible_dot(np.split(x, ends)[RANK], np.split(y, ends)[RANK])
    assert_is(result, closest(sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0)), dtype), dtype)


def test_products_of_complex_numbers_are_not_conjugated() -> None:
    rng = np.random.default_rng(12)
    x, y = (near_one(rng, 60) + 1j * near_one(rng, 60) for _ in range(2))
    result = hc.reproducible_dot(x[RANK::SIZE], y[RANK::SIZE])
    a, b, c, d = ([Fraction(value) for value in part.tolist()] for part in (x.real, x.imag, y.real, y.imag))
    assert_is(result.real, closest(sum(p * r - q * s for p, q, r, s in zip(a, b, c, d))))
    assert_is(result.imag, closest(sum(p * s + q * r for p, q, r, s in zip(a, b, c, d))))
    np.testing.assert_allclose(result, np.dot(x, y))


@in_both_ways
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([INF], [0.0], NAN),
        ([INF, 1.0], [-2.0, 1.0], -INF),
        ([INF, INF], [1.0, -1.0], NAN),
        ([0.0, NAN], [0.0, 0.0], NAN),
        ([1e200, 1e200], [1e200, 1e200], INF),
        ([1e200, -1e200, 3.0], [1e200, 1e200, 1.0], 3.0),
        ([2.0**-1074, 1.0], [2.0**-1074, 1.0], 1.0),
        ([2.0**-1074] * 2, [0.5] * 2, 2.0**-1074),
    ],
)
def test_products_of_special_values(x: list[float], y: list[float], expected: float) -> None:
    assert_is(hc.reproducible_dot(np.array(x)[RANK::SIZE], np.array(y)[RANK::SIZE]), expected)


def test_a_product_without_a_value_is_no_exception() -> None:
    with np.errstate(all="raise"):
        assert np.isnan(hc.reproducible_dot(np.array([INF], "f4"), np.zeros(1, "f4")))


@every_kind
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_a_norm_is_the_closest_number(kind: Kind, dtype: Any) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    with np.errstate(over="ignore", under="ignore"):
        values = kind(rng, 100).astype(dtype)
        values[~np.isfinite(values)] = 1.0
    norm = hc.reproducible_norm(parts(values, rng))
    assert norm.dtype == dtype
    exact = squares(values)
    if math.isinf(norm):  # from the middle between the largest number and the next one, which would be a power of two
        assert exact >= ((Fraction(float(np.finfo(dtype).max)) + 2 ** int(np.finfo(dtype).maxexp)) / 2) ** 2
        return
    below, value, above = (Fraction(float(each)) for each in (np.nextafter(norm, -norm), norm, np.nextafter(norm, INF)))
    assert ((below + value) / 2) ** 2 <= exact <= ((value + above) / 2) ** 2


def test_norms_of_special_values_integers_and_complex_numbers() -> None:
    first = RANK == 0
    assert_is(hc.reproducible_norm(np.array([3, 4]) if first else np.zeros(0, int)), 5.0)
    assert_is(hc.reproducible_norm(np.array([3 + 4j] if first else [], "c8")), 5.0, "f4")
    assert_is(hc.reproducible_norm(np.array([-INF, 1.0] if first else [])), INF)
    assert_is(hc.reproducible_norm(np.array([NAN, INF] if first else [])), NAN)
    assert_is(hc.reproducible_norm(np.zeros(3)), 0.0)
    assert_is(hc.reproducible_norm(np.array([2.0**-1074] if first else [])), 2.0**-1074)


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hc.reproducible_sum(np.ones(2, np.longdouble)), TypeError, "array is float.*expected float64 or less"),
        (lambda: hc.reproducible_sum(np.ones(2, "M8[s]")), TypeError, "array is datetime64"),
        (lambda: hc.reproducible_norm(np.ones(2, ">f8")), TypeError, "x has a foreign byte order"),
        (lambda: hc.reproducible_sum([1.0]), TypeError, "reproducible_sum: array is"),
        (lambda: hc.reproducible_sum(np.ones(2), axis=1), ValueError, "axis is 1; expected different axes of the 1"),
        (lambda: hc.reproducible_sum(np.ones((2, 2)), axis=(0, -2)), ValueError, r"axis is \(0, -2\)"),
        (lambda: hc.reproducible_sum(np.ones(2), axis=0.5), TypeError, "axis is 0.5; expected an integer"),
        (lambda: hc.reproducible_dot(np.ones(2), np.ones(3)), ValueError, r"the shapes \(2,\) and \(3,\)"),
        (lambda: hc.reproducible_dot(np.ones(2), np.ones(2, "f4")), TypeError, "x and y are float64 and float32"),
    ],
)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["reproducible_sum", "reproducible_norm"])
def test_in_a_coalescing_block_there_would_be_no_sum_yet(name: str) -> None:
    with (
        hc.coalescing(),
        pytest.raises(hc.UnsupportedOperationError, match=f"{name}: can't be collected in a coalescing"),
    ):
        getattr(hc, name)(np.ones(2))


@several
@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_other_shapes_are_refused_on_all_ranks(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"what remains of array is .* of the shape .* on another rank"):
        hc.reproducible_sum(np.ones((2, 3 + (RANK == 1)), dtype), axis=0)


@several
@pytest.mark.parametrize("dtypes", ["f8 f4", "c8 c16", "f8 c16", "f8 i8", "i8 u8"])
def test_other_dtypes_are_refused_on_all_ranks(dtypes: str) -> None:
    x = np.ones(2, dtypes.split()[RANK > 0])
    for call in (hc.reproducible_sum, hc.reproducible_norm, lambda x: hc.reproducible_dot(x, x)):
        with pytest.raises(ValueError, match=rf"the dtype is {x.dtype} here, but another on another rank"):
            call(x)


@several
def test_two_groups_sum_on_their_own() -> None:
    group, _ = hc.new_subgroups(1)
    assert_is(hc.reproducible_sum(np.array([RANK + 0.5]), group=group), RANK + 0.5)
    hc.destroy_process_group(group)


FLUSH = """
#include <xmmintrin.h>
void flush(int on) { _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040); }
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("cc") is None, reason="needs a C compiler on x86-64")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: hc.reproducible_sum(x),
        lambda x: hc.reproducible_sum(x.reshape(1, 3), axis=1),
        lambda x: hc.reproducible_dot(x, x),
        lambda x: hc.reproducible_norm(x),
        lambda x: hc.all_reduce(x, "reproducible_sum"),
    ],
)
def test_a_thread_that_flushes_subnormal_numbers_to_zero_is_refused(call: Any, tmp_path: Path) -> None:
    """As it does after a library has been loaded that gcc has built with -ffast-math: the sum would be 0."""
    (tmp_path / "flush.c").write_text(FLUSH)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "flush.so", tmp_path / "flush.c"], check=True)
    flush = ctypes.PyDLL(str(tmp_path / "flush.so")).flush
    flush(1)
    try:
        with pytest.raises(hc.DistError, match="flush subnormal numbers to zero"):
            call(np.full(3, 5e-324))
    finally:
        flush(0)
    assert hc.reproducible_sum(np.full(3, 5e-324)) == 3 * hc.get_world_size() * 5e-324
