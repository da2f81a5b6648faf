"""What type checkers say of programs: `make lint` runs mypy --strict over this file, and nothing runs the file."""

from __future__ import annotations

import array
from typing import Any, assert_type

import numpy as np
from mpi4py import MPI

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


def methods_of_groups(world: hc.ProcessGroup, either: bool) -> None:
    assert_type(world.all_reduce(x, async_op=True), hc.Work)
    assert_type(world.all_reduce(x, "sum", True), hc.Work)
    assert_type(world.all_reduce(x, "sum", async_op=either), hc.Work | None)
    assert_type(world.barrier(async_op=True).wait(), bool)
    assert_type(world.all_gather(list(y), x, async_op=True), hc.Work)
    assert_type(world.send(x, 1, async_op=True), hc.Work)
    assert_type(world.recv(x, 1), int)
    assert_type(world.recv(x, async_op=True).source_rank(), int)
    assert_type(hc.sendrecv(x, 1, y, 1), int)
    assert_type(world.sendrecv(x, 1, y, 1, async_op=True), hc.Work)
    world.all_reduce(x).wait()  # type: ignore[attr-defined]
    world.all_reduce([1.0])  # type: ignore[call-overload]
    world.all_reduce(x, "summ")  # type: ignore[call-overload]
    world.send(x)  # type: ignore[call-overload]
    hc.send(x)  # type: ignore[call-overload]
    hc.isend(x, tag=1)  # type: ignore[call-overload]
    hc.send(x, group_dst=np.int64(1))
    hc.send(tensor=x, dst=1)


def arrays_and_reductions() -> None:
    hc.all_reduce(array.array("d", [1.0]), hc.ReduceOp.PREMUL_SUM(0.5))
    hc.all_reduce(x, "max")
    hc.all_reduce(x, "maximum")  # type: ignore[call-overload]
    hc.all_reduce([1.0, 2.0])  # type: ignore[call-overload]
    hc.all_reduce("text")  # type: ignore[call-overload]
    hc.broadcast(tensor=x, src=0)
    hc.broadcast(x, src=np.int64(0))
    hc.broadcast(x, src=0.5)  # type: ignore[call-overload]


def arguments_that_are_missing_or_unknown(either: bool) -> None:
    hc.all_reduce()  # type: ignore[call-overload]
    hc.all_reduce(nonsense=3, async_op=True)  # type: ignore[call-overload]
    hc.all_reduce(x, nonsense=3, async_op=True)  # type: ignore[call-overload]
    hc.broadcast(x)  # type: ignore[call-overload]
    hc.broadcast(x, src=0, group_src=0)  # type: ignore[call-overload]
    hc.reduce(x, op="max")  # type: ignore[call-overload]
    hc.gather(x, [x])  # type: ignore[call-overload]
    hc.all_gather_single(y)  # type: ignore[call-overload]
    assert_type(hc.broadcast(x, group_src=0, async_op=either), hc.Work | None)
    assert_type(hc.broadcast(x, 0, None, True), hc.Work)
    assert_type(hc.reduce(tensor=x, dst=0, async_op=True), hc.Work)
    assert_type(hc.gather(x, dst=0, async_op=True), hc.Work)
    assert_type(hc.gather(x, None, 0, None, True), hc.Work)
    assert_type(hc.all_gather(tensor_list=list(y), tensor=x, async_op=True), hc.Work)
    assert_type(hc.recv(x), int)
    assert_type(hc.recv(x, group_src=1), int)
    assert_type(hc.irecv(tensor=x), hc.Work)
    assert_type(hc.broadcast_object_list([1], 0, device="cpu", async_op=True), hc.Work)
    assert_type(hc.recv_object_list([1]), int)


class OnBoard:
    """What a program teaches hpccomm by register_device."""

    dtype, size, shape = np.dtype(float), 1, (1,)


class OnBoards(hc.Backend):
    def __init__(self, options: hc.BackendOptions) -> None:
        super().__init__(options.rank, options.size)
        self.comm = options.comm.Dup()
        options.comm.Duplicate()  # type: ignore[union-attr]


def arrays_of_the_program() -> None:
    hc.all_reduce(OnBoard())
    hc.register_backend("boards", lambda options, more: OnBoards(options), devices="board", extended_api=True)
    with hc.TCPStore("localhost", 0, is_master=True) as store:
        assert_type(store.port, int)


def groups(hook: hc.Hook, grid: MPI.Cartcomm) -> None:
    with hc.init_process_group("cpu:mpi", timeout=60) as world:
        assert_type(world, hc.ProcessGroup)
        assert_type(hc.new_group(), hc.ProcessGroup)
        assert_type(hc.new_group([0]), hc.ProcessGroup | hc.NonMember)
        assert_type(hc.split_group(color=1), hc.ProcessGroup)
        assert_type(hc.split_group(world, np.int64(1), key=2), hc.ProcessGroup)
        assert_type(hc.split_group(color=None), hc.ProcessGroup | hc.NonMember)
        assert_type(hc.split_group(split_ranks=[[0]]), hc.ProcessGroup | hc.NonMember)
        assert_type(hc.new_subgroups()[0], hc.ProcessGroup)
        hc.new_group().register_hok()  # type: ignore[attr-defined]
        hc.new_group([0]).register_hook(hook)  # type: ignore[union-attr]
        hc.all_reduce(x, group=hc.new_group([0]))
        hc.new_group(comm=grid.Sub([True]))
        hc.GroupMember.WORLD.register_hook(hook)
        assert_type(world.comm, MPI.Intracomm | Any)
    hc.register_backend("mine", lambda options, more: hc.Backend(options.rank, options.size), devices=["cpu"])
