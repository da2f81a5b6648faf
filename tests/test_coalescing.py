from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.operation_list import OPERATIONS

pytestmark = pytest.mark.usefixtures("process_group")


def messages_of(group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which operations reach the group's backend."""
    hc.barrier(group)  # makes the backend
    backend, seen = group.dispatcher.backends["cpu"], []

    def noted(name: str) -> Any:
        original = getattr(backend, name)

        def operation(*arguments: Any) -> Any:
            seen.append(name)
            return original(*arguments)

        return operation

    for name in OPERATIONS:
        if name.endswith("_coalesced"):
            monkeypatch.setattr(backend, name, noted(name))
    return seen


@pytest.mark.parametrize("async_ops", [False, True])
def test_neighbours_of_a_kind_leave_together(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch, async_ops: bool
) -> None:
    n, me = process_group.size, process_group.rank
    sums, averages = [np.full(i, 1.0) for i in range(5)], [np.full(i, float(me)) for i in range(3)]
    copies = [np.full(2, me), np.full((2, 2), float(me))[:, ::-1]]
    gathered, parts = np.empty((n, 2)), np.empty(2)
    seen = messages_of(process_group, monkeypatch)
    with hc.coalescing(async_ops=async_ops) as block:
        for array in sums:
            assert hc.all_reduce(array) is None
        for array in averages:
            hc.all_reduce(array, "avg")
        for array in copies:
            hc.broadcast(array, n - 1)
        hc.all_gather_single(gathered, np.full(2, float(me)))
        hc.reduce_scatter_single(parts, np.ones(2 * n))
        assert seen == []
        assert sums[2].tolist() == [1, 1]
    block.wait()
    assert seen == [
        "all_reduce_coalesced",
        "all_reduce_coalesced",
        "broadcast_coalesced",
        "all_gather_single_coalesced",
        "reduce_scatter_single_coalesced",
    ]
    assert all((array == n).all() for array in sums)
    assert all((array == (n - 1) / 2).all() for array in averages)
    assert all((array == n - 1).all() for array in copies)
    assert np.array_equal(gathered, np.arange(float(n)).repeat(2).reshape(-1, 2))
    assert parts.tolist() == [n, n]


def test_arguments_are_checked_at_the_call(process_group: hc.ProcessGroup) -> None:
    array = np.ones(2, int)
    block = hc.coalescing()

    def collect() -> None:
        with block:
            hc.all_reduce(array)
            hc.all_reduce(array, "avg")

    with pytest.raises(TypeError, match="AVG is not defined"):
        collect()
    assert array.tolist() == [1, 1]  # an exception drops what was collected
    hc.all_reduce(array)
    assert array.tolist() == [process_group.size] * 2


def test_what_cannot_be_collected(process_group: hc.ProcessGroup) -> None:
    with hc.coalescing():
        with pytest.raises(hc.UnsupportedOperationError, match=r"scan: can't be collected in a coalescing\(\) block"):
            hc.scan(np.ones(1))
        with pytest.raises(hc.UnsupportedOperationError, match="barrier: can't be collected"):
            hc.barrier()
        with pytest.raises(hc.UnsupportedOperationError, match="all_reduced: can't be collected"):
            hc.all_reduced(3.0)
        with pytest.raises(ValueError, match=r"leave async_op out; use coalescing\(async_ops=True\)"):
            hc.all_reduce(np.ones(1), async_op=True)
        with pytest.raises(ValueError, match="blocks don't nest"), hc.coalescing():
            pass
        with pytest.raises(hc.DistError, match=r"leave its coalescing\(\) block first"):
            process_group.destroy()
    hc.barrier()


@pytest.mark.parametrize("async_ops", [False, True])
def test_two_results_in_the_same_memory_need_two_blocks(process_group: hc.ProcessGroup, async_ops: bool) -> None:
    array, number = np.ones(4), process_group.sequence_number

    def collect(*ops: str) -> None:
        with hc.coalescing(async_ops=async_ops):
            for i, op in enumerate(ops):
                hc.all_reduce(array[i:], op)

    with pytest.raises(ValueError, match=r"^coalescing: (all_reduce|call)\[0\] and .* share memory.*; use two blocks"):
        collect("sum", "sum")
    if async_ops:
        with pytest.raises(ValueError, match=r"^coalescing: call\[0\] and call\[1\] share memory.*; use two blocks"):
            collect("sum", "max")
        assert process_group.sequence_number == number
        assert array.tolist() == [1.0] * 4
    else:  # one after the other
        collect("sum", "max")
        assert array.tolist() == [float(process_group.size)] * 4


@pytest.mark.parametrize("async_ops", [False, True])
def test_a_result_that_a_later_call_reads_needs_two_blocks(process_group: hc.ProcessGroup, async_ops: bool) -> None:
    n = process_group.size
    x, all_of_x, all_of_these = np.ones(2), np.zeros(2 * n), np.zeros(2 * n * n)

    def collect(*pairs: tuple[np.ndarray, np.ndarray]) -> None:
        with hc.coalescing(async_ops=async_ops) as block:
            for output, given in pairs:
                hc.all_gather_single(output, given)
        if async_ops:
            block.wait()

    with pytest.raises(ValueError, match=r"^coalescing: \w+\[1\] reads memory that \w+\[0\] writes, .* two blocks"):
        collect((all_of_x, x), (all_of_these, all_of_x))
    with pytest.raises(ValueError, match=r"^coalescing: \w+\[0\] reads memory that \w+\[1\] writes, .* two blocks"):
        collect((all_of_these, all_of_x), (all_of_x, x))
    with contextlib.ExitStack() as stack:
        if async_ops:  # otherwise one after the other
            stack.enter_context(pytest.raises(ValueError, match=r"call\[1\] reads memory that call\[0\] writes"))
        with hc.coalescing(async_ops=async_ops):
            hc.all_reduce(x)
            hc.all_gather_single(all_of_x, x)
    if not async_ops:
        assert all_of_x.tolist() == [float(n)] * (2 * n)
    other = np.zeros(2 * n)
    mine = all_of_these[2 * process_group.rank :][:2]
    mine[...] = x
    collect((all_of_x, x), (other, x), (all_of_these[: 2 * n], mine))  # two read x; the last is in place
    assert all_of_these[: 2 * n].tolist() == all_of_x.tolist()
    assert other.tolist() == all_of_x.tolist() == [x[0]] * (2 * n)


def test_an_empty_block(process_group: hc.ProcessGroup) -> None:
    with hc.coalescing(process_group, async_ops=True) as block:
        pass
    block.wait()


def test_other_groups_are_not_collected(process_group: hc.ProcessGroup) -> None:
    other = hc.new_group()
    array = np.ones(1)
    with hc.coalescing():
        hc.all_reduce(array, group=other)
        assert array[0] == process_group.size


@pytest.mark.parametrize("async_op", [False, True])
def test_fields_with_gaps_between_them(process_group: hc.ProcessGroup, async_op: bool) -> None:
    n, me = process_group.size, process_group.rank
    records = np.array([(me, 5, 10 * me)] * 2, [("a", "i4"), ("b", "i4"), ("c", "i4")])
    ours = [records[["a", "c"]], records[["a", "c"]].copy()]
    lists = [[np.zeros(2, ours[0].dtype) for _ in range(2)] for _ in range(n)]
    singles = [np.zeros((n, 2), ours[0].dtype) for _ in range(2)]
    done = [
        hc.all_gather_coalesced(lists, ours, async_op=async_op),
        hc.all_gather_single_coalesced(singles, ours, async_op=async_op),
        hc.broadcast_coalesced(ours, 0, async_op=async_op),
    ]
    hc.wait_all([work for work in done if work is not None])
    for rank, outputs in enumerate(lists):
        for output in (*outputs, *(each[rank] for each in singles)):
            assert output.tolist() == [(rank, 10 * rank)] * 2
    assert [each.tolist() for each in ours] == [[(0, 0)] * 2] * 2
