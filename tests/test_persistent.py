from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi.backend import MPIBackend

from .arrays import HALVES, LAYOUTS, REDUCTIONS, SHAPES, assert_same, reduced, reductions_of, values

pytestmark = pytest.mark.usefixtures("process_group")

Groups = list[hc.ProcessGroup]
DTYPES = [np.dtype(bool), np.dtype("i4"), *HALVES, np.dtype("f4"), np.dtype("c16")]
ROUNDS = range(3)


def again(work: hc.PersistentWork, *filling: tuple[Any, Any], run: bool = False) -> None:
    """Fill arrays with new values, and do the operation once, by `run` or in two calls."""
    for array, content in filling:
        array[...] = content
    assert work.is_completed()
    if run:
        return work.run()
    work.start()
    assert work.wait() is True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("messages", [False, True], ids=["memory", "messages"])
def test_all_reduce(groups: Groups, dtype: Any, messages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if messages:  # as on several nodes
        monkeypatch.setattr(MPIBackend, "node_persistent", None)
    for group, layout, shape, name in itertools.product(groups, LAYOUTS, SHAPES, reductions_of(dtype)):
        array = layout(values(dtype, shape, 0))
        with hc.all_reduce_init(array, REDUCTIONS[name][0], group) as work:
            for salt in ROUNDS:
                given = [values(dtype, shape, rank, salt) for rank in group.ranks]
                again(work, (array, given[group.rank]), run=salt == 1)
                assert_same(array, reduced(name, given), name, layout, shape, group, salt)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_product_of_half_precisions_is_rounded_as_in_the_plain_operation(
    process_group: hc.ProcessGroup, dtype: Any
) -> None:
    n, me = process_group.size, process_group.rank
    third = hc.ReduceOp.PREMUL_SUM(1 / 3)
    given = [values(dtype, (1000,), rank) for rank in range(n)]
    products = [each.astype(np.float32) * np.float32(1 / 3) for each in given]
    array, repeated = given[me].copy(), given[me].copy()
    hc.all_reduce(array, third)
    with hc.all_reduce_init(repeated, third) as work:
        again(work)
    assert_same(repeated, array)
    assert np.allclose(array.astype(float), sum(products).astype(dtype).astype(float), rtol=1e-2, atol=1e-2)


def check_coalesced(group: hc.ProcessGroup, layouts: Any, dtypes: Any, name: str) -> None:
    """Reduce arrays of every shape several times, of the layouts and dtypes in turn."""
    kinds = [*zip(itertools.cycle(layouts), itertools.cycle(dtypes), SHAPES * 2)]
    arrays = [layout(values(dtype, shape, 0)) for layout, dtype, shape in kinds]
    with hc.all_reduce_coalesced_init(arrays, REDUCTIONS[name][0], group) as work:
        for salt in ROUNDS:
            given = [[values(dtype, shape, rank, salt) for _, dtype, shape in kinds] for rank in group.ranks]
            again(work, *zip(arrays, given[group.rank], strict=True))
            for i, array in enumerate(arrays):
                assert_same(array, reduced(name, [each[i] for each in given]), name, kinds[i], group, salt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("messages", [False, True], ids=["memory", "messages"])
def test_all_reduce_coalesced(groups: Groups, dtype: Any, messages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if messages:
        monkeypatch.setattr(MPIBackend, "node_persistent", None)
    for group, name, layouts in itertools.product(groups, reductions_of(dtype), [LAYOUTS[:1], LAYOUTS]):
        check_coalesced(group, layouts, [dtype], name)


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "PREMUL_SUM"])
def test_all_reduce_coalesced_of_mixed_dtypes(groups: Groups, name: str) -> None:
    mixed = [np.dtype(code) for code in ("f4", "i1", "f2", "c16", "i8")]
    for group in groups:
        check_coalesced(group, LAYOUTS[:1], mixed, name)
        check_coalesced(group, LAYOUTS, mixed, name)


@pytest.mark.parametrize(
    "sizes", [[100] * 300, [1000] * 300, [3, 70_000, 0, 1, 500_001]], ids=["one", "runs", "uneven"]
)
def test_all_reduce_coalesced_of_many_arrays(process_group: hc.ProcessGroup, sizes: list[int]) -> None:
    n, me = process_group.size, process_group.rank
    memory = np.zeros((2, sum(sizes)), np.float32)
    arrays = np.split(memory[0], np.cumsum(sizes)[:-1])
    arrays.reverse()  # packed in the order of the list, not of the addresses
    with hc.all_reduce_coalesced_init(arrays, "avg") as work:
        for salt in ROUNDS:
            memory[0] = np.arange(memory.shape[1]) + salt + 2 * me
            again(work)
            assert np.allclose(memory[0], np.arange(memory.shape[1]) + salt + n - 1, rtol=1e-6, atol=0)
            assert not memory[1].any()  # next to them


def test_parts_of_a_coalesced_operation_end_one_by_one(process_group: hc.ProcessGroup) -> None:
    arrays = [np.ones(2), np.ones(3, int), np.ones(100_000, np.float32), np.ones(2, np.float16)]
    with hc.all_reduce_coalesced_init(arrays, "max") as work:
        assert work.op_type == "all_reduce_coalesced"
        assert work.output is arrays
        for turn in ROUNDS:
            for array in arrays:
                array[...] = turn + process_group.rank
            work.start()
            while not work.is_completed():
                pass
            assert all((array == turn + process_group.size - 1).all() for array in arrays)
            work.start()
            work.wait(60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_single(groups: Groups, dtype: Any) -> None:
    for group, layout, name in itertools.product(groups, LAYOUTS, reductions_of(dtype)):
        output, array = layout(values(dtype, (3,), 0)), layout(values(dtype, (group.size, 3), 0))
        with hc.reduce_scatter_single_init(output, array, REDUCTIONS[name][0], group) as work:
            for salt in ROUNDS:
                given = [values(dtype, (group.size, 3), rank, salt) for rank in group.ranks]
                again(work, (array, given[group.rank]))
                assert_same(output, reduced(name, given)[group.rank], name, layout, group, salt)


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("M8[s]")], ids=str)
def test_movements(groups: Groups, dtype: Any) -> None:
    for group, layout in itertools.product(groups, LAYOUTS):
        n, me = group.size, group.rank
        array, output, received = (layout(values(dtype, (n, 3), 0)) for _ in range(3))
        gathered = layout(np.zeros((n, n, 3), dtype))
        left, right = group.ranks[me - 1], group.ranks[(me + 1) % n]
        with (
            hc.broadcast_init(output, group.ranks[-1], group) as broadcast,
            hc.all_gather_single_init(gathered, array, group) as gather,
            hc.all_to_all_single_init(received, array, group=group) as exchange,
        ):
            for salt in ROUNDS:
                given = [values(dtype, (n, 3), rank, salt) for rank in group.ranks]
                again(broadcast, (output, given[me]))
                assert_same(output, given[-1], layout, group)
                again(gather, (array, given[me]))
                assert_same(gathered, np.stack(given), layout, group)
                again(exchange)
                assert_same(received, np.stack([each[me] for each in given]), layout, group)
        with hc.send_init(array, right, group, tag=1) as send, hc.recv_init(output, left, group, tag=1) as receive:
            for salt in ROUNDS:
                given = [values(dtype, (n, 3), rank, salt) for rank in group.ranks]
                array[...] = given[me]
                receive.start()
                send.start()
                receive.wait()
                send.wait()
                assert_same(output, given[me - 1], layout, group)


