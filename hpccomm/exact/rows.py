"""Many sums without rounding at once: `exact_sums` for each row of an array, in limbs of the exponents that occur."""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp, inf
from typing import Any

import numpy as np

from ..native import room
from .sums import (
    CHUNK,
    HUGE,
    LAST_BIT,
    LIMB,
    MANY,
    MASK,
    PRECISION,
    SPARE,
    count_specials,
    grid_sums,
    largest,
    need_subnormals,
)

try:
    if room is None:  # it is not wanted
        raise ImportError
    from ..native._sums import add_rows, extent
except ImportError:
    add_rows = None  # type: ignore[assignment]

    def extent(values: Any) -> tuple[float, float] | None:
        """Leave it to `bits_of`."""
        return None


NARROW = 256  # columns of a chunk, where there are many rows
NOTHING = (-4096, -4096, 0)
TWO_GRIDS = 2 * (52 - SPARE) - 1  # bits of which two grids leave nothing


def bits_of(values: Any, precision: int = 53) -> tuple[int, int, int]:
    """Return three numbers for an array, of which the largest over all ranks are needed.

    All values, of `precision` bits, are below 2^first and multiples of 2^-second; the third is 1 if something is not
    finite.
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
    """Yield the numbers of some rows and some of their columns as contiguous float64, until there were all."""
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
    """The sums of some rows: `limbs[i]` counts 2^(`last_bit` + 32 i), `specials` nan, inf and -inf.

    Parameters
    ----------
    count : int
        The number of rows.
    bits : tuple of int
        The largest numbers that `bits_of` returns on any rank.
    """

    def __init__(self, count: int, bits: tuple[int, int, int]) -> None:
        first, second, self.has_specials = self._bits = bits
        self.last_bit = -second
        size = 0 if first == NOTHING[0] else (first + second) // LIMB + 4  # 64 bits for 2^64 numbers, one for the sign
        self.memory = np.zeros((size + 3 * self.has_specials, count), np.int64)
        self.limbs, self.specials = self.memory[:size], self.memory[size:]
        self._additions = 0

    def add(self, rows: Any) -> None:
        """Add the elements of each row."""
        first, second, has_specials = self._bits
        grid = max(first + 1 + SPARE, -1022)
        if add_rows is not None and not has_specials and grid < frexp(HUGE)[1] and first + second <= TWO_GRIDS:
            self._add_on_two_grids(rows, grid)
            return
        for chosen, chunk in _chunks(rows):
            top = largest(chunk)
            if not top < inf:
                for total, counted in zip(self.specials, count_specials(chunk)):
                    total[chosen] += counted
                chunk = np.where(np.isfinite(chunk), chunk, 0.0)
                top = largest(chunk)
            for sums, exponent in grid_sums(chunk, top):
                self.add_integers(self.limbs[:, chosen], sums, exponent - self.last_bit)
        self.carry()

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
            self.add_integers(self.limbs, numbers, exponent - self.last_bit)
        self.carry()

    def add_integers(self, limbs: Any, numbers: Any, bit: int) -> None:
        """Add numbers * 2^bit, which are whole."""
        if bit < 0:
            numbers = numbers >> min(-bit, 63)  # no digits are lost
            bit = 0
        first, shift = divmod(bit, LIMB)
        low, high = (numbers & MASK) << shift, (numbers >> LIMB) << shift
        for limb, digits in zip(limbs[first:], (low & MASK, (low >> LIMB) + (high & MASK), high >> LIMB)):
            limb += digits
        self._additions += 1
        if self._additions == MANY:
            self.carry()

    def carry(self) -> None:
        """Bring all limbs but the last, which has the sign, to 0 <= limb < 2^32."""
        self._additions = 0
        for lower, upper in zip(self.limbs, self.limbs[1:]):
            upper += lower >> LIMB
            lower &= MASK

    def rounded(self, dtype: np.dtype[Any]) -> Any:
        """Return the numbers of `dtype` that are closest to the sums, after all ranks' memory has been added."""
        result = np.zeros(self.memory.shape[1])
        if len(self.limbs):
            self.carry()
            is_negative = self.limbs[-1] < 0
            np.negative(self.limbs, where=is_negative, out=self.limbs)
            self.carry()
            result = _closest(self.limbs, self.last_bit, PRECISION[dtype.name][0])
            np.negative(result, where=is_negative, out=result)
        if self.has_specials:
            nans, plus, minus = self.specials > 0
            result[plus] = inf
            result[minus] = -inf
            result[nans | (plus & minus)] = np.nan
        with np.errstate(all="ignore"):
            return result.astype(dtype)


def _closest(limbs: Any, last_bit: int, precision: int) -> Any:
    """Return the float64 closest to each number; for a smaller precision one that rounds to what is closest there.

    That is the next one whose last bit is set, where digits are lost (S. Boldo, G. Melquiond: Emulation of a FMA and
    correctly rounded sums, IEEE Transactions on Computers 57, 2008).
    """
    digits = np.concatenate([np.zeros((2, limbs.shape[1]), np.uint64), limbs.astype(np.uint64)])
    is_set = digits != 0
    top = len(digits) - 1 - is_set[::-1].argmax(axis=0)  # 0 has the last limb, of which nothing is used
    high, middle, low = (np.take_along_axis(digits, top[None] - i, axis=0)[0] for i in range(3))
    zeros = (LIMB - np.frexp(high.astype(np.float64))[1]).astype(np.uint64)  # before the first digit of high
    word = ((high << np.uint64(LIMB) | middle) << zeros) | (low >> (np.uint64(LIMB) - zeros))
    lost = (is_set.argmax(axis=0) < top - 2) & (high > 0) | ((low << zeros & np.uint64(MASK)) != 0)
    dropped = 64 - (precision + 3) if precision < 53 else 0
    lost |= word & np.uint64((1 << dropped) - 1) != 0
    word = word >> np.uint64(dropped) | lost
    exponents = last_bit + LIMB * (top - 3) - zeros.astype(np.int64) + dropped
    with np.errstate(all="ignore"):
        return np.ldexp(word.astype(np.float64), exponents)
