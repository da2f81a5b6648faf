"""Numbers whose sums are hard to get right, and the exact sums: fractions, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

INF = math.inf


def near_one(rng: np.random.Generator, n: int) -> Any:
    return rng.standard_normal(n)


def of_all_sizes(rng: np.random.Generator, n: int) -> Any:
    return np.ldexp(rng.uniform(-1, 1, n), rng.integers(-1120, 1000, n))


def cancelling(rng: np.random.Generator, n: int) -> Any:
    values = np.ldexp(rng.uniform(-1, 1, n), rng.integers(-200, 200, n))
    values[n // 2 : n // 2 * 2] = -values[: n // 2]
    values[: n // 7] *= 1 + 2.0**-50
    return values


def subnormal(rng: np.random.Generator, n: int) -> Any:
    return rng.integers(-(1 << 40), 1 << 40, n) * 2.0**-1074


def near_a_tie(rng: np.random.Generator, n: int) -> Any:
    values = np.zeros(n)
    values[:3] = 1.0, 2.0**-53, rng.choice([-1.0, 0.0, 1.0]) * 2.0**-1074
    return values * rng.choice([-1.0, 1.0])


def too_large_on_the_way(rng: np.random.Generator, n: int) -> Any:
    values = np.ldexp(rng.uniform(0.5, 1, n), 1023)
    values[n // 2 : n // 2 * 2] = -values[: n // 2]
    values[rng.integers(n)] *= 0.5
    return values


KINDS = [near_one, of_all_sizes, cancelling, subnormal, near_a_tie, too_large_on_the_way]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
Kind = Callable[[np.random.Generator, int], Any]


def closest(number: Fraction, dtype: Any = np.float64) -> float:
    """The number of `dtype` closest to a fraction, in exact arithmetic."""
    info = ml_dtypes.finfo(dtype)
    spacing = Fraction(2) ** (int(info.minexp) - int(info.nmant))
    if number:
        exponent = 0
        while abs(number) >= Fraction(2) ** (exponent + 1):
            exponent += 1
        while abs(number) < Fraction(2) ** exponent:
            exponent -= 1
        spacing = max(spacing, Fraction(2) ** (exponent - int(info.nmant)))
    value = round(number / spacing) * spacing  # half to even
    if abs(value) > Fraction(float(info.max)):
        return INF if value > 0 else -INF
    return float(value)


def total(values: Any) -> Fraction:
    return sum((Fraction(value) for value in np.asarray(values).ravel().tolist()), Fraction(0))


def bits(value: Any) -> bytes:
    return np.asarray(value).tobytes()


def assert_is(value: Any, expected: Any, dtype: Any = np.float64) -> None:
    assert value.dtype == np.dtype(dtype)
    if np.isnan(expected):
        assert np.isnan(value)
    else:
        assert bits(value) == bits(np.dtype(dtype).type(expected)), (value, expected)