def test_large_arrays_in_segments(process_group: hc.ProcessGroup) -> None:
    array = np.empty((5 << 20) // 4 + 3, np.float32)
    with hc.all_reduce_init(array) as work:
        for i in ROUNDS:
            again(work, (array, i + 1))
            assert (array == process_group.size * (i + 1)).all()


def test_input_and_output_may_share_memory(process_group: hc.ProcessGroup) -> None:
    output = np.zeros((process_group.size, 2))
    with hc.all_gather_single_init(output, output[process_group.rank]) as work:
        again(work, (output[process_group.rank], process_group.rank))
    assert_same(output, np.arange(float(process_group.size)).repeat(2).reshape(-1, 2))


def test_its_life(process_group: hc.ProcessGroup) -> None:
    array = np.ones(2)
    work = hc.all_reduce_init(array)
    assert work.op_type == "all_reduce"
    assert work.output is array
    assert "ready" in repr(work)
    assert work.wait()  # not started: done
    work.start()
    with pytest.raises(hc.DistError, match=r"started already; wait\(\) first"):
        work.start()
    work.wait(60)
    assert work in process_group.dispatcher.persistent
    work.free()
    work.free()
    assert work not in process_group.dispatcher.persistent  # a program may make and free any number of them
    assert work.output is None
    assert "freed" in repr(work)
    with pytest.raises(hc.DistError, match="all_reduce: freed"):
        work.start()


def test_a_timeout_leaves_it_in_flight(process_group: hc.ProcessGroup) -> None:
    me, array = process_group.rank, np.zeros(2)
    with hc.recv_init(array, me) as work:
        work.start()
        assert not work.is_completed()
        assert "in flight" in repr(work)
        with pytest.raises(hc.DistTimeoutError, match=r"recv: not done after 0\.02 s; it is still in flight"):
            work.wait(0.02)
        hc.isend(np.array([1.0, 2.0]), me).wait()
        work.wait(60)
        assert array.tolist() == [1, 2]


@pytest.mark.parametrize("limit", [None, 60], ids=["waited for", "looked for"])
def test_a_short_message_is_an_error(process_group: hc.ProcessGroup, limit: float | None) -> None:
    work = hc.recv_init(np.zeros(2), process_group.rank)
    work.start()
    hc.isend(np.zeros(1), process_group.rank).wait()
    with pytest.raises(hc.DistBackendError, match="the message has 8 bytes, but the array 16"):
        work.wait(limit)


def test_a_destroyed_group_frees_its_own() -> None:
    group = hc.new_group()
    array = np.ones(1)
    work = hc.all_reduce_init(array, group=group)
    work.start()
    hc.destroy_process_group(group)
    assert array[0] == hc.get_world_size()
    with pytest.raises(hc.DistError, match="freed"):
        work.start()
    with pytest.raises(hc.DistError, match="has been destroyed"):
        hc.all_reduce_init(array, group=group)


@pytest.mark.parametrize(
    ("error", "init"),
    [
        (TypeError, lambda: hc.all_reduce_init(np.ones(1, int), "avg")),
        (TypeError, lambda: hc.all_reduce_coalesced_init([np.ones(1), np.ones(1, int)], "avg")),
        (ValueError, lambda: hc.all_reduce_coalesced_init([])),
        (TypeError, lambda: hc.broadcast_init([1.0], 0)),
        (ValueError, lambda: hc.broadcast_init(np.ones(1), 99)),
        (ValueError, lambda: hc.all_gather_single_init(np.ones(99), np.ones(1))),
        (ValueError, lambda: hc.reduce_scatter_single_init(np.ones(1), np.ones(99))),
        (ValueError, lambda: hc.all_to_all_single_init(np.ones(4), np.ones(4), [99])),
        (ValueError, lambda: hc.send_init(np.ones(1), 0, tag=-1)),
        (ValueError, lambda: hc.recv_init(np.broadcast_to(1.0, 2), 0)),
    ],
)
def test_bad_arguments_are_refused_at_init(error: type[Exception], init: Callable[[], Any]) -> None:
    with pytest.raises(error, match="rank"):
        init()


def test_not_in_a_coalescing_block() -> None:
    with hc.coalescing(), pytest.raises(hc.DistError, match="not inside a coalescing"):
        hc.all_reduce_init(np.ones(1))
