"""Persistent all_reduces of many arrays: which of them need no messages, and which arrays MPI packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi import small_all_reduce
from hpccomm.mpi.coalesced import RUN_BYTES, SHARED_BYTES, SHARED_RUN_BYTES, Packing
from hpccomm.mpi.segments import runs
from hpccomm.mpi.small_all_reduce import SmallAllReduce

pytestmark = pytest.mark.usefixtures("process_group")


def parts_of(arrays: list[Any], group: Any = None) -> list[Any]:
    """Reduce arrays of ones twice, and return what the operation consists of."""
    size = hc.get_world_size(group)
    with hc.all_reduce_coalesced_init(arrays, group=group) as work:
        parts = list(work._parts)  # type: ignore[attr-defined]
        for turn in (1, 2):
            work.start()
            work.wait()
            assert all((array == size**turn).all() for array in arrays)
    return parts


@pytest.mark.mpi(min_size=2)
def test_small_lists_need_no_messages_and_others_do(process_group: hc.ProcessGroup) -> None:
    count = SHARED_BYTES // process_group.size // 8 // 100
    parts = parts_of([np.ones(count) for _ in range(100)])
    assert len(parts) >= SHARED_BYTES // SHARED_RUN_BYTES
    assert all(isinstance(part.work, SmallAllReduce) for part in parts)
    for arrays in ([np.ones(count) for _ in range(102)], [np.ones(4, np.float16), np.ones(3, np.float16)]):
        assert not isinstance(parts_of(arrays)[0].work, SmallAllReduce)


@pytest.mark.mpi(min_size=2)
def test_where_there_is_no_more_shared_memory_mpi_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_all_reduce, "LARGEST_WINDOW_BYTES", 600 << 10)
    with hc.new_group() as group:  # type: ignore[union-attr]
        size = SHARED_BYTES // hc.get_world_size() // 8 // 100
        small = {isinstance(part.work, SmallAllReduce) for part in parts_of([np.ones(size) for _ in range(100)], group)}
        assert small == {True, False}


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_a_broadcast_of_arrays_that_go_in_several_runs(process_group: hc.ProcessGroup, async_op: bool) -> None:
    root = process_group.size - 1
    counts = [RUN_BYTES // 8 // 3] * 7 + [0, RUN_BYTES // 8 + 1, 5, 1]
    arrays = [np.full(count, 100.0 * process_group.rank + i) for i, count in enumerate(counts)]
    arrays += [np.full((3, 4), process_group.rank, np.int16)[:, ::2], np.full(7, process_group.rank, np.float32)]
    work = hc.broadcast_coalesced(arrays, root, async_op=async_op)
    if work is not None:
        work.wait()
    for i, array in enumerate(arrays[: len(counts)]):
        assert (array == 100.0 * root + i).all()
    assert all((array == root).all() for array in arrays[len(counts) :])


def test_a_large_array_is_not_packed() -> None:
    large = np.ones(RUN_BYTES // 8 + 1)
    parts = parts_of([np.ones(2), np.ones(3), large, np.ones(4), np.ones(5)])
    assert [part.packing is None for part in parts] == [False, True, False]


@pytest.mark.parametrize(
    ("arrays", "by_mpi"),
    [
        ([np.ones(2), np.ones(0), np.ones((3, 4))], True),
        ([np.ones(2), np.ones((3, 4))[::2]], False),  # not contiguous
        ([np.ones(5, np.int8), np.ones(8, np.int8)], False),  # bytes, of which MPICH would copy each
        ([np.ones(0)], False),
    ],
)
def test_what_mpi_packs(arrays: list[Any], by_mpi: bool) -> None:
    flat = np.zeros(sum(array.size for array in arrays), arrays[0].dtype)
    packing = Packing(arrays, flat)
    assert (packing._datatype is not None) == by_mpi
    packing.packing_into(flat)()
    assert flat.all()
    flat *= 2
    packing.unpack()
    assert all((array == 2).all() for array in arrays)
    packing.free()


def test_runs() -> None:
    arrays = [np.empty(size) for size in (3, 2, 5, 9, 0, 1, 4, 1)]
    cut = [([array.size for array in run], size) for run, size in runs(arrays, 5)]
    assert cut == [
        ([3, 2], 5), ([5], 5), ([9], 9), ([0, 1, 4], 5), ([1], 1)
    ]  # fmt: skip
    assert runs(arrays, 25) == [(arrays, 25)]
