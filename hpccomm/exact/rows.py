"""Exact sums of rows of numbers: integers made of digits, which are added over all ranks and rounded once.

The digits of a sum are int64 with enough free bits to add the digits of all ranks, by any backend, in any order
(R. Hallberg, A. Adcroft: An order-invariant real-to-integer conversion sum, Parallel Computing 40, 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import frexp, inf, isqrt, ldexp
from typing import Any, TypeAlias

import numpy as np

from ..native import fastpath
from .sums import (
    CHUNK,
    HUGE,
    LAST_BIT,
    PART,
    PRECISION,
    SPARE,
    contiguous,
    count_specials,
    grid_sums,
    largest,
    need_subnormals,
    product_with_error,
)

Bits: TypeAlias = tuple[int, int, int]  # the result of `bits_of`
Parts: TypeAlias = tuple[int, list[tuple[int, int]]]  # the end of the summed part, and integers with their exponents

try:
    if fastpath is None:  # compiled code is switched off
        raise ImportError
    from ..native._sums import add_rows, extent, product_sums, two_grid_sums
except ImportError:
    add_rows = None  # type: ignore[assignment]

    def two_grid_sums(*_: Any) -> None:  # type: ignore[misc]
        """Leave it to `grid_sums`, `product_with_error` or `bits_of`."""

    product_sums = extent = two_grid_sums  # type: ignore[assignment]


NARROW = 256  # columns of a chunk of many rows
FEW = 8  # up to so many sums are rounded in Python; NumPy is faster for more
NOTHING: Bits = (-4096, -4096, 0)
ANYTHING: Bits = (1024, -LAST_BIT, 1)
ANY_PRODUCTS: Bits = (2048, -2 * LAST_BIT, 1)
WIDEST = 53  # bits of a digit at most, as in a float64
OF_A_ROW = 64 + WIDEST  # bits above a row's numbers: for the sum of 2^64 of them, and a digit for the sign
TWO_GRIDS = 2 * (52 - SPARE) - 1  # two grids cover so many bits without a remainder


def bits_of(values: Any, precision: int = 53) -> Bits:
    """Return the bit range of an array as three numbers; their maxima over all ranks hold for all arrays.

    All values, of `precision` bits, are below 2^first and multiples of 2^-second. The third number is 1 if a value is
    not finite.
    """
    need_subnormals()
    first, second, third = NOTHING
    flat = values.ravel("K")
    for start in range(0, flat.size, CHUNK):
        chunk = np.ascontiguousarray(flat[start : start + CHUNK], np.float64)
        top, lowest = extent(chunk) or (0.0, 0.0)
        if not top:
            sizes = np.abs(chunk)
            is_finite = np.isfinite(sizes)
            if not is_finite.all():
                third = 1
                sizes[~is_finite] = 0.0
            top = float(sizes.max())
            lowest = float(sizes.min(where=sizes > 0, initial=inf))
        if top:
            first = max(first, frexp(top)[1])
            second = max(second, -max(frexp(lowest)[1] - precision, LAST_BIT))
    return first, second, third


def _chunks(rows: Any) -> Iterator[tuple[slice, Any]]:
    """Yield all numbers as contiguous float64 chunks of some rows and columns, each with the slice of its rows."""
    count, columns = rows.shape
    if not rows.size:
        return
    height = min(count, CHUNK // min(columns, NARROW))
    width = min(columns, CHUNK // height)
    for row in range(0, count, height):
        for column in range(0, columns, width):
            chosen = slice(row, row + height)
            yield chosen, np.ascontiguousarray(rows[chosen, column : column + width], np.float64)


class ExactRows:
    """The sums of `count` rows: `digits[i]` counts 2^(`last_bit` + `width` i), `specials` nan, inf and -inf.

    `bits` is ANYTHING, ANY_PRODUCTS, or the maxima of the results of `bits_of` on all ranks. The memory of so many
    `ranks` is added. A sum on one rank may have `above` bits above its numbers.
    """

    def __init__(self, count: int, bits: Bits, ranks: int, above: int = OF_A_ROW) -> None:
        need_subnormals()
        first, second, self.has_specials = self._bits = bits
        self.width = min(WIDEST, 63 - ranks.bit_length())
        self.last_bit = -second
        size = max(3 if above else 0, -(-(first + second + above) // self.width))
        self.memory = np.zeros((size + 3 * self.has_specials, count), np.int64)
        self.digits, self.specials = self.memory[:size], self.memory[size:]
        self._fits_two_floats = size <= 2 and first + second + above + ranks.bit_length() <= self.width + WIDEST
        self._many = 1 << (62 - self.width)  # additions before a digit may overflow
        self._additions = 0

    def add(self, rows: Any) -> None:
        """Add the elements of each row."""
        first, second, has_specials = self._bits
        grid = max(first + 1 + SPARE, -1022)
        if len(rows) == 1:
            self._add_row(rows[0])
        elif add_rows is not None and not has_specials and grid < frexp(HUGE)[1] and first + second <= TWO_GRIDS:
            self._add_on_two_grids(rows, grid)
        else:
            for chosen, chunk in _chunks(rows):
                self._add_chunk(chosen, chunk)
        self._carry()

    def add_products(self, x: Any, y: Any, is_subtracted: bool = False) -> None:
        """Add the products of the elements of two 1-D arrays of the same size to the only row."""
        for a, b in contiguous(x, y):
            if is_subtracted:
                a = -a
            if x.dtype.itemsize <= 4:  # 24 bits by 24 bits
                with np.errstate(all="ignore"):  # inf times 0
                    self._add_row(a * b)
                continue
            start = 0
            while start < a.size:
                if parts := product_sums(a, b, start, CHUNK, SPARE, HUGE):
                    start = self._add_parts(parts)
                else:
                    chunk = slice(start, start + PART)
                    self._add_any_products(a[chunk], b[chunk])
                    start += PART
        self._carry()

    def cut(self, values: Any) -> None:
        """Make each element of a flat array a row."""
        for start in range(0, values.size, PART):
            chosen = slice(start, start + PART)
            rest = values[chosen].astype(np.float64)
            if self.has_specials:
                self.specials[:, chosen] = count_specials(rest[:, None])
                rest[~np.isfinite(rest)] = 0.0
            with np.errstate(all="ignore"):  # underflow only affects bits below this digit
                for i in reversed(range(len(self.digits))):
                    exponent = self.last_bit + self.width * i
                    digits = np.trunc(_scaled(rest, -exponent))
                    self.digits[i, chosen] = digits
                    rest -= digits * 2.0**exponent

    def _add_row(self, values: Any) -> None:
        for (numbers,) in contiguous(values):
            start = 0
            while start < numbers.size:
                if parts := two_grid_sums(numbers, start, CHUNK, SPARE, HUGE):
                    start = self._add_parts(parts)
                else:
                    self._add_chunk(slice(1), numbers[None, start : start + CHUNK])
                    start += CHUNK

    def _add_parts(self, parts: Parts) -> int:
        end, integers = parts
        for number, exponent in integers:
            self._add_integers(0, number, exponent)
        return end

    def _add_chunk(self, chosen: slice, values: Any) -> None:
        top = largest(values)
        if not top < inf:
            self.specials[:, chosen] += count_specials(values)
            values = np.where(np.isfinite(values), values, 0.0)
            top = largest(values)
        for sums, exponent in grid_sums(values, top):
            self._add_integers(chosen, sums, exponent)

    def _add_on_two_grids(self, rows: Any, grid: int) -> None:
        second = max(grid - 52 + SPARE, -1022)
        sums, totals = np.empty((2, len(rows)), np.uint64), np.zeros((4, len(rows)), np.int64)
        is_regular = rows.flags.aligned and rows.itemsize in rows.strides and min(rows.strides) >= 0
        if is_regular and rows.dtype == np.float64:
            add_rows(rows, grid, second, CHUNK, sums, totals)
        else:
            for chosen, chunk in _chunks(rows):
                own = np.zeros((4, len(chunk)), np.int64)
                add_rows(chunk, grid, second, CHUNK, np.empty((2, len(chunk)), np.uint64), own)
                totals[:, chosen] += own
        for numbers, exponent in zip(totals, (grid - 20, grid - 52, second - 20, second - 52)):
            self._add_integers(slice(None), numbers, exponent)

    def _add_any_products(self, x: Any, y: Any) -> None:
        product, error, is_exact = product_with_error(x, y)
        if not is_exact.all():
            x, y = self._without_rare(x, y, product, is_exact)
            product, error, _ = product_with_error(x, y)
        self._add_row(product)
        self._add_row(error)

    def _without_rare(self, x: Any, y: Any, product: Any, is_exact: Any) -> tuple[Any, Any]:
        """Add the products that `product_with_error` can't compute exactly, one by one; return the other factors."""
        is_finite = np.isfinite(x) & np.isfinite(y)
        self.specials[:, 0] += count_specials(np.where(is_finite, 0.0, product))
        rare = ~is_exact & is_finite
        for a, b in zip(x[rare].tolist(), y[rare].tolist()):
            (m, e), (n, f) = frexp(a), frexp(b)
            high, low = divmod(int(ldexp(m, 53)) * int(ldexp(n, 53)), 1 << 53)
            self._add_integers(0, high, e + f - 53)
            self._add_integers(0, low, e + f - 106)
        return np.where(is_exact, x, 0.0), np.where(is_exact, y, 0.0)

    def _add_integers(self, rows: slice | int, numbers: Any, exponent: int) -> None:
        """Add numbers * 2^exponent, multiples of the last bit: an int64 for each of `rows`, or an int for one row."""
        bit = exponent - self.last_bit
        if bit < 0:
            numbers, bit = numbers >> -bit, 0  # no digits are lost
        first, shift = divmod(bit, self.width)
        rest, mask = numbers >> (self.width - shift), (1 << self.width) - 1
        self.digits[first, rows] += (numbers << shift) & mask
        self.digits[first + 1, rows] += rest & mask
        self.digits[first + 2, rows] += rest >> self.width
        self._additions += 1
        if self._additions == self._many:
            self._carry()

    def _carry(self) -> None:
        """Carry, so that all digits except the last (which has the sign) are in -1 <= digit <= 2^width."""
        self._additions = 0
        for _ in range(2):
            carried = self.digits[:-1] >> self.width
            self.digits[:-1] &= (1 << self.width) - 1
            self.digits[1:] += carried

    def rounded(self, dtype: np.dtype[Any], of_roots: bool = False) -> Any:
        """Return the numbers of `dtype` closest to the sums in `memory` (of all ranks), or to their square roots."""
        count = self.memory.shape[1]
        result = np.empty(count)
        with np.errstate(all="ignore"):
            if count <= FEW:
                closest = _closest_root if of_roots else _closest
                for row, digits in enumerate(self.digits.T.tolist()):
                    number = 0
                    for digit in reversed(digits):
                        number = (number << self.width) + digit
                    result[row] = closest(number, self.last_bit, PRECISION[dtype.name])
            else:
                at_once = self._fits_two_floats and dtype.name != "bfloat16"
                for start in range(0, count, PART):
                    chosen = slice(start, start + PART)
                    result[chosen] = (self._add_two if at_once else self._all_closest)(self.digits[:, chosen], dtype)
            if self.has_specials and self.specials.any():
                nans, plus, minus = self.specials > 0
                result[plus] = inf
                result[minus] = -inf
                result[nans | (plus & minus)] = np.nan
            return result.astype(dtype)

    def _add_two(self, sums: Any, dtype: np.dtype[Any]) -> Any:
        """Add the two digits of each sum as float64, which holds each of them exactly: only one rounding."""
        if not len(sums):
            return 0.0
        low, high = sums[0], (sums[1] if len(sums) == 2 else np.int64(0)) + (sums[0] >> self.width)
        low = (low & ((1 << self.width) - 1)).astype(np.float64)
        high = high.astype(np.float64) * 2.0**self.width
        total = high + low
        if dtype.itemsize < 8:
            _make_odd(total, low - (total - high))
        return total * 2.0**self.last_bit

    def _all_closest(self, sums: Any, dtype: np.dtype[Any]) -> Any:
        """Return the float64 closest to each sum; for a smaller dtype, one that rounds to its closest number.

        If bits are lost, that is the neighbour with the last bit set (S. Boldo, G. Melquiond: Emulation of a FMA and
        correctly rounded sums, IEEE Transactions on Computers 57, 2008).
        """
        width, precision = self.width, PRECISION[dtype.name]
        digits = np.zeros((len(sums) + 3, sums.shape[1]), np.int64)  # two below: each sum has three; one for the sign
        digits[2:-1] = sums
        _carry_all(digits, width)
        is_negative = digits[-1] < 0
        np.negative(digits, where=is_negative, out=digits)
        _carry_all(digits, width)
        is_set = digits != 0
        top = len(digits) - 1 - is_set[::-1].argmax(axis=0)  # for a sum of 0 it is the last digit, which is unused
        high, middle, low = (np.take_along_axis(digits, top[None] - i, axis=0)[0].view(np.uint64) for i in range(3))
        bits = np.frexp(high.astype(np.float64))[1].astype(np.uint64)  # the bits of high
        word = high << (64 - bits)
        lost = (is_set.argmax(axis=0) < top - 2) & (high > 0)
        for digit, shift in ((middle, bits), (low, bits + width)):
            digit <<= 64 - width
            moved = digit >> shift  # 0 for shifts of 64 or more
            lost |= moved << shift != digit
            word |= moved
        dropped = 64 - (precision + 3) if precision < 53 else 0
        lost |= word & ((1 << dropped) - 1) != 0
        word = word >> dropped | lost
        exponents = self.last_bit + width * (top - 2) + bits.astype(np.int64) - 64 + dropped
        result = np.ldexp(word.astype(np.float64), exponents)
        return np.negative(result, where=is_negative, out=result)


