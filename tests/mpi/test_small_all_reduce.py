"""Persistent all_reduces through shared memory: which those are, that turns do not meet, and that memory comes back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi import shared_memory, small_all_reduce
from hpccomm.mpi.small_all_reduce import SmallAllReduce
from hpccomm.process.tuning import Tuning

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.mpi(min_size=2)]


def test_small_arrays_need_no_messages_and_others_do(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    largest = Tuning().persistent_bytes // n // 8
    for array, op, without_messages in (
        (np.ones(1), "sum", True),
        (np.ones(largest)[::-1], "avg", True),
        (np.ones(largest + 1), "sum", False),
        (np.ones(2, np.float16), "sum", False),
        (np.ones(0), "sum", False),
    ):
        with hc.all_reduce_init(array, op) as work:
            assert isinstance(work, SmallAllReduce) == without_messages, (array.size, op)
            work.start()
            work.wait()
            assert (array == (1 if op == "avg" else n)).all()
    alone = hc.new_group([process_group.rank], use_local_synchronization=True)
    with hc.all_reduce_init(np.ones(1), group=alone) as work:
        assert not isinstance(work, SmallAllReduce)


def test_the_numbers_of_turns_begin_again_and_ranks_may_be_late(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    array = np.zeros(3)
    with hc.all_reduce_init(array) as work:
        for turn in range(600):
            array[...] = [turn, me, 1]
            if turn % 100 == me:
                time.sleep(0.002)
            work.start()
            if turn % 50 == me:
                time.sleep(0.002)
            work.wait()
            assert array.tolist() == [turn * n, n * (n - 1) / 2, n], turn


def test_operations_may_be_waited_for_in_any_order(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    arrays = [np.zeros(2, dtype) for dtype in ("f8", "i4", "c8", "?")]
    works = [hc.all_reduce_init(array) for array in arrays]
    for turn in range(20):
        for array in arrays:
            array[...] = 1
        for work in works:
            work.start()
        for i in range(len(works)):
            works[(i + me + turn) % len(works)].wait()  # another order on each rank
        assert [array[0] for array in arrays] == [n, n, n, True]
    for work in works:
        work.free()


def test_a_rank_that_waits_sees_when_the_others_have_begun(process_group: hc.ProcessGroup) -> None:
    array = np.ones(1)
    with hc.all_reduce_init(array) as work:
        if process_group.rank:
            work.start()
            with pytest.raises(hc.DistTimeoutError, match=r"all_reduce: not done after 0.01 s; it is still in flight"):
                work.wait(0.01)
            assert not work.is_completed()
            hc.barrier()
        else:
            hc.barrier()
            work.start()
        while not work.is_completed():
            pass
        assert array[0] == process_group.size


def test_there_is_always_another_window(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_all_reduce, "FIRST_WINDOW_BYTES", 1000)
    group = hc.new_group()
    assert isinstance(group, hc.ProcessGroup)
    arrays = [np.full(size, process_group.rank) for size in range(1, 60)]
    works = [hc.all_reduce_init(array, "max", group) for array in arrays]
    small: Any = group.door.backends["cpu"]._small_all_reduces  # type: ignore[attr-defined]
    assert 1 < len(small._windows) < 10
    for work in works:
        work.start()
    for work, array in zip(works, arrays, strict=True):
        work.wait()
        assert (array == group.size - 1).all()
    hc.destroy_process_group(group)


@pytest.mark.parametrize("limit", ["what a group may have", "what is free"])
def test_where_there_is_no_more_shared_memory_mpi_takes_over(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "what is free":
        monkeypatch.setattr(shared_memory, "free_bytes", lambda: 150_000 if process_group.rank == 0 else 1 << 40)
    else:
        monkeypatch.setattr(small_all_reduce, "LARGEST_WINDOW_BYTES", 64 << 10)
    group = hc.new_group()
    array, small = np.zeros(500), []
    for turn in range(40):  # set up and freed again and again
        with hc.all_reduce_init(array, group=group) as work:
            small.append(isinstance(work, SmallAllReduce))
            array[...] = turn
            work.start()
            work.wait()
            assert (array == turn * process_group.size).all()
    assert small[0]
    assert not small[-1]
    hc.destroy_process_group(group)


def test_a_factor_that_overflows_is_silent_as_in_mpi(process_group: hc.ProcessGroup) -> None:
    array = np.full(2, 3e38, np.float32)
    with hc.all_reduce_init(array, hc.ReduceOp.PREMUL_SUM(100)) as work:
        work.start()
        work.wait()
    assert np.isinf(array).all()


def test_destroying_the_group_gives_the_memory_back(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    work = hc.all_reduce_init(np.ones(5), "avg", group)
    work.start()
    work.wait()
    before = len(shared_memory._outliving)
    hc.destroy_process_group(group)
    assert len(shared_memory._outliving) == before
    with pytest.raises(hc.DistError, match="all_reduce: freed"):
        work.start()


@pytest.mark.parametrize("op", ["sum", "avg", hc.ReduceOp.PREMUL_SUM(3)], ids=str)
def test_where_a_core_does_not_keep_the_order_of_stores_there_are_fences(
    process_group: hc.ProcessGroup, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_all_reduce, "KEEPS_ORDER", False)
    fences: list[str] = []
    sync = shared_memory.Window.sync
    monkeypatch.setattr(shared_memory.Window, "sync", lambda self: (fences.append("fence"), sync(self))[1])
    array = np.ones(4)
    with hc.all_reduce_init(array, op) as work:
        for turn in range(4):
            array[...] = 1
            work.start()
            assert len(fences) == 2 * turn + 1  # between the values and the flag
            work.wait()
            assert len(fences) == 2 * turn + 2  # between the flags and the values
            n = process_group.size
            assert (array == {"sum": n, "avg": 1}.get(op, 3 * n)).all()
