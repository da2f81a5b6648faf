"""Sums over the ranks, element by element, without rounding: a reduction with ReduceOp.REPRODUCIBLE_SUM.

Every element is cut into digits at fixed powers of two, on which the ranks agree first. A digit of each rank leaves so
many bits of an int64 free that the digits of all ranks can be added: by any backend, in any order. Each sum is rounded
once (R. Hallberg, A. Adcroft: An order-invariant real-to-integer conversion sum, Parallel Computing 40, 2014).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.backend import Backend, finished
from ..core.calls import Call
from ..core.late import FROM_THE_HOST, ON_THE_HOST, late
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import UnsupportedOperationError, here
from .rows import ExactRows, bits_of
from .sums import PART, PRECISION, count_specials, real_dtype

if TYPE_CHECKING:
    from ..core.operations import Operations

WIDEST = 53  # bits of a digit: those of a float64
Bits = tuple[int, int, int]


class Digits:
    """How numbers are cut into digits: the i-th one counts 2^(`last_bit` + `width` i).

    Parameters
    ----------
    bits : tuple of int
        The largest numbers that `bits_of` returns on any rank.
    ranks : int
        How many ranks' digits are added.
    """

    def __init__(self, bits: Bits, ranks: int) -> None:
        first, second, self.has_specials = self._bits = bits
        self.width = min(WIDEST, 63 - ranks.bit_length())
        self.last_bit = -second
        self.count = max(0, -(-(first + second) // self.width))
        self._largest_sum = first + second + ranks.bit_length()  # in bits

    def of(self, values: Any) -> Any:
        """Return the digits of a flat array, a row for each place; then the counts of nan, inf and -inf, if any are."""
        memory = np.zeros((self.count + 3 * self.has_specials, values.size), np.int64)
        for start in range(0, values.size, PART):
            chosen = slice(start, start + PART)
            rest = values[chosen].astype(np.float64)
            if self.has_specials:
                memory[self.count :, chosen] = count_specials(rest[:, None])
                rest[~np.isfinite(rest)] = 0.0
            with np.errstate(all="ignore"):  # what is too small in it is not in this digit
                for i in reversed(range(self.count)):
                    exponent = self.last_bit + self.width * i
                    digits = np.trunc(_scaled(rest, -exponent))
                    memory[i, chosen] = digits
                    rest -= digits * 2.0**exponent
        return memory

    def rounded(self, memory: Any, dtype: np.dtype[Any]) -> Any:
        """Return the numbers of `dtype` closest to the sums, of which `memory` has all ranks' digits."""
        result = np.empty(memory.shape[1], dtype)
        is_short = self.count <= 2 and self._largest_sum <= self.width + WIDEST and dtype.name != "bfloat16"
        rounding = self._rounded_at_once if is_short and not self.has_specials else self._rounded_by_limbs
        with np.errstate(all="ignore"):
            for start in range(0, result.size, PART):
                chosen = slice(start, start + PART)
                result[chosen] = rounding(memory[:, chosen], dtype)
        return result

    def _rounded_at_once(self, sums: Any, dtype: np.dtype[Any]) -> Any:
        """Add the two digits of each sum as float64, which has room for each of them: one rounding."""
        if not len(sums):
            return np.zeros(sums.shape[1])
        low, high = sums[0], (sums[1] if len(sums) == 2 else np.int64(0)) + (sums[0] >> self.width)
        low = (low & np.int64((1 << self.width) - 1)).astype(np.float64)
        high = high.astype(np.float64) * 2.0**self.width
        total = high + low
        if dtype.itemsize < 8:
            _make_odd(total, low - (total - high))
        return total * 2.0**self.last_bit

    def _rounded_by_limbs(self, sums: Any, dtype: np.dtype[Any]) -> Any:
        rows = ExactRows(sums.shape[1], self._bits)
        for i in range(self.count):
            rows.add_integers(rows.limbs, sums[i], self.width * i)
        rows.specials[...] = sums[self.count :]
        return rows.rounded(dtype)


