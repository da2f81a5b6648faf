"""Host arrays over gloo: every operation gives what NumPy computes, or says that gloo does not have it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from ..arrays import (
    ALL_DTYPES,
    LAYOUTS,
    NUMERIC,
    REDUCTIONS,
    assert_same,
    contiguous,
    dtype_name,
    reduced,
    reductions_of,
    strided,
    values,
)
from ..matrix.cases import GOOD, WITH_OUTPUTS, function
from ..matrix.test_matrix import Opposite, every_overlap, goes_to_itself, has_form, perform, share_memory
from ..test_collectives import Groups

pytestmark = pytest.mark.usefixtures("process_group")
numeric = pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 4)]
LACKING = ("scan", "exscan", "empty_shared", "fence")


def call(function: Any, *arguments: Any, async_op: bool, **options: Any) -> None:
    """Run an operation to its end, and check what it returns."""
    work = function(*arguments, async_op=async_op, **options)
    assert work.wait() and work.is_success() if async_op else work is None


def contributions(group: hc.ProcessGroup, dtype: Any, shape: tuple[int, ...]) -> list[Any]:
    return [values(dtype, shape, rank) for rank in group.ranks]


def lacks(name: str, dtype: Any) -> bool:
    """What gloo can't reduce, nor anything that has the same bits."""
    return (
        (dtype.name in ("longdouble", "float128"))
        or (dtype.kind == "c" and name == "PRODUCT")
        or (dtype == np.uint64 and name in ("MIN", "MAX"))
    )


# -- the operations ----------------------------------------------------------------------------------


@numeric
def test_reductions(groups: Groups, dtype: Any) -> None:
    for name in reductions_of(dtype):
        op = REDUCTIONS[name][0]
        for group in groups:
            for i, layout in enumerate(LAYOUTS):
                shape, async_op = SHAPES[i % len(SHAPES)], i % 2 == 1
                given = contributions(group, dtype, shape)
                array, root = layout(given[group.rank]), group.size - 1
                if lacks(name, dtype):
                    with pytest.raises(hc.UnsupportedOperationError, match=f"all_reduce: gloo can't reduce {dtype}"):
                        hc.all_reduce(array, op, group)
                    assert_same(array, given[group.rank], "untouched")
                    continue
                call(hc.all_reduce, array, op, group=group, async_op=async_op)
                assert_same(array, reduced(name, given), name, layout, shape, group)
                array = layout(given[group.rank])
                call(hc.reduce, array, op=op, group_dst=root, group=group, async_op=async_op)
                expected = reduced(name, given) if group.rank == root else given[group.rank]
                assert_same(array, expected, name, layout, shape, group)


@numeric
def test_reduce_scatter(groups: Groups, dtype: Any) -> None:
    for name in reductions_of(dtype):
        if lacks(name, dtype):
            continue
        op = REDUCTIONS[name][0]
        for group in groups:
            for layout, length in ((contiguous, 3), (strided, 3), (contiguous, 0)):
                rows = contributions(group, dtype, (group.size * length,))
                expected = reduced(name, rows)[group.rank * length :][:length]
                array, out = layout(rows[group.rank]), layout(np.zeros(length, dtype))
                call(hc.reduce_scatter_single, out, array, op, group=group, async_op=length == 0)
                assert_same(out, expected, name, layout)
                assert_same(array, rows[group.rank], "an input is only read")
            # parts of different sizes
            lists = [[values(dtype, (r + 1,), rank, r) for r in range(group.size)] for rank in group.ranks]
            out = np.zeros(group.rank + 1, dtype)
            call(hc.reduce_scatter, out, lists[group.rank], op, group=group, async_op=False)
            assert_same(out, reduced(name, [each[group.rank] for each in lists]), name)


@every_dtype
def test_arrays_that_are_only_moved(groups: Groups, dtype: Any) -> None:
    for group in groups:
        me, n = group.rank, group.size
        for i, layout in enumerate(LAYOUTS):
            shape, async_op = SHAPES[i % len(SHAPES)], i % 2 == 1
            how: dict[str, Any] = {"group": group, "async_op": async_op}
            given = contributions(group, dtype, shape)
            mine = layout(given[me])
            array = layout(given[me])
            call(hc.broadcast, array, group_src=n - 1, **how)
            assert_same(array, given[n - 1], "broadcast", layout)
            outs = [layout(np.zeros(shape, dtype)) for _ in range(n)]
            call(hc.all_gather, outs, mine, **how)
            for out, expected in zip(outs, given):
                assert_same(out, expected, "all_gather", layout)
            gathered = [layout(np.zeros(shape, dtype)) for _ in range(n)]
            call(hc.gather, mine, gathered if me == 0 else None, group_dst=0, **how)
            for out, expected in zip(gathered, given if me == 0 else gathered):
                assert_same(out, expected, "gather", layout)
            out = layout(np.zeros(shape, dtype))
            call(hc.scatter, out, [layout(each) for each in given] if me == 0 else None, group_src=0, **how)
            assert_same(out, given[me], "scatter", layout)
            whole = layout(np.zeros((n, *shape), dtype))
            call(hc.all_gather_single, whole, mine, **how)
            assert_same(whole, np.stack(given), "all_gather_single", layout)
            rows = [np.stack([values(dtype, shape, rank, r) for r in range(n)]) for rank in group.ranks]
            exchanged = layout(np.zeros((n, *shape), dtype))
            call(hc.all_to_all_single, exchanged, layout(rows[me]), **how)
            assert_same(exchanged, np.array([each[me] for each in rows], dtype), "all_to_all_single", layout)


