"""Exact sums over the ranks, element by element: reductions with ReduceOp.REPRODUCIBLE_SUM.

Every element is one row of `rows.py`. The ranks first agree on powers of two, at which elements are cut into digits.
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
from ..errors import UnsupportedOperationError, on_rank
from .rows import Bits, ExactRows, bits_of
from .sums import PRECISION, real_dtype

if TYPE_CHECKING:
    from ..core.operations import Operations


def reduce(group: Operations, call: Call, async_op: bool) -> Work | None:
    """Run a reduction with REPRODUCIBLE_SUM, on the host also for GPU arrays.

    The call waits for other ranks to agree on the digits, even with `async_op`.
    """
    if call.device not in ("cpu", "cuda", "rocm"):
        raise UnsupportedOperationError(
            f"there are no reproducible sums of {call.device} arrays; copy them to the host{on_rank()}", call.name
        )
    backend, named = group.dispatcher.backends["cpu"], call.named
    source, target = call.spec.source, call.spec.target
    given = [named[source.name]] if source.form == "one" else named[source.name]
    output = named[target.name]
    part = real_dtype(output.dtype)
    inputs = [_numbers(array, part) for array in given]
    if call.name == "reduce_scatter_single":
        inputs = np.split(inputs[0], group.size)
    agreed = _agreed(backend, call.name, inputs)
    rows = [ExactRows(each.size, agreed, group.size, 0) for each in inputs]
    for each, numbers in zip(rows, inputs):
        each.cut(numbers)
    named[source.name] = memories = [each.memory for each in rows]
    if call.name == "reduce_scatter_single":
        named[source.name] = np.stack(memories)
    elif source.form == "one":
        named[source.name] = memories[0]
    sums = rows[0]
    if target is not source:
        sums = ExactRows(output.size * (output.dtype.itemsize // part.itemsize), agreed, group.size, 0)
        named[target.name] = sums.memory
    named["op"] = ReduceOp.SUM

    def deliver() -> None:
        values = sums.rounded(part).view(output.dtype).reshape(output.shape)
        if isinstance(output, np.ndarray):
            output[...] = values
        else:
            late(FROM_THE_HOST)(output, values)

    work: Work | None = getattr(backend, call.name)(*named.values(), async_op)
    is_written = target.is_written(named.get("root") == group.rank) and (call.name != "exscan" or group.rank > 0)
    return finished(work, deliver) if is_written else work


def _numbers(array: Any, part: np.dtype[Any]) -> Any:
    """Return the elements as a flat array on the host; complex numbers become pairs of their parts."""
    host = array if isinstance(array, np.ndarray) else late(ON_THE_HOST)(array)
    return np.ascontiguousarray(host).reshape(-1).view(part)


def _agreed(backend: Backend, operation: str, inputs: Sequence[Any]) -> Bits:
    """Return the largest bits of all ranks; raise ValueError if sizes or dtypes differ between ranks."""
    sizes = [each.size for each in inputs]
    bits = np.max([bits_of(each, PRECISION[each.dtype.name]) for each in inputs], axis=0)
    code = zlib.crc32(f"{sizes} {inputs[0].dtype}".encode())
    message = np.array([*bits, code, -code], np.int64)
    work = backend.all_reduce(message, ReduceOp.MAX, False)
    if work is not None:  # the backend has only asynchronous operations
        work.wait()
    *agreed, largest, smallest = message.tolist()
    if largest != -smallest:
        raise ValueError(
            f"{operation}: the arrays have {sum(sizes)} {inputs[0].dtype} numbers here, and other sizes or another "
            f"dtype on another rank{on_rank()}"
        )
    first, second, has_specials = agreed
    return first, second, has_specials