def _scaled(values: Any, exponent: int) -> Any:
    """Return values * 2^exponent; the power itself may be too large for float64."""
    if exponent < 1000:
        return values * 2.0**exponent
    return values * 2.0**900 * 2.0 ** (exponent - 900)


def _make_odd(values: Any, lost: Any) -> None:
    """Where digits were lost in rounding, take that neighbour of the exact number whose last bit is set.

    It rounds to what the exact number rounds to in a dtype of fewer bits (S. Boldo, G. Melquiond: Emulation of a FMA
    and correctly rounded sums, IEEE Transactions on Computers 57, 2008).
    """
    bits = values.view(np.int64)
    is_even = (lost != 0) & (bits & 1 == 0)
    is_below = (lost > 0) == (values > 0)
    bits += is_even & is_below
    bits -= is_even & ~is_below


def reduce(group: Operations, call: Call, async_op: bool) -> Work | None:
    """Do a reduction with REPRODUCIBLE_SUM; also with `async_op` the agreement on the digits waits for other ranks.

    GPU arrays are added on the host.
    """
    if call.device not in ("cpu", "cuda", "rocm"):
        raise UnsupportedOperationError(
            f"there are no reproducible sums of {call.device} arrays; copy them to the host{here()}", call.name
        )
    backend, named = group.door.backends["cpu"], call.named
    source, target = call.spec.source, call.spec.target
    given = [named[source.name]] if source.form == "one" else named[source.name]
    output = named[target.name]
    part = real_dtype(output.dtype)
    inputs = [_numbers(array, part) for array in given]
    if call.name == "reduce_scatter_single":
        inputs = np.split(inputs[0], group.size)
    digits = Digits(_agreed(backend, call.name, inputs), group.size)
    memories = [digits.of(each) for each in inputs]
    sums = memories[0]
    if target is not source:
        columns = output.size * (output.dtype.itemsize // part.itemsize)
        named[target.name] = sums = np.empty((len(sums), columns), np.int64)
    if call.name == "reduce_scatter_single":
        named[source.name] = np.stack(memories)
    else:
        named[source.name] = memories[0] if source.form == "one" else memories
    named["op"] = ReduceOp.SUM

    def deliver() -> None:
        _write(output, digits.rounded(sums, part).view(output.dtype).reshape(output.shape))

    work: Work | None = getattr(backend, call.name)(*named.values(), async_op)
    is_written = target.is_written(named.get("root") == group.rank) and (call.name != "exscan" or group.rank > 0)
    return finished(work, deliver) if is_written else work


def _numbers(array: Any, part: np.dtype[Any]) -> Any:
    """Return the elements as a flat array on the host, of complex numbers the two parts of each."""
    host = array if isinstance(array, np.ndarray) else late(ON_THE_HOST)(array)
    return np.ascontiguousarray(host).reshape(-1).view(part)


def _write(output: Any, values: Any) -> None:
    if isinstance(output, np.ndarray):
        output[...] = values
    else:
        late(FROM_THE_HOST)(output, values)


def _agreed(backend: Backend, operation: str, inputs: Sequence[Any]) -> Bits:
    """Return the largest bits of all ranks, whose arrays are alike."""
    sizes = [each.size for each in inputs]
    bits = np.max([bits_of(each, PRECISION[each.dtype.name][0]) for each in inputs], axis=0)
    code = zlib.crc32(f"{sizes} {inputs[0].dtype}".encode())
    message = np.array([*bits, code, -code], np.int64)
    work = backend.all_reduce(message, ReduceOp.MAX, False)
    if work is not None:  # of a backend that has only asynchronous operations
        work.wait()
    *agreed, largest, smallest = message.tolist()
    if largest != -smallest:
        raise ValueError(
            f"{operation}: the arrays have {sum(sizes)} {inputs[0].dtype} numbers here, and other sizes or another "
            f"dtype on another rank{here()}"
        )
    first, second, has_specials = agreed
    return first, second, has_specials
