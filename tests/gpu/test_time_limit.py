"""Time-outs of NCCL where they are to be errors: communicators that do not block."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.debug import stacks
from hpccomm.nccl import connection

from ..arrays import assert_same
from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
pytestmark = pytest.mark.usefixtures("no_world_left")
NEEDS_TWO = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


def test_a_group_whose_time_outs_are_errors_does_not_block(machine: Any) -> None:
    with hc.init_process_group(on_timeout="raise", timeout=60):
        array = gpus.array(np.array([1.0 + RANK]))
        hc.all_reduce(array)
        assert gpus.values(array) == sum(range(1, SIZE + 1))
        assert "connect, not blocking" in machine.calls
    with hc.init_process_group(on_timeout="abort", timeout=60):
        hc.all_reduce(array)
        assert machine.calls.count("connect") == 1


def test_everything_works_without_blocking() -> None:
    with hc.init_process_group(on_timeout="raise", timeout=60) as world:
        halves = hc.split_group(color=RANK % 2)
        blocking = hc.new_group(on_timeout="abort")
        for group in (world, halves, blocking):
            array = gpus.array(np.array([1.0 + RANK, 2.0]))
            hc.all_reduce(array, group=group)
            assert_same(gpus.values(array), np.array([sum(1.0 + rank for rank in group.ranks), 2.0 * group.size]))
            gathered = gpus.array(np.zeros(group.size))
            hc.all_gather_single(gathered, gpus.array(np.array([float(RANK)])), group=group)
            assert_same(gpus.values(gathered), np.array(group.ranks, float))
            several = [gpus.array(np.full(3, float(i + RANK))) for i in range(4)]
            hc.all_reduce_coalesced(several, group=group)
            for i, each in enumerate(several):
                assert_same(gpus.values(each), np.full(3, sum(float(i + rank) for rank in group.ranks)))
            after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            if group.size > 1:
                sent, received = gpus.array(np.array([float(RANK)])), gpus.array(np.zeros(1))
                works = hc.batch_isend_irecv(
                    [
                        hc.P2POp(hc.isend, sent, group_peer=after, group=group),
                        hc.P2POp(hc.irecv, received, group_peer=before, group=group),
                    ]
                )
                for work in works:
                    work.wait()
                assert gpus.values(received) == group.ranks[before]


def test_a_new_group_is_split_off_a_communicator_that_does_not_block(machine: Any) -> None:
    with hc.init_process_group(on_timeout="raise", timeout=60):
        hc.all_reduce(gpus.array(np.ones(1)))
        array = gpus.array(np.array([1.0 + RANK]))
        group = hc.split_group(color=RANK % 2)
        hc.all_reduce(array, group=group)
        assert gpus.values(array) == sum(1.0 + rank for rank in group.ranks)
        assert machine.calls.count("split") == 1
        assert machine.calls.count("connect, not blocking") == 1


@NEEDS_TWO
def test_a_rank_that_does_not_connect() -> None:
    world = hc.init_process_group(on_timeout="raise", timeout=60)
    group = hc.new_group(timeout=2)
    array = gpus.array(np.ones(1))
    if RANK == 0:
        with pytest.raises(hc.DistTimeoutError, match=r"has not connected the ranks within 2 s.*Has every rank made"):
            hc.all_reduce(array, group=group)
    hc.barrier(group=world)
    hc.all_reduce(array, group=group)  # the first try is gone on with
    assert gpus.values(array) == SIZE


@NEEDS_TWO
@pytest.mark.parametrize(("is_first", "async_op"), [(True, False), (True, True), (False, False)])
def test_a_collective_for_which_nccl_connects_and_that_one_rank_does_not_make(
    is_first: bool, async_op: bool, machine: Any
) -> None:
    with hc.init_process_group(on_timeout="raise", timeout=60):
        group = hc.new_group(timeout=2)
        array = gpus.array(np.ones(1 << 10))
        if is_first:
            group.dispatcher.backends["cuda"]._connect(gpus.own())
        else:
            hc.all_reduce(array[:1], group=group)  # NCCL connects again for another size
        if RANK == 0:
            match = r"all_reduce: NCCL has not connected the ranks within 2 s.* first collective"
            with pytest.raises(hc.DistTimeoutError, match=match):
                hc.all_reduce(array, group=group, async_op=async_op)
            assert machine.calls[-1] == "abort"
            with pytest.raises(hc.DistBackendError, match=r"no end of a call: .*have been ended, and it takes no more"):
                hc.all_reduce(array, group=group)
        else:
            group.dispatcher.backends["cuda"].abort()
        hc.barrier()


@NEEDS_TWO
def test_a_first_message_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    abort, judged = connection.Connection._abort_communicator, []

    def slow_abort(self: Any) -> None:
        judged.extend(call.can_raise for call in stacks.calls_in_flight(without=threading.get_ident()))
        abort(self)

    monkeypatch.setattr(connection.Connection, "_abort_communicator", slow_abort)
    with hc.init_process_group(on_timeout="raise", timeout=60):
        group = hc.new_group(timeout=2)
        array = gpus.array(np.ones(1))
        hc.all_reduce(array, group=group)
        if RANK == 0:
            with pytest.raises(
                hc.DistTimeoutError, match=r"send: NCCL has not connected .* the first message of two ranks both"
            ):
                hc.isend(array, 1, group=group)
            assert judged == [True]  # by the watchdog: it ends by itself, however long the abort takes
        else:
            group.dispatcher.backends["cuda"].abort()
        hc.barrier()


@NEEDS_TWO
def test_later_messages_do_not_wait_for_the_other_rank() -> None:
    for on_timeout in ("abort", "raise"):
        with hc.init_process_group(on_timeout=on_timeout, timeout=60):
            array, pair = gpus.array(np.full(2, float(RANK))), (0, 1)
            hc.all_reduce(gpus.array(np.ones(1)))
            if RANK in pair:  # they meet
                works = hc.batch_isend_irecv([hc.P2POp((hc.isend, hc.irecv)[RANK], array, 1 - RANK)])
                works[0].wait()
            hc.barrier()
            if RANK == 0:
                gpus.write(array, np.array([5.0, 6.0]))
                work = hc.isend(array, 1)
                hc.barrier()
                work.wait()
            else:
                hc.barrier()
            if RANK == 1:
                hc.irecv(array, 0).wait()
                assert_same(gpus.values(array), np.array([5.0, 6.0]))


@NEEDS_TWO
def test_groups_whose_ranks_have_them_in_different_orders_in_a_batch() -> None:
    with hc.init_process_group(on_timeout="raise", timeout=20) as world:
        groups = [hc.new_group(), hc.new_group()]
        for group in groups:  # which connects the group, but no two ranks for messages
            hc.all_reduce(gpus.array(np.ones(1)), group=group)
        if world.rank < 2:
            output, peer = gpus.array(np.zeros(3)), 1 - world.rank
            array = gpus.array(np.full(3, float(world.rank)))
            received, sent = groups if world.rank == 0 else reversed(groups)
            messages = [hc.P2POp(hc.irecv, output, peer, received), hc.P2POp(hc.isend, array, peer, sent)]
            for work in hc.batch_isend_irecv(messages):
                work.wait()
            assert_same(gpus.values(output), np.full(3, float(peer)))


@NEEDS_TWO
def test_a_failure_ends_the_waiting(machine: Any) -> None:
    with hc.init_process_group(on_timeout="raise", timeout=60):
        group = hc.new_group()
        group.dispatcher.backends["cuda"]._connect(gpus.own())
        nccl = group.dispatcher.backends["cuda"]._connection
        if RANK == 0:
            failing = threading.Timer(0.2, nccl.fail, args=("ncclRemoteError (6)",))
            failing.start()
            began = time.monotonic()
            with pytest.raises(hc.DistBackendError, match=r"NCCL reports ncclRemoteError \(6\)"):
                hc.all_reduce(gpus.array(np.ones(1)), group=group)
            assert time.monotonic() - began < 30  # not the group's 60 seconds
            failing.join()
            assert machine.calls[-1] == "abort"
        else:
            nccl.fail("ncclRemoteError (6)")
        hc.barrier()


@pytest.mark.parametrize("on_timeout", ["abort", "raise"])
def test_an_error_of_one_rank_in_connecting_is_every_ranks(
    on_timeout: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpccomm.cuda import seam

    from .stand_in import NCCLError

    nccl = seam.nccl()
    connect = nccl.connect

    def fails(*arguments: Any) -> Any:
        connect(*arguments).abort()
        machine.failures.append(NCCLError("ncclSystemError (2): no memory"))
        nccl.unique_id()

    match = rf"rank {SIZE - 1} could not be connected: NCCL reports ncclSystemError \(2\): no memory"
    with hc.init_process_group(on_timeout=on_timeout, timeout=60):
        array = gpus.array(np.ones(1))
        if RANK == SIZE - 1:
            monkeypatch.setattr(nccl, "connect", fails)
        with pytest.raises(hc.DistBackendError, match=match):
            hc.all_reduce(array)
        monkeypatch.undo()
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE


def test_an_error_of_one_rank_after_connecting_is_every_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpccomm.cuda import seam
    from hpccomm.nccl import connection

    def fails(*_: object) -> None:
        raise MemoryError("no memory for kernels")

    monkeypatch.setattr(connection, "HAVE_KERNELS", set())
    with hc.init_process_group(timeout=60):
        array = gpus.array(np.ones(1))
        if RANK == SIZE - 1:
            monkeypatch.setattr(seam.runtime(), "load_copies", fails)
        match = f"rank {SIZE - 1} could not be connected: .*no memory for kernels"
        with pytest.raises(hc.DistBackendError, match=match):
            hc.all_reduce(array)
        monkeypatch.undo()
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE


@NEEDS_TWO
def test_an_error_comes_before_the_time_outs_that_it_makes(machine: Any) -> None:
    from .stand_in import NCCLError

    with hc.init_process_group(on_timeout="raise", timeout=60):
        group = hc.new_group(timeout=60)
        if RANK == SIZE - 1:
            machine.failures.append(NCCLError("ncclSystemError (2): no memory"))
        began = time.monotonic()
        match = rf"rank {SIZE - 1} could not be connected: NCCL reports ncclSystemError"
        with pytest.raises(hc.DistBackendError, match=match):
            hc.all_reduce(gpus.array(np.ones(1)), group=group)
        assert time.monotonic() - began < 60  # the other ranks do not wait for it
