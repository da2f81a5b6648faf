"""What type checkers say of programs: `make lint` runs mypy --strict over this file, and nothing runs the file."""

from __future__ import annotations

import array

import numpy as np
from typing_extensions import assert_type

import hpccomm as hc

x, y = np.ones(3), np.empty((2, 3), np.float32)


def blocking_and_asynchronous(either: bool) -> None:
    work = hc.all_reduce(x, async_op=True)
    assert_type(work, hc.Work)
    assert_type(work.wait(), bool)
    assert_type(hc.all_reduce(x, "sum", None, True), hc.Work)
    assert_type(hc.all_reduce(x, async_op=either), hc.Work | None)
    assert_type(hc.barrier(async_op=True), hc.Work)
    assert_type(hc.all_gather_into_tensor(y, x, async_op=True), hc.Work)
    assert_type(hc.isend(x, dst=1), hc.Work)
    assert_type(hc.irecv(x, src=1).source_rank(), int)
    hc.all_reduce(x).wait()  # type: ignore[attr-defined]


def arrays_and_reductions() -> None:
    hc.all_reduce(array.array("d", [1.0]), hc.ReduceOp.PREMUL_SUM(0.5))
    hc.all_reduce(x, "max")
    hc.all_reduce(x, "maximum")  # type: ignore[call-overload]
    hc.all_reduce([1.0, 2.0])  # type: ignore[call-overload]
    hc.all_reduce("text")  # type: ignore[call-overload]
    hc.broadcast(tensor=x, src=0)


def groups() -> None:
    with hc.init_process_group("cpu:mpi", timeout=60) as world:
        assert_type(world, hc.ProcessGroup)
        assert_type(hc.new_group([0]), hc.ProcessGroup | hc.NonMember)
        hc.all_reduce(x, group=hc.new_group([0]))
    hc.register_backend("mine", lambda options, more: hc.Backend(options.rank, options.size), devices=["cpu"])
