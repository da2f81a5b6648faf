"""Operations on many arrays in several runs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.overlap import common
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


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_outputs_that_share_memory_are_refused(process_group: hc.ProcessGroup, async_op: bool) -> None:
    n, how = process_group.size, {"async_op": async_op}
    memory, ones = np.zeros(4 * n), [np.ones(1), np.ones(1)]
    for _ in range(10):
        hc.broadcast(np.ones(3), 0)
    number = process_group.sequence_number

    def match(name: str, one: str, other: str) -> Any:
        return pytest.raises(ValueError, match=rf"^{name}: {one} and {other} share memory")

    for outputs in ([memory[:n]] * 2, [memory[n - 1 : 2 * n - 1], memory[:n]], [memory[: 3 * n : 3], memory[:n]]):
        with match("all_gather_single_coalesced", r"outputs\[0\]", r"outputs\[1\]"):
            hc.all_gather_single_coalesced(outputs, ones, **how)
        with match("reduce_scatter_single_coalesced", r"outputs\[0\]", r"outputs\[1\]"):
            hc.reduce_scatter_single_coalesced(outputs, [np.ones(n * n)] * 2, **how)
        with match("all_reduce_coalesced", r"arrays\[0\]", r"arrays\[1\]"):
            hc.all_reduce_coalesced(outputs, **how)
        with match("all_reduce_coalesced_init", r"arrays\[0\]", r"arrays\[1\]"):
            hc.all_reduce_coalesced_init(outputs)
    rows = [[memory[i : i + 1], memory[2 * n - 1 - i : 2 * n - i]] for i in range(n)]
    rows[-1][1] = rows[0][0]
    with match("all_gather_coalesced", r"output_lists\[0\]\[0\]", rf"output_lists\[{n - 1}\]\[1\]"):
        hc.all_gather_coalesced(rows, ones, **how)
    assert process_group.sequence_number == number
    for apart in ([memory[:n], memory[n : 2 * n]], [memory[n : 2 * n], memory[:n]], [memory[1::4], memory[::4]]):
        work = hc.all_gather_single_coalesced(apart, [np.ones(1), np.full(1, 2.0)], **how)
        assert work is None or work.wait()
        assert [set(each.tolist()) for each in apart] == [{1.0}, {2.0}]


def test_common_elements_are_those_that_numpy_finds() -> None:
    rng, memory, seen = np.random.default_rng(1), np.zeros(60), set()
    for _ in range(500):
        largest_step, starts = rng.choice([1, 3]), rng.integers(0, 60, rng.integers(2, 6)).tolist()
        arrays = [memory[i : i + rng.integers(0, 12) : rng.integers(1, largest_step + 1)] for i in starts]
        sharing = {pair for pair in combinations(range(len(arrays)), 2) if np.shares_memory(*(arrays[i] for i in pair))}
        for _ in range(2):  # the second time they may be known
            found = common(arrays)
            assert found is None if not sharing else tuple(sorted(found or ())) in sharing
        seen.add((bool(sharing), bool(largest_step > 1)))
    assert len(seen) == 4


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
