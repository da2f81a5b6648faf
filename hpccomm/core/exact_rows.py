"""Many sums without rounding at once: `exact_sums` for each row of an array, in limbs of the exponents that occur."""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp, inf
from typing import Any

import numpy as np

from .exact_sums import CHUNK, LAST_BIT, LIMB, MANY, MASK, PRECISION, count_specials, grid_sums, largest

NARROW = 256  # columns of a chunk, where there are many rows
NOTHING = (-4096, -4096, 0)


def bits_of(rows: Any, precision: int = 53) -> tuple[int, int, int]:
    """Return three numbers, of which the largest over all ranks are needed, for an array of two dimensions.

    All values, of `precision` bits, are below 2^first and multiples of 2^-second; the third is 1 if something is not
    finite.
    """
    first, second, third = NOTHING
    for _, chunk in _chunks(rows):
        sizes = np.abs(chunk)
        top = float(sizes.max())
        if not top < inf:
            third = 1
            sizes[~np.isfinite(sizes)] = 0.0
            top = float(sizes.max())
        if top:
            lowest = float(sizes.min(where=sizes > 0, initial=inf))
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
        first, second, self.has_specials = bits
        self.last_bit = -second
        size = 0 if first == NOTHING[0] else (first + second) // LIMB + 4  # 64 bits for 2^64 numbers, one for the sign
        self.memory = np.zeros((size + 3 * self.has_specials, count), np.int64)
        self.limbs, self.specials = self.memory[:size], self.memory[size:]
        self._additions = 0

    def add(self, rows: Any) -> None:
        """Add the elements of each row."""
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
