"""A plain copy of the array on all ranks at once: the limit set by the machine's memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Contender, Unsupported


class Copy(Contender):
    """`numpy.copyto`, for comparison with all_reduce."""

    name = "copy"
    own_arrays = True

    def arrays(self, benchmark: Benchmark, case: Case) -> Arrays:
        if benchmark.name != "all_reduce":
            raise Unsupported("a copy is compared with all_reduce only")
        return replace(benchmark.arrays(case), send=case.array(case.count), given=None, expected=None)

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if async_op:
            raise Unsupported("a copy is not asynchronous")
        return partial(np.copyto, arrays.send, arrays.receive)