@every_dtype
def test_parts_of_different_sizes(groups: Groups, dtype: Any) -> None:
    for group in groups:
        me, n = group.rank, group.size
        given = [values(dtype, (rank,), rank) for rank in range(n)]
        outs = [np.zeros(rank, dtype) for rank in range(n)]
        hc.all_gather(outs, given[me], group=group)
        for out, expected in zip(outs, given):
            assert_same(out, expected)
        gathered = [np.zeros(rank, dtype) for rank in range(n)] if me == 0 else None
        hc.gather(given[me], gathered, group_dst=0, group=group)
        for out, expected in zip(gathered or (), given):
            assert_same(out, expected)
        out = np.zeros(me, dtype)
        hc.scatter(out, given if me == 0 else None, group_src=0, group=group)
        assert_same(out, given[me])
        table = [[values(dtype, (1 + rank + 2 * r,), rank, r) for r in range(n)] for rank in range(n)]
        received = [np.zeros(1 + rank + 2 * me, dtype) for rank in range(n)]
        hc.all_to_all(received, table[me], group=group)
        for rank, out in enumerate(received):
            assert_same(out, table[rank][me])
        flat = np.zeros(sum(map(len, received)), dtype)
        sizes = [len(each) for each in received], [len(each) for each in table[me]]
        hc.all_to_all_single(flat, np.concatenate(table[me]), *sizes, group=group)
        assert_same(flat, np.concatenate(received))


FORMS = ["ordinary", "async", "persistent", "coalescing"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in GOOD if name not in LACKING])
def test_every_form_of_every_operation(groups: Groups, name: str, form: str) -> None:
    for group in groups:
        collected = name in ("broadcast", "all_reduce", "all_gather_single", "reduce_scatter_single")
        alone = group.size == 1 and name in ("send", "recv")
        if not has_form(name, form) or (form == "coalescing" and not collected):
            continue
        if alone or goes_to_itself(name, form, group):
            continue
        opposite = Opposite(name, group)
        perform(name, form, group)
        opposite.finish()


@every_overlap
@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_inputs_may_share_memory_with_outputs(groups: Groups, name: str, how: str) -> None:
    for group in groups:
        share_memory(name, "async", how, group)


@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_what_gloo_does_not_have_is_refused(process_group: hc.ProcessGroup, name: str) -> None:
    with pytest.raises(hc.UnsupportedOperationError, match=f"{name}: backend 'gloo' does not have it.*'cpu:mpi'"):
        function(name, "ordinary")(np.ones(2))
    with pytest.raises(hc.UnsupportedOperationError, match="empty_shared: backend 'gloo' does not have it"):
        hc.empty_shared(3)
    with pytest.raises(hc.UnsupportedOperationError, match=r"all_reduce: gloo can't reduce float64 by .*MPI\.Op"):
        hc.all_reduce(np.ones(2), MPI.REPLACE)


# -- messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_from_anybody_in_order_of_their_tags(process_group: hc.ProcessGroup, layout: Any) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    if SIZE == 1:
        with pytest.raises(hc.UnsupportedOperationError, match="send: gloo sends nothing to the same rank"):
            hc.isend(np.ones(1), 0)
        return
    outs = [layout(np.zeros(4)) for _ in range(3)]
    works = [hc.irecv(outs[0], tag=2), hc.irecv(outs[1], tag=1), hc.irecv(outs[2], tag=1)]
    assert not works[0].is_completed()  # which has a thread wait for it
    hc.barrier()
    sent = [hc.isend(layout(np.full(4, 10.0 * RANK + i)), after, tag=tag) for i, tag in enumerate((1, 2, 1))]
    for work in works + sent:
        work.wait()
    assert [out[0] - 10 * before for out in outs] == [1, 0, 2]
    assert [work.source_rank() for work in works] == [before] * 3


