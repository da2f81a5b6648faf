"""Operations on many arrays in several runs."""

from __future__ import annotations

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi.fast_path import RUN_BYTES
from hpccomm.mpi.segments import runs

pytestmark = pytest.mark.usefixtures("process_group")


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


def test_runs() -> None:
    arrays = [np.empty(size) for size in (3, 2, 5, 9, 0, 1, 4, 1)]
    cut = [([array.size for array in run], size) for run, size in runs(arrays, 5)]
    assert cut == [
        ([3, 2], 5), ([5], 5), ([9], 9), ([0, 1, 4], 5), ([1], 1)
    ]  # fmt: skip
    assert runs(arrays, 25) == [(arrays, 25)]


@pytest.mark.parametrize("async_op", [False, True])
def test_elements_without_bytes(process_group: hc.ProcessGroup, async_op: bool) -> None:
    n, nothing, mine = process_group.size, np.zeros(3, "V0"), np.full(2, process_group.rank)
    lists = [[nothing.copy(), np.empty_like(mine)] for _ in range(n)]
    outputs = [np.zeros(3 * n, "V0"), np.empty(2 * n, mine.dtype)]
    for work in (
        hc.all_gather_coalesced(lists, [nothing, mine], async_op=async_op),
        hc.all_gather_single_coalesced(outputs, [nothing, mine], async_op=async_op),
        hc.all_gather_single_coalesced(outputs[:1], [nothing], async_op=async_op),
        hc.broadcast_coalesced([nothing, nothing], n - 1, async_op=async_op),
        hc.broadcast_coalesced([nothing, mine], n - 1, async_op=async_op),
    ):
        assert work is None or work.wait()
    assert outputs[1].tolist() == np.concatenate([row for _, row in lists]).tolist() == np.repeat(range(n), 2).tolist()
    assert mine.tolist() == [n - 1, n - 1]
