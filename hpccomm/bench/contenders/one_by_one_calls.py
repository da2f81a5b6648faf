"""hpccomm, with one call for each array instead of one coalesced call for all."""

from __future__ import annotations

from itertools import repeat

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Unsupported
from .hpccomm_calls import HPCComm


class OneByOne(HPCComm):
    """The loop that a coalesced operation replaces."""

    name = "one_by_one"

    def _call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if benchmark.kind != "coalesced" or async_op:
            raise Unsupported("one by one is compared with blocking coalesced operations")
        single = getattr(self, benchmark.name.removesuffix("_coalesced"))
        received = arrays.receive
        if benchmark.name == "all_gather_coalesced":  # all arrays of rank 0, then of rank 1, ...
            received = [received[i :: len(arrays.send)] for i in range(len(arrays.send))]
        sent = repeat(None) if arrays.send is None else arrays.send
        calls = [single(case, Arrays(receive, send), False) for receive, send in zip(received, sent, strict=False)]

        def call() -> None:
            for each in calls:
                each()

        return call
