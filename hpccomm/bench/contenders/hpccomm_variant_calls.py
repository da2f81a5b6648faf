"""Variants of hpccomm: node-shared arrays, persistent operations, one call for each array."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Benchmark, Case
from .contender import Call, Unsupported
from .hpccomm_calls import HPCComm

if TYPE_CHECKING:
    from mpi4py import MPI

SHARED = ("all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


class Shared(HPCComm):
    """The functions of hpccomm that are faster on node-shared arrays (`hpccomm.empty_shared`) on one node."""

    name = "shared"
    own_arrays = True

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        self._parent = group

    def arrays(self, benchmark: Benchmark, case: Case) -> Arrays:
        """Return arrays in a new group, because their memory is freed with their group."""
        if benchmark.name not in SHARED:
            raise Unsupported(f"{benchmark.name} is the same on node-shared arrays")
        group: Any = hc.split_group(self._parent, 0)
        self.group = group
        return benchmark.arrays(replace(case, allocate=partial(hc.empty_shared, group=group)))

    def release(self) -> None:
        if self.group is not self._parent:
            hc.destroy_process_group(self.group)
            self.group = self._parent


class Persistent(HPCComm):
    """The persistent operations of hpccomm (such as ``all_reduce_init``): set up once, and started many times."""

    name = "persistent"

    def call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of start and wait, for both values of `async_op`."""
        init = getattr(hc, f"{benchmark.name}_init", None)
        if init is None:
            raise Unsupported(f"hpccomm has no {benchmark.name}_init")
        plain: Any = super()._call(benchmark, case, arrays, False)
        operation: hc.PersistentWork = init(*plain.args[:-1])  # without `async_op`

        def call() -> None:
            operation.start()
            operation.wait()

        return call


class OneByOne(HPCComm):
    """One call of hpccomm for each array, in a loop that a coalesced operation would replace."""

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
