"""The fast path of GPU arrays: it accepts some calls, leaves others to plans, and both make the same operation."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core import arrays as core_arrays
from hpccomm.debug.groups_seen import PACKAGE
from hpccomm.native import fastpath
from hpccomm.nccl import types
from hpccomm.nccl.connection import Connection

from ..arrays import assert_same, backwards, contiguous, strided
from ..hooks import Noted
from . import gpus

pytestmark = pytest.mark.skipif(fastpath is None, reason="without the compiled extension")
TIMES_TWO = hc.ReduceOp.PREMUL_SUM(2)


class Arrays:
    """Arrays of 4 elements on this rank, and of 4 on each rank."""

    def __init__(self, group: hc.ProcessGroup, dtype: Any = np.float32, layout: Any = contiguous) -> None:
        self.one = gpus.array(np.full(4, group.rank + 1, dtype), layout)
        self.other = gpus.array(np.zeros(4, dtype), layout)
        self.all = gpus.array(np.full(4 * group.size, group.rank + 1, dtype), layout)
        self.received = gpus.array(np.zeros(4 * group.size, dtype), layout)


def operations(group: hc.ProcessGroup, async_op: bool = False) -> dict[str, Callable[[Arrays], Any]]:
    """Return every operation of the fast path that a rank can do alone, by name."""
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    last = group.size - 1
    return {
        "all_reduce": lambda on: group.all_reduce(on.one, async_op=async_op),
        "broadcast": lambda on: group.broadcast(on.one, last, async_op=async_op),
        "reduce": lambda on: group.reduce(on.one, last, hc.ReduceOp.MAX, async_op),
        "all_gather_single": lambda on: group.all_gather_single(on.all, on.one, async_op=async_op),
        "reduce_scatter_single": lambda on: group.reduce_scatter_single(on.one, on.all, async_op=async_op),
        "sendrecv": lambda on: group.sendrecv(on.one, to, on.other, source, async_op=async_op),
        "all_to_all_single": lambda on: group.all_to_all_single(on.received, on.all, async_op=async_op),
        "all_reduce_coalesced": lambda on: group.all_reduce_coalesced([on.other, on.one], async_op=async_op),
        "broadcast_coalesced": lambda on: group.broadcast_coalesced([on.other, on.one], last, async_op=async_op),
        "all_gather_single_coalesced": lambda on: group.all_gather_single_coalesced(
            [on.received, on.all], [on.other, on.one], async_op=async_op
        ),
        "reduce_scatter_single_coalesced": lambda on: group.reduce_scatter_single_coalesced(
            [on.other, on.one], [on.received, on.all], async_op=async_op
        ),
    }


NAMES = [
    "all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single", "sendrecv", "all_to_all_single",
    "all_reduce_coalesced", "broadcast_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
]  # fmt: skip


def results(group: hc.ProcessGroup, name: str, on: Arrays) -> None:
    """Check the arrays after one operation on new ones."""
    n, last = group.size, group.size - 1
    ranks = np.arange(1, n + 1)
    expected = {
        "all_reduce": (on.one, np.full(4, ranks.sum())),
        "broadcast": (on.one, np.full(4, n)),
        "reduce": (on.one, np.full(4, n if group.rank == last else group.rank + 1)),
        "all_gather_single": (on.all, np.repeat(ranks, 4)),
        "reduce_scatter_single": (on.one, np.full(4, ranks.sum())),
        "sendrecv": (on.other, np.full(4, (group.rank - 1) % n + 1)),
        "all_to_all_single": (on.received, np.repeat(ranks, 4)),
    }
    array, values = expected[name.removesuffix("_coalesced")]
    assert_same(gpus.values(array), values.astype(array.dtype))


@pytest.fixture
def plans(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The plans made after every operation has met its dtypes: the fast path makes none."""
    for name, operation in operations(process_group).items():
        on = Arrays(process_group)
        operation(on)
        results(process_group, name, on)
    planned: list[bool] = []
    plan = Connection.plan

    def noting(self: Connection, async_op: bool) -> Any:
        planned.append(async_op)
        return plan(self, async_op)

    monkeypatch.setattr(Connection, "plan", noting)
    return planned