def _carry_all(digits: Any, width: int) -> None:
    """Carry, so that all digits except the last (which has the sign) are in 0 <= digit < 2^width."""
    for lower, upper in pairwise(digits):
        upper += lower >> width
        lower &= (1 << width) - 1


def _scaled(values: Any, exponent: int) -> Any:
    """Return values * 2^exponent; the power itself may be too large for float64."""
    if exponent < 1000:
        return values * 2.0**exponent
    return values * 2.0**900 * 2.0 ** (exponent - 900)


def _make_odd(values: Any, lost: Any) -> None:
    """Replace each value that lost bits in rounding by the neighbour of the exact number with the last bit set."""
    bits = values.view(np.int64)
    is_even = (lost != 0) & (bits & 1 == 0)
    is_below = (lost > 0) == (values > 0)
    bits += is_even & is_below
    bits -= is_even & ~is_below


def _closest(number: int, last_bit: int, precision: int) -> float:
    """Round number * 2^last_bit like `ExactRows._all_closest`."""
    if precision < 53:
        dropped = max(number.bit_length() - precision - 3, 0)
        number = number >> dropped | (number & ((1 << dropped) - 1) != 0)
        last_bit += dropped
    try:
        return number / (1 << -last_bit) if last_bit < 0 else float(number << last_bit)  # both round to the closest
    except OverflowError:
        return inf if number > 0 else -inf


def _closest_root(number: int, last_bit: int, precision: int) -> float:
    """Round the square root of number * 2^last_bit like `_closest`; `last_bit` is even."""
    shift = max(128 - number.bit_length(), 0) // 2 * 2
    root = isqrt(number << shift)
    odd = 2 * root + (root * root != number << shift)  # more bits than any dtype; the last is set if others are lost
    return _closest(odd, (last_bit - shift) // 2 - 1, precision)