def test_a_message_is_done_without_waiting(process_group: hc.ProcessGroup) -> None:
    if SIZE == 1:
        return
    array = np.zeros(2)
    work = hc.irecv(array, (RANK - 1) % SIZE)
    future = work.get_future()
    hc.isend(np.full(2, 1.0 + RANK), (RANK + 1) % SIZE)
    assert future.result(timeout=60) is array
    assert array[0] == 1 + (RANK - 1) % SIZE


# -- Works, groups, errors ---------------------------------------------------------------------------


def test_contiguous_memory_is_not_copied(process_group: hc.ProcessGroup) -> None:
    from hpccomm.core.reduce_op import ReduceOp
    from hpccomm.gloo.backend import recv_buffer, send_buffer
    from hpccomm.gloo.reductions import as_bytes, send_tensor

    array = np.arange(6.0).reshape(2, 3)
    address = array.ctypes.data
    assert send_buffer(array) is recv_buffer(array)[0] is array
    assert as_bytes(array).data_ptr() == address
    assert send_tensor("all_reduce", array, ReduceOp.SUM)[1].data_ptr() == address


def test_a_work_that_is_dropped_keeps_its_array(process_group: hc.ProcessGroup) -> None:
    if SIZE == 1:
        return
    array = np.zeros(4)
    alive = weakref.ref(array)
    hc.irecv(array, (RANK - 1) % SIZE)
    del array
    gc.collect()
    assert alive() is not None
    hc.barrier()
    hc.send(np.ones(4), (RANK + 1) % SIZE)
    hc.barrier()


def test_a_time_out_is_hpccomms(process_group: hc.ProcessGroup) -> None:
    if SIZE == 1:
        return
    array = np.zeros(1)
    work = hc.irecv(array, (RANK - 1) % SIZE, tag=5)
    with pytest.raises(hc.DistTimeoutError, match=r"recv #\d+: not done after 0.01 s; it is still in flight"):
        work.wait(timeout=0.01)
    hc.barrier()
    hc.isend(np.full(1, 7.0), (RANK + 1) % SIZE, tag=5)
    assert work.wait(timeout=60)
    assert array[0] == 7


@pytest.mark.parametrize("name", ["barrier", "recv"])
def test_the_timeout_of_a_group(process_group: hc.ProcessGroup, name: str) -> None:
    if SIZE == 1:
        return
    group = hc.new_group(timeout=0.5, on_timeout="raise")
    assert isinstance(group, hc.ProcessGroup)
    if RANK == 0:  # nobody else takes part
        with pytest.raises(hc.DistTimeoutError, match=rf"{name}.*gloo reports: .*can't be used on \(rank 0\)"):
            hc.barrier(group) if name == "barrier" else hc.recv(np.zeros(1), 1, group=group)
    hc.barrier()
    group.destroy()


def test_a_lost_connection_is_an_error_of_the_backend(process_group: hc.ProcessGroup) -> None:
    if SIZE == 1:
        return
    group: Any = hc.new_group(timeout=0.5 if RANK == 0 else 60, on_timeout="raise", group_desc="lost")
    if RANK == 0:
        with pytest.raises(hc.DistTimeoutError, match="recv"):
            hc.recv(np.zeros(1), 1, group=group)
    hc.barrier()
    if RANK > 0:  # rank 0 has closed its connections
        with pytest.raises(hc.DistBackendError, match=rf"recv #1 of 'lost': gloo reports: .* \(rank {RANK}\)"):
            hc.recv(np.zeros(1), 0, group=group)
    hc.barrier()
    hc.destroy_process_group(group)


def test_a_monitored_barrier_names_who_is_missing(process_group: hc.ProcessGroup) -> None:
    if SIZE == 1:
        return
    group = hc.new_group([0, 1])
    if RANK == 0:
        with pytest.raises(hc.DistTimeoutError, match=r"monitored_barrier: gloo reports: .*Ranks 1 failed"):
            hc.monitored_barrier(group, timeout=0.5, wait_all_ranks=True)
    hc.barrier()
    hc.destroy_process_group(group)


def test_groups_with_other_backends_beside(process_group: hc.ProcessGroup) -> None:
    over_mpi = hc.new_group(backend="cpu:mpi")
    with_gpus = hc.new_group(backend="cpu:gloo,cuda:nccl")
    for group in (over_mpi, with_gpus):
        x = np.ones(3)
        hc.all_reduce(x, group=group)
        assert (x == SIZE).all()
        hc.destroy_process_group(group)
    assert str(process_group.config) == "cpu:gloo"


def test_a_group_made_of_the_same_ranks_again(process_group: hc.ProcessGroup) -> None:
    for _ in range(3):
        group = hc.new_group()
        x = np.ones(1)
        hc.all_reduce(x, group=group)
        assert x[0] == SIZE
        hc.destroy_process_group(group)
        with pytest.raises(hc.DistError, match="has been destroyed"):
            hc.all_reduce(x, group=group)
