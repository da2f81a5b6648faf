"""Host arrays over gloo: every operation gives NumPy's result, or raises an error that gloo does not have it."""

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
    assert_same,
    dtype_name,
    reductions_of,
)
from ..calls import On, perform
from ..matrix.cases import GOOD, WITH_OUTPUTS, function
from ..matrix.test_matrix import Opposite, every_overlap, goes_to_itself, has_form, share_memory
from ..matrix.test_matrix import perform as perform_form
from ..test_collectives import Groups

backend = pytest.importorskip("hpccomm.gloo.backend", reason="there is no gloo", exc_type=ModuleNotFoundError)
pytestmark = pytest.mark.usefixtures("process_group")
numeric = pytest.mark.parametrize("dtype", NUMERIC, ids=dtype_name)
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 4)]
LACKING = {name for name in GOOD if getattr(backend.GlooBackend, name, 0) is getattr(hc.Backend, name, 1)}


def lacks(name: str, dtype: Any) -> bool:
    """Return True if gloo can't reduce this dtype, nor one that has the same bits."""
    return (
        (dtype.name in ("longdouble", "float128"))
        or (dtype.kind == "c" and name == "PRODUCT")
        or (dtype == np.uint64 and name in ("MIN", "MAX"))
    )


# -- the operations ----------------------------------------------------------------------------------


def check(how: str, on: On, async_op: bool) -> None:
    """Make a call whose root is the last rank; `how` is its name, and "uneven" or "stacked"."""
    name, on.uneven, on.stacked, on.root = how.partition(",")[0], "uneven" in how, "stacked" in how, on.n - 1
    for actual, expected in perform(name, on, async_op):
        assert_same(actual, expected, how, on, async_op)


@pytest.mark.parametrize("how", [
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter, uneven", "reduce_scatter_single",
])  # fmt: skip
@numeric
def test_reductions(groups: Groups, dtype: Any, how: str) -> None:
    for op in reductions_of(dtype):
        for group in groups:
            for i, layout in enumerate(LAYOUTS):
                on, async_op = On(group, dtype, SHAPES[i % len(SHAPES)], op, layout), i % 2 == 1
                if not lacks(op, dtype):
                    check(how, on, async_op)
                elif how == "all_reduce":
                    array, given = layout(on.given()[on.me]), on.given()[on.me]
                    with pytest.raises(hc.UnsupportedOperationError, match=f"all_reduce: gloo can't reduce {dtype}"):
                        hc.all_reduce(array, **on.ops, group=group)
                    assert_same(array, given, "untouched")


@pytest.mark.parametrize("how", [
    "broadcast", "all_gather", "all_gather, uneven", "gather", "gather, uneven", "scatter", "scatter, uneven",
    "all_gather_single, stacked", "all_to_all, uneven", "all_to_all_single, stacked", "all_to_all_single, uneven",
])  # fmt: skip
@every_dtype
def test_moving(groups: Groups, dtype: Any, how: str) -> None:
    for group in groups:
        for i, layout in enumerate(LAYOUTS):
            check(how, On(group, dtype, SHAPES[i % len(SHAPES)], layout=layout), i % 2 == 1)


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
        perform_form(name, form, group)
        opposite.finish()


@every_overlap
@pytest.mark.parametrize("name", [name for name in WITH_OUTPUTS if name not in LACKING])
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
