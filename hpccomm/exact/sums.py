"""Sums without rounding: floating-point numbers as integers at fixed powers of two, which have one sum in any order.

``(x + M) - M`` with M = 1.5 * 2^k rounds x to a multiple of 2^(k-52), the *grid*; what is left over goes to the next
grid, 49 bits below, until nothing is (J. Demmel, H. D. Nguyen: Parallel Reproducible Summation, IEEE Transactions on
Computers 64, 2015, who stop after some grids). All x + M have the exponent of M, so that their bits as integers are
bits(M) + x / 2^(k-52): these are summed, and taken together in limbs of 32 bits in int64 (R. Hallberg, A. Adcroft: An
order-invariant real-to-integer conversion sum, Parallel Computing 40, 2014), which cover all exponents. So do the
limbs of 2^31 ranks fit in an int64 when they are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import frexp, inf, isqrt, ldexp, nan
from typing import Any, TypeAlias

import numpy as np

from ..errors import DistError, here
from ..native import room

Parts: TypeAlias = tuple[int, list[tuple[int, int]]]  # where a sum ends, and integers with their exponents

try:
    if room is None:  # it is not wanted
        raise ImportError
    from ..native._sums import exact_products, product_sums, two_grid_sums
except ImportError:

    def two_grid_sums(values: Any, start: int, chunk: int, spare: int, huge: float) -> Parts | None:
        """Leave it to `grid_sums`."""
        return None

    def product_sums(x: Any, y: Any, start: int, chunk: int, spare: int, huge: float) -> Parts | None:
        """Leave it to `product_with_error`."""
        return None

    def exact_products(x: Any, y: Any, product: Any, error: Any) -> bool:
        """Leave it to `product_with_error`."""
        return False


CHUNK = 1 << 14  # elements at once, so that three copies stay in the cache
PART = CHUNK // 2  # likewise where many temporary arrays are made: so small that malloc keeps their memory
SPARE = 3  # bits: of CHUNK elements below 2^(k-1-SPARE) the sum fits in 63 bits
LAST_BIT = -1074  # of float64: 2^-1074 is its smallest number
LAST_BIT_OF_PRODUCTS = 2 * LAST_BIT
HUGE = 2.0**1000  # from here on x + M might overflow
LIMB = 32
MASK = np.int64((1 << LIMB) - 1)
MANY = 1 << 28  # additions of less than 2^34 that a limb has room for
SMALLEST = [2.0**LAST_BIT, 0.0]
PRECISION = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}


def largest(values: Any) -> float:
    """Return the largest absolute value of an array that is not empty; inf or nan if there is one."""
    return max(float(np.maximum.reduce(values, axis=None)), -float(np.minimum.reduce(values, axis=None)))


def grid_sums(values: Any, top: float) -> Iterator[tuple[Any, int]]:
    """Yield (an int64 sum of each row, the exponent of their unit), which together are the sums of rows of float64.

    The rows have at most CHUNK columns; `top` is the largest absolute value, which is finite.
    """
    if top >= HUGE:
        is_huge = np.abs(values) >= HUGE
        scaled = np.where(is_huge, values, 0.0) * 2.0**-128
        yield from ((sums, exponent + 128) for sums, exponent in grid_sums(scaled, top * 2.0**-128))
        values = np.where(is_huge, 0.0, values)
        top = largest(values)
    above = frexp(top)[1]  # all values are below 2^above
    moved, rest = np.empty(values.shape), values
    while top:
        k = max(above + 1 + SPARE, -1022)  # below, the grid would be finer than float64
        magic = ldexp(1.5, k)
        np.add(rest, magic, out=moved)
        sums = np.add.reduce(moved.view(np.int64), axis=-1)
        bits = _wrapped(values.shape[-1] * (((k + 1023) << 52) + (1 << 51)))  # of magic
        yield np.subtract(sums, bits), k - 52  # `-` would warn where a scalar wraps around
        np.subtract(moved, magic, out=moved)
        if not np.not_equal(moved, rest).any():
            return
        rest = np.subtract(rest, moved, out=None if rest is values else rest)
        above = k - 53


def _wrapped(number: int) -> np.int64:
    """Return an integer modulo 2^64, as int64 arithmetic wraps it."""
    return np.int64((number + (1 << 63)) % (1 << 64) - (1 << 63))


def need_subnormals() -> None:
    """Raise DistError where this thread takes subnormal numbers for 0, on which no exact sum can be built."""
    if SMALLEST[0] + SMALLEST[1] == 0.0:  # not of constants, which Python adds when it compiles this
        raise DistError(
            "a library has switched this thread to flush subnormal numbers to zero (gcc's -ffast-math does, when it is "
            f"loaded), and sums would not be exact; build it with -mno-daz-ftz, or sum in another thread{here()}"
        )


class ExactSum:
    """One sum of float64 numbers, as a Python integer in units of 2^`last_bit`, and the counts of nan, inf and -inf.

    Parameters
    ----------
    last_bit : int
        LAST_BIT, or LAST_BIT_OF_PRODUCTS for products of two numbers.
    """

    def __init__(self, last_bit: int = LAST_BIT) -> None:
        need_subnormals()
        self.last_bit = last_bit
        self.total = 0
        self.specials = [0, 0, 0]
        # Twice the exponents of float64 for products, 64 bits for 2^64 of them, one for the sign
        self.limbs = -(-(last_bit // LAST_BIT * (1024 - LAST_BIT) + 65) // LIMB)

    def add(self, values: Any, sign: int = 1) -> None:
        """Add, or with `sign` -1 subtract, each element of an array of one dimension."""
        for (numbers,) in _contiguous(values):
            start = 0
            while start < numbers.size:
                if parts := two_grid_sums(numbers, start, CHUNK, SPARE, HUGE):
                    start = self._add_parts(parts, sign)
                else:
                    self._add_chunk(numbers[start : start + CHUNK], sign)
                    start += CHUNK

    def _add_parts(self, parts: Parts, sign: int) -> int:
        end, integers = parts
        for number, exponent in integers:
            self.add_integer(sign * number, exponent)
        return end

    def _add_chunk(self, values: Any, sign: int) -> None:
        top = largest(values)
        if not top < inf:
            values = self._without_specials(values, sign)
            top = largest(values)
        for sums, exponent in grid_sums(values, top):
            self.add_integer(sign * int(sums), exponent)

    def add_integer(self, number: int, exponent: int) -> None:
        """Add number * 2^exponent, which is a multiple of the last bit."""
        shift = exponent - self.last_bit
        self.total += number << shift if shift >= 0 else number >> -shift

    def add_products(self, x: Any, y: Any, sign: int = 1) -> None:
        """Add the product of each two elements of arrays of one dimension and of the same size."""
        for a, b in _contiguous(x, y):
            if x.dtype.itemsize <= 4:  # 24 bits by 24 bits
                self.add(a * b, sign)
                continue
            start = 0
            while start < a.size:
                if parts := product_sums(a, b, start, CHUNK, SPARE, HUGE):
                    start = self._add_parts(parts, sign)
                else:
                    chunk = slice(start, start + PART)
                    self._add_any_products(a[chunk], b[chunk], sign)
                    start += PART

    def _add_any_products(self, x: Any, y: Any, sign: int) -> None:
        product, error = np.empty((2, x.size))
        if not exact_products(x, y, product, error):
            product, error, is_exact = product_with_error(x, y)
            if not is_exact.all():
                x, y = self._without_rare(x, y, product, is_exact, sign)
                product, error, _ = product_with_error(x, y)
        self.add(product, sign)
        self.add(error, sign)

    def _without_specials(self, values: Any, sign: int) -> Any:
        """Count what is not finite, and return the rest."""
        counts = count_specials(values)
        for i, count in zip((0, 1, 2) if sign > 0 else (0, 2, 1), counts):
            self.specials[i] += int(count)
        return np.where(np.isfinite(values), values, 0.0)

    def _without_rare(self, x: Any, y: Any, product: Any, is_exact: Any, sign: int) -> tuple[Any, Any]:
        """Add the products that `product_with_error` can't make, one at a time, and return the other factors."""
        is_finite = np.isfinite(x) & np.isfinite(y)
        self._without_specials(np.where(is_finite, 0.0, product), sign)
        rare = ~is_exact & is_finite
        for a, b in zip(x[rare].tolist(), y[rare].tolist()):
            (m, e), (n, f) = frexp(a), frexp(b)
            self.add_integer(sign * int(ldexp(m, 53)) * int(ldexp(n, 53)), e + f - 106)
        return np.where(is_exact, x, 0.0), np.where(is_exact, y, 0.0)

    def message(self) -> Any:
        """Return the sum as an int64 array; the sum of all ranks' arrays is that of their sums."""
        digits = np.frombuffer(self.total.to_bytes(self.limbs * LIMB // 8, "little", signed=True), "<u4")
        message = np.array([*digits, *self.specials], np.int64)
        message[self.limbs - 1] = digits[-1:].view("<i4")[0]  # has the sign
        return message

    def receive(self, message: Any) -> None:
        """Become the sum that a message has."""
        *digits, self.specials[0], self.specials[1], self.specials[2] = message.tolist()
        self.total = 0
        for digit in reversed(digits):
            self.total = (self.total << LIMB) + digit

    def rounded(self, dtype: np.dtype[Any]) -> Any:
        """Return the number of `dtype` that is closest to the sum."""
        special = self._special()
        with np.errstate(over="ignore"):  # an inf is the result, also where it is too large for the dtype
            return dtype.type(rounded(self.total, self.last_bit, dtype) if special is None else special)

    def root(self, dtype: np.dtype[Any]) -> Any:
        """Return the number of `dtype` that is closest to the square root of the sum."""
        special = self._special()
        if special is not None:
            return dtype.type(special)
        shift = max(128 - self.total.bit_length(), 0) // 2 * 2
        root = isqrt(self.total << shift)
        odd = 2 * root + (root * root != self.total << shift)  # more bits than dtype, the last one for all that follow
        with np.errstate(over="ignore"):
            return dtype.type(rounded(odd, (self.last_bit - shift) // 2 - 1, dtype))

    def _special(self) -> float | None:
        not_a_number, plus, minus = self.specials
        if not_a_number or (plus and minus):
            return nan
        return inf if plus else -inf if minus else None


def _contiguous(*arrays: Any) -> Iterator[Sequence[Any]]:
    """Yield arrays of one dimension and of the same size, as float64, in chunks if they have to be converted."""
    if all(each.dtype == np.float64 and each.flags.c_contiguous for each in arrays):
        yield arrays
        return
    for start in range(0, arrays[0].size, CHUNK):
        yield [np.ascontiguousarray(each[start : start + CHUNK], np.float64) for each in arrays]


def count_specials(values: Any) -> tuple[Any, Any, Any]:
    """Return how often nan, inf and -inf are in each row."""
    masks = np.isnan(values), np.isposinf(values), np.isneginf(values)
    nans, plus, minus = (np.count_nonzero(mask, axis=-1) for mask in masks)
    return nans, plus, minus


def product_with_error(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Return x * y as it is rounded, what was rounded off, and where both are exact (Dekker and Veltkamp).

    They are not where something overflows or loses bits below 2^-1074; where a factor is 0, they are.
    """
    with np.errstate(all="ignore"):
        product = x * y
        (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
        error = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
    size = np.abs(product)
    is_exact = (size > 2.0**-960) & (size < 2.0**1020) & (np.abs(x) < 2.0**990) & (np.abs(y) < 2.0**990)
    if not is_exact.all():
        is_exact |= ((x == 0) & np.isfinite(y)) | ((y == 0) & np.isfinite(x))
        error[(x == 0) | (y == 0)] = 0.0
    return product, error, is_exact


def _halves(x: Any) -> tuple[Any, Any]:
    """Return two numbers of 26 bits whose sum is x."""
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def rounded(number: int, last_bit: int, dtype: np.dtype[Any]) -> float:
    """Return number * 2^last_bit, rounded once to the precision of `dtype`, half to even; inf where it is too large."""
    bits, smallest = PRECISION[dtype.name]
    size = abs(number)
    shift = max(size.bit_length() - bits, smallest - last_bit)
    if shift > 0:
        kept, lost = size >> shift, size & ((1 << shift) - 1)
        half = 1 << (shift - 1)
        size = kept + (lost > half or (lost == half and kept & 1))
        last_bit += shift
    try:
        value = ldexp(size, last_bit)
    except OverflowError:
        value = inf
    return -value if number < 0 else value


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the parts of a complex number."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