# ... and the class by which `hm.Comm` replaces MPI.Request, with which the stand-in for NCCL waits
PROVIDERS = re.compile(r"/cuda/cupy_\w+\.py$|/nccl/(\w+_nccl|libnccl)\.py$|/mpi4py/requests\.py$")


def hpccomms_functions(call: Callable[[], Any]) -> list[str]:
    """Return the functions of hpccomm that a call enters; those of the provider are not hpccomm's here."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not PROVIDERS.search(code.co_filename):
            entered.append(code.co_name)

    gc.collect()
    gc.disable()  # its calls for groups that are gone are not the operation's
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_on_contiguous_arrays_enters_few_functions(
    process_group: hc.ProcessGroup, plans: list[bool], name: str
) -> None:
    on = Arrays(process_group)
    operation = operations(process_group)[name]
    entered = hpccomms_functions(lambda: operation(on))
    assert len(entered) <= (12 if name == "sendrecv" else 10), entered
    assert not plans
    results(process_group, name, on)


@pytest.mark.parametrize("name", NAMES)
def test_an_asynchronous_one_needs_no_plan(process_group: hc.ProcessGroup, plans: list[bool], name: str) -> None:
    on = Arrays(process_group)
    work = operations(process_group, async_op=True)[name](on)
    assert isinstance(work, hc.Work)
    assert (work.op_type, work.sequence_number > 0) == (name, True)
    work.wait()
    results(process_group, name, on)
    assert not plans
    if name == "sendrecv":
        assert work.source_rank() == (process_group.rank - 1) % process_group.size
    work.synchronize()


def test_messages(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    n, me = process_group.size, process_group.rank
    for sender in range(n - 1):
        if me == sender:
            hc.send(gpus.array(np.full(3, 5.0)), sender + 1)
            hc.isend(gpus.array(np.full(3, 6.0)), sender + 1).wait()
        elif me == sender + 1:
            array = gpus.array(np.zeros(3))
            assert hc.recv(array, sender) == sender
            assert_same(gpus.values(array), np.full(3, 5.0))
            work = hc.irecv(array, sender)
            work.wait()
            assert work.source_rank() == sender
            assert_same(gpus.values(array), np.full(3, 6.0))
    before = len(plans)
    again = gpus.array(np.zeros(3))  # of a dtype that has been met
    for _ in range(2):
        if me == 0 and n > 1:
            hc.send(again, 1)
        elif me == 1:
            assert hc.recv(again, 0) == 0
    assert len(plans) == before


@pytest.mark.parametrize("layouts", [(contiguous, strided), (strided, contiguous)])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_go_different_ways_meet(
    process_group: hc.ProcessGroup, plans: list[bool], monkeypatch: pytest.MonkeyPatch, name: str, layouts: Any
) -> None:
    is_odd = process_group.rank % 2
    monkeypatch.setattr(process_group.dispatcher.gpu_fast_path, "is_open", not is_odd)
    on = Arrays(process_group, layout=layouts[is_odd])
    operations(process_group)[name](on)
    assert len(plans) == is_odd
    results(process_group, name, on)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", [strided, backwards])
@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_empty_goes_the_long_way(
    process_group: hc.ProcessGroup, plans: list[bool], name: str, layout: Any, async_op: bool
) -> None:
    operation = operations(process_group, async_op)[name]
    on = Arrays(process_group, layout=layout)
    work = operation(on)
    if async_op:
        work.wait()
    results(process_group, name, on)
    assert not plans
    empty = Arrays(process_group)
    empty.one, empty.other, empty.all, empty.received = (each[:0] for each in (on.one, on.other, on.all, on.received))
    work = operation(empty)
    if async_op:
        work.wait()
    assert len(plans) == 1


def some(group: hc.ProcessGroup, dtypes: str, layouts: Any) -> list[Any]:
    return [
        gpus.array(np.arange(6).reshape(2, 3).astype(dtype) + group.rank, layout)
        for dtype, layout in zip(dtypes, layouts, strict=True)
    ]


COALESCED = {  # dtypes, layouts, and how many plans are made
    "some have gaps": ("fdf", (contiguous, strided, contiguous), 0),
    "all have gaps": ("f" * 32, (strided, backwards) * 16, 0),
    "more than a launch copies": ("f" * 33, (strided,) * 33, 1),
    "units of several sizes": ("fd", (strided, strided), 1),
}


@pytest.mark.parametrize("case", COALESCED)
def test_coalesced_arrays_with_gaps_take_the_fast_path(
    process_group: hc.ProcessGroup, plans: list[bool], case: str
) -> None:
    n, (dtypes, layouts, planned) = process_group.size, COALESCED[case]
    arrays, table = some(process_group, dtypes, layouts), np.arange(6).reshape(2, 3)
    hc.all_reduce_coalesced(arrays, async_op=True).wait()
    assert len(plans) == planned
    for array in arrays:
        assert_same(gpus.values(array), (n * table + sum(range(n))).astype(array.dtype))


def test_columns_of_one_array_are_left_to_the_checks(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    table = gpus.array(np.full((4, 2), process_group.rank + 1.0))
    hc.all_reduce_coalesced([table[:, 0], table[:, 1]])  # their memory overlaps, but for the elements
    assert len(plans) == 1
    assert_same(gpus.values(table), np.full((4, 2), sum(range(1, process_group.size + 1)), float))


def around(array: Any, into: Any, tag: int = 0, group: Any = None) -> list[hc.P2POp]:
    """Return a message to the right and one from the left; on one rank, to oneself."""
    n, me = hc.get_world_size(), hc.get_rank()
    return [
        hc.P2POp(hc.isend, array, (me + 1) % n, group, tag), hc.P2POp(hc.irecv, into, (me - 1) % n, group, tag)
    ]  # fmt: skip


def test_a_batch_is_one_group_of_calls(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    left, before = (process_group.rank - 1) % process_group.size, process_group.message_number
    ons = [Arrays(process_group) for _ in range(2)]
    sent, received, *others = hc.batch_isend_irecv([each for on in ons for each in around(on.one, on.other)])
    numbers = [work.sequence_number - before for work in (received, others[1], sent, others[0])]
    assert numbers == [1, 2, 3, 4]  # the receives begin first
    assert [work.op_type for work in (sent, received)] == ["send", "recv"]
    assert received.source_rank() == left
    for work in (sent, received, *others):
        work.wait()
    for on in ons:
        assert_same(gpus.values(on.other), np.full(4, left + 1, np.float32))
    assert not plans


def test_a_batch_that_the_fast_path_leaves(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    left, host = (process_group.rank - 1) % process_group.size, np.zeros(4, np.float32)
    on = Arrays(process_group, layout=strided)
    from_host = np.full(4, process_group.rank + 1, np.float32)
    for batch, into in (
        (around(on.one, on.other), on.other),
        (around(on.one, on.other, group=process_group), on.other),
        ([*around(on.one, on.other), *around(from_host, host)], host),
        ([*around(from_host, host), *around(on.one, on.other)], on.other),
    ):
        before = len(plans)
        hc.wait_all(hc.batch_isend_irecv(batch))
        assert_same(into if into is host else gpus.values(into), np.full(4, left + 1, np.float32))
        assert len(plans) > before
    assert hc.batch_isend_irecv([]) == []


def test_a_batch_that_the_checks_refuse(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    on, n = Arrays(process_group), process_group.size
    with pytest.raises(hc.UnsupportedOperationError, match="NCCL has no tags"):
        hc.batch_isend_irecv(around(on.one, on.other, tag=3))
    with pytest.raises(ValueError, match=f"isend: dst is {n}"):
        hc.batch_isend_irecv([*around(on.one, on.other), hc.P2POp(hc.isend, on.one, n)])
    with pytest.raises(TypeError, match="expected P2POp objects"):
        hc.batch_isend_irecv([*around(on.one, on.other), None])  # type: ignore[list-item]
    hc.wait_all(hc.batch_isend_irecv(around(on.one, on.other)))
    results(process_group, "sendrecv", on)


def test_an_error_of_a_batch_names_it(process_group: hc.ProcessGroup, machine: Any) -> None:
    from .stand_in import NCCLError

    on = Arrays(process_group)
    for _ in range(2):
        hc.wait_all(hc.batch_isend_irecv(around(on.one, on.other)))
        machine.failures.append(NCCLError("ncclInvalidArgument (4): a bad pointer"))
        with pytest.raises(hc.DistBackendError, match=r"batch_isend_irecv #\d+ of .*ncclInvalidArgument \(4\): a bad"):
            hc.batch_isend_irecv(around(on.one, on.other))


def test_an_output_that_overlaps_its_input_gives_the_same_as_a_copy(
    process_group: hc.ProcessGroup, plans: list[bool]
) -> None:
    n, me = process_group.size, process_group.rank
    gathered = gpus.array(np.full(4 * n, float(me + 1)))
    hc.all_gather_single(gathered, gathered[2:6] if n > 1 else gathered[:4])
    assert_same(gpus.values(gathered), np.repeat(np.arange(1.0, n + 1), 4))
    scattered = gpus.array(np.arange(4.0 * n))
    hc.reduce_scatter_single(scattered[:4], scattered)
    assert_same(gpus.values(scattered)[:4], n * np.arange(4.0 * me, 4.0 * me + 4))
    ring = gpus.array(np.full(4, float(me)))
    hc.sendrecv(ring[:3], (me + 1) % n, ring[1:], (me - 1) % n)
    assert_same(gpus.values(ring)[1:], np.full(3, float((me - 1) % n)))
    spread = gpus.array(np.full(n, float(me)))
    hc.all_to_all_single(spread, spread)
    assert_same(gpus.values(spread), np.arange(float(n)))
    first, second = gpus.array(np.zeros(n)), gpus.array(np.full(n, float(me)))
    hc.all_gather_single_coalesced([first, second], [second[:1], gpus.array(np.full(1, me + 0.5))])
    assert_same(gpus.values(first), np.arange(float(n)))
    assert_same(gpus.values(second), np.arange(n) + 0.5)
    assert len(plans) == 5


def test_what_the_checks_refuse_is_refused(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    on, n = Arrays(process_group), process_group.size
    number = process_group.sequence_number, process_group.message_number
    with pytest.raises(ValueError, match=f"broadcast: root is {n}; expected"):
        process_group.broadcast(on.one, n)
    with pytest.raises(TypeError, match="broadcast: root is True; expected an integer"):
        process_group.broadcast(on.one, True)
    with pytest.raises(TypeError, match="op is"):
        process_group.all_reduce(on.one, ["sum"])
    with pytest.raises(TypeError, match="op is"):
        process_group.all_reduce_coalesced([on.one], None)
    with pytest.raises(ValueError, match=f"broadcast_coalesced: root is {n}"):
        process_group.broadcast_coalesced([on.one], n)
    with pytest.raises(ValueError, match="all_gather_single_coalesced"):
        process_group.all_gather_single_coalesced([on.all[:-1]], [on.one])
    if n > 1:
        both = [on.all]
        for wrong in process_group.all_gather_single_coalesced, process_group.reduce_scatter_single_coalesced:
            with pytest.raises(ValueError, match="_single_coalesced"):
                wrong(both, both)
    with pytest.raises(ValueError, match=r"arrays\[0\] and arrays\[2\] share memory.*pass each array once"):
        process_group.all_reduce_coalesced([on.all[3:], on.all[1:1], on.all[2:]])
    with pytest.raises(ValueError, match=r"outputs\[0\] and outputs\[1\] share memory"):
        process_group.all_gather_single_coalesced([on.all, on.all], [on.one, on.other])
    with pytest.raises(ValueError, match="all_gather_single"):
        process_group.all_gather_single(on.all[:-1], on.one)
    with pytest.raises(TypeError, match="expected the same dtype"):
        process_group.reduce_scatter_single(on.one, on.all.view(np.int32))
    with pytest.raises(ValueError, match="this rank itself"):
        process_group.send(on.one, process_group.rank)
    with pytest.raises(hc.UnsupportedOperationError, match="NCCL has no tags"):
        process_group.sendrecv(on.one, 0, on.other, 0, tag=3)
    with pytest.raises(ValueError, match="output and input are on cuda and cpu"):
        process_group.all_gather_single(on.all, np.ones(4, np.float32))
    # a call that only the transport refuses has begun
    assert (process_group.sequence_number, process_group.message_number) == (number[0], number[1] + 1)
    operations(process_group)["all_reduce"](on)
    results(process_group, "all_reduce", on)


@pytest.mark.parametrize("op", ["sum", "SUM", TIMES_TWO, hc.ReduceOp.AVG])
def test_other_ops(process_group: hc.ProcessGroup, plans: list[bool], op: Any) -> None:
    n = process_group.size
    total = n * (n + 1) / 2
    for _ in range(2):
        on = Arrays(process_group)
        hc.all_reduce(on.one, op)
        expected = {TIMES_TWO: 2 * total, hc.ReduceOp.AVG: total / n}.get(op, total)
        assert_same(gpus.values(on.one), np.full(4, expected, np.float32))


def test_an_op_that_only_the_checks_refuse_is_refused(process_group: hc.ProcessGroup) -> None:
    types.reduced("the benchmark", np.dtype(np.int32), hc.ReduceOp.AVG)  # which NCCL has
    array = gpus.array(np.ones(4, np.int32))
    hc.all_reduce(array)
    with pytest.raises(TypeError, match="AVG is not defined for array's dtype int32"):
        hc.all_reduce(array, hc.ReduceOp.AVG)


def test_operations_are_numbered_with_all_others(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    hc.all_reduce(np.ones(2))  # makes the fast path of host arrays, which counts the others, too
    on, before = Arrays(process_group), process_group.sequence_number
    hc.all_reduce(on.one)
    hc.all_reduce(np.ones(2))
    hc.all_reduce(gpus.array(np.ones(2, np.float32)), TIMES_TWO)
    work = hc.broadcast(on.one, 0, async_op=True)
    assert (work.sequence_number, process_group.sequence_number) == (before + 4, before + 4)
    work.wait()
    assert process_group.dispatcher.recent[-1] == (before + 3, "all_reduce", np.float32, 8)
    assert fastpath is not None
    *_, first, second, fourth = fastpath.ring_rows()
    rows = [(name, number, dtype, nbytes) for _, _, name, number, dtype, nbytes, *_ in (first, second, fourth)]
    float32, float64 = np.dtype("f4").num, np.dtype("f8").num
    assert rows == [
        ("all_reduce", before + 1, float32, 16), ("all_reduce", before + 2, float64, 16),
        ("broadcast", before + 4, float32, 16),
    ]  # fmt: skip
    assert len(plans) == 1


def test_hooks_see_every_operation(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    noted = Noted()
    with process_group.register_hook(noted):
        hc.all_reduce(Arrays(process_group).one)
    hc.all_reduce(Arrays(process_group).one)
    assert noted.names == ["all_reduce"]
    assert noted.ended == noted.begun
    assert len(plans) == 1


def test_the_recorder_sees_every_operation(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    import hpccomm.debug

    with hpccomm.debug.record(size=3):
        for operation in operations(process_group).values():
            operation(Arrays(process_group))
        assert [each.name for each in hpccomm.debug.recorded()] == NAMES[-3:]


def test_a_coalescing_block_collects(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    on = Arrays(process_group)
    with hc.coalescing():
        hc.all_reduce(on.one)
        hc.all_reduce(on.all)
    assert len(plans) == 1
    results(process_group, "all_reduce", on)
    hc.all_reduce(on.one)
    assert len(plans) == 1


@pytest.mark.parametrize("async_op", [False, True])
def test_an_error_of_nccl_names_the_operation(process_group: hc.ProcessGroup, machine: Any, async_op: bool) -> None:
    from .stand_in import NCCLError

    with hc.new_group(group_desc="fails") as group:
        on = Arrays(group)
        for _ in range(2):
            group.all_reduce(on.one)
            group.broadcast(on.one, 0)
        machine.failures.append(NCCLError("ncclInvalidArgument (4): a bad pointer"))
        with pytest.raises(
            hc.DistBackendError,
            match=rf"all_reduce #5 of {group.name!r}: NCCL reports ncclInvalidArgument \(4\): a bad",
        ):
            group.all_reduce(on.one, async_op=async_op)
        group.all_reduce(on.one)
        assert group.sequence_number == 6


def test_a_destroyed_group_refuses_and_has_no_memory(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    on = Arrays(group)
    for _ in range(2):
        group.all_reduce(on.one)
    group.all_reduce(gpus.array(np.ones(3), strided), async_op=True).wait()
    fast_path = group.dispatcher.gpu_fast_path
    assert fast_path is not None
    group.destroy()
    assert fast_path.memory == [None, None]
    with pytest.raises(hc.DistError, match="has been destroyed"):
        group.all_reduce(on.one)


def test_a_group_that_was_split_off_has_it(process_group: hc.ProcessGroup, plans: list[bool]) -> None:
    with hc.split_group(color=0) as group:
        on = Arrays(group)
        group.all_reduce(on.one)
        assert not plans
        results(group, "all_reduce", on)


def test_a_device_that_is_registered_later_has_its_arrays(
    process_group: hc.ProcessGroup, plans: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_arrays, "_predicates", {})
    on = Arrays(process_group)
    hc.register_device("board", lambda array: array is on.one)
    with pytest.raises(hc.DistError, match="has no backend for board arrays"):
        hc.all_reduce(on.one)
    core_arrays._predicates.clear()
    hc.all_reduce(on.one)
    results(process_group, "all_reduce", on)


def test_a_work_that_has_ended_stays_so_when_a_later_one_has_not(process_group: hc.ProcessGroup, machine: Any) -> None:
    on = Arrays(process_group)
    first = hc.all_reduce(on.one, async_op=True)
    first.wait()
    hc.all_reduce(on.all, async_op=True)  # keeps its array: the next one lets go of ended ones
    second = hc.all_reduce(on.all, async_op=True)
    machine.held = True
    second.wait()
    assert first.is_completed()
    assert not second.is_completed()
    machine.held = False
    assert second.is_completed()


@pytest.mark.parametrize("during", ["is_done", "wait"])
def test_a_callback_that_comes_while_c_asks_or_waits_for_the_event_is_called(
    process_group: hc.ProcessGroup, machine: Any, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .stand_in import Runtime

    process_group.dispatcher.reap()
    first, called, threads = hc.all_reduce(Arrays(process_group).one, async_op=True), [], []
    before = getattr(Runtime, during)

    def meanwhile(*arguments: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=first.add_done_callback, args=(called.append,)))
            threads[0].start()
            threads[0].join()
        return before(*arguments)

    monkeypatch.setattr(Runtime, during, meanwhile)
    if during == "wait":
        first.wait()
    for _ in range(3):
        hc.all_reduce(Arrays(process_group).one, async_op=True).synchronize()
    assert called == [first]


@pytest.mark.parametrize("lacking", ["empty", "create_event"])
def test_without_memory_or_events_the_error_has_the_number_of_the_operation(
    process_group: hc.ProcessGroup, machine: Any, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .stand_in import CUDAError

    with hc.new_group() as group:
        on = Arrays(group, layout=strided)
        group.all_reduce(gpus.array(np.ones(1)))
        runtime: Any = type(group.dispatcher.backends["cuda"]._runtime)
        with monkeypatch.context() as patch:

            def fails(*_: Any) -> Any:
                raise CUDAError("cudaErrorMemoryAllocation: out of memory")

            patch.setattr(runtime, lacking, fails)
            with pytest.raises(hc.DistBackendError, match=r"all_reduce #2 of .*cudaErrorMemoryAllocation"):
                group.all_reduce(Arrays(group, layout=strided).one, async_op=lacking == "create_event")
        group.all_reduce(on.one)
        results(group, "all_reduce", on)


def test_what_is_left_of_a_work_is_used_again(process_group: hc.ProcessGroup, machine: Any) -> None:
    on, dispatcher = Arrays(process_group), process_group.dispatcher
    dispatcher.reap()
    hc.all_reduce(on.one, async_op=True).wait()
    (left,) = map(id, dispatcher.in_flight)
    hc.all_reduce(on.all, async_op=True)
    work = hc.all_reduce(on.all, async_op=True)
    machine.held = True
    work.wait()
    assert left in map(id, dispatcher.in_flight)
    assert [each.sequence_number for each in dispatcher.in_flight] == [process_group.sequence_number]
    assert not work.is_completed()
    machine.held = False
    assert work.is_completed()
