"""hpccomm, in a group whose reductions are in rank order (``cpu:ordered``)."""

from __future__ import annotations

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Unsupported
from .hpccomm_calls import InAnotherGroup


class Ordered(InAnotherGroup):
    """The functions of hpccomm that reduce, in rank order."""

    name = "ordered"
    configuration = "cpu:ordered"

    def _call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if not benchmark.reduces:
            raise Unsupported(f"{benchmark.name} reduces nothing: it is the same")
        return super()._call(benchmark, case, arrays, async_op)
