"""hpccomm, with one call for each array instead of one coalesced call for all."""

from __future__ import annotations

import hpccomm as hc

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Unsupported
from .hpccomm_calls import HPCComm


class OneByOne(HPCComm):
    """The loop that a coalesced operation replaces."""

    name = "one_by_one"

    def _call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if benchmark.kind != "coalesced" or async_op:
            raise Unsupported("one by one is compared with blocking coalesced operations")
        return super()._call(benchmark, case, arrays, async_op)

    def all_reduce_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """all_reduce of each."""
        op, group = self._op(case), self._group

        def call() -> None:
            for array in arrays.receive:
                hc.all_reduce(array, op, group)

        return call

    def broadcast_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Broadcast of each."""
        root, group = self._root(case), self._group

        def call() -> None:
            for array in arrays.receive:
                hc.broadcast(array, root, group)

        return call

    def all_gather_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """all_gather_single of each."""
        group = self._group

        def call() -> None:
            for output, array in zip(arrays.receive, arrays.send, strict=True):
                hc.all_gather_single(output, array, group)

        return call

    def reduce_scatter_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """reduce_scatter_single of each."""
        op, group = self._op(case), self._group

        def call() -> None:
            for output, array in zip(arrays.receive, arrays.send, strict=True):
                hc.reduce_scatter_single(output, array, op, group)

        return call
