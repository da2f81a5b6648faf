"""The flight recorder: every operation once, the same on both paths, with all that describes it; arrays are let go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
import hpccomm.debug
from hpccomm.debug import Record
from hpccomm.debug.groups_seen import key_of
from hpccomm.debug.records import describe
from hpccomm.debug.trace import recorder as recorders
from hpccomm.native import fastpath

from ..arrays import contiguous, strided

pytestmark = pytest.mark.usefixtures("process_group")


def every_operation(layout: Any, n: int, me: int) -> None:
    """Call each operation that has a fast path."""
    right, left = (me + 1) % n, (me - 1) % n
    hc.broadcast(layout(np.zeros(3, np.float32)), n - 1)
    hc.all_reduce(layout(np.zeros(4)), "max")
    hc.all_reduce(layout(np.zeros(4)), hc.ReduceOp.MAX)
    hc.reduce(layout(np.zeros(4, int)), n - 1, "min")
    hc.all_gather_single(layout(np.zeros((n, 2))), layout(np.zeros(2)))
    hc.reduce_scatter_single(layout(np.zeros(3)), layout(np.zeros(3 * n)))
    hc.all_to_all_single(layout(np.zeros(2 * n)), layout(np.zeros(2 * n)))
    hc.sendrecv(layout(np.zeros(2)), right, layout(np.zeros(2)), left, tag=4)
    hc.all_reduce(layout(np.zeros(2)), "avg")
    hc.all_reduce(layout(np.zeros(2, np.float16)))
    hc.scan(layout(np.zeros(3)), "max")
    hc.exscan(layout(np.zeros(3)))
    hc.all_gather([layout(np.zeros(2)) for _ in range(n)], layout(np.zeros(2)))
    hc.gather(layout(np.zeros(2)), [layout(np.zeros(2)) for _ in range(n)] if me == n - 1 else None, dst=n - 1)
    hc.scatter(layout(np.zeros(2)), [layout(np.zeros(2)) for _ in range(n)] if me == n - 1 else None, src=n - 1)
    hc.reduce_scatter(layout(np.zeros(2)), [layout(np.zeros(2)) for _ in range(n)])
    hc.all_to_all([layout(np.zeros(2)) for _ in range(n)], [layout(np.zeros(2)) for _ in range(n)])
    hc.all_reduce_coalesced([layout(np.zeros(2)), layout(np.zeros(3))], "avg")
    hc.broadcast_coalesced([layout(np.zeros(2)), layout(np.zeros(3))], n - 1)
    hc.barrier()
    hc.barrier(async_op=True).wait()
    hc.broadcast(layout(np.zeros(2)), n - 1, async_op=True).wait()
    hc.all_reduce(layout(np.zeros(2)), async_op=True).wait()
    receive = hc.irecv(layout(np.zeros(5)), left, tag=7)
    hc.isend(layout(np.zeros(5)), right, tag=7).wait()
    receive.wait()
    if n > 1 and me == 0:
        hc.send(layout(np.zeros(6)), 1, tag=2)
    elif me == 1:
        hc.recv(layout(np.zeros(6)), 0, tag=2)


def what(record: Record) -> tuple[Any, ...]:
    return tuple(
        getattr(record, name)
        for name in ("name", "dtype", "count", "nbytes", "op", "peer", "tag", "async_op", "state", "group_name")
    )


def test_the_fast_path_is_recorded_as_the_long_one_is(process_group: hc.ProcessGroup) -> None:
    for _ in range(20):  # memory of the node is made
        hc.barrier()
    found = {}
    for layout in (contiguous, strided):
        with hpccomm.debug.record():
            first = process_group.sequence_number, process_group.message_number
            fast = process_group.dispatcher.fast_path.count
            every_operation(layout, process_group.size, process_group.rank)
            taken = process_group.dispatcher.fast_path.count - fast
        if layout is contiguous:  # those in Python step aside
            begun = process_group.sequence_number - first[0]
            assert taken == (begun if fastpath else 0) or (process_group.size == 1 and 10 < taken < begun)
        found[layout] = hpccomm.debug.recorded()
        numbers = [each.number for each in found[layout] if each.tag is None]
        assert numbers == list(range(first[0] + 1, process_group.sequence_number + 1))
        numbers = [each.number for each in found[layout] if each.tag is not None]
        assert numbers == list(range(first[1] + 1, process_group.message_number + 1))
    assert [what(each) for each in found[contiguous]] == [what(each) for each in found[strided]]
    assert all(0 < each.begin <= each.end for each in found[contiguous])


def test_a_record_says_what_describe_says(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    output, array = np.zeros((n, 2)), np.zeros(2)
    with hpccomm.debug.record():
        hc.all_gather_single(output, array)
    (record,) = hpccomm.debug.recorded()
    expected = describe(process_group, record.name, record.number, {"output": output, "array": array})
    assert what(record)[:8] == what(expected)[:8]
    assert record.group == expected.group


def test_other_operations_and_groups_are_recorded(process_group: hc.ProcessGroup) -> None:
    early = hc.new_group()
    with hpccomm.debug.record():
        group = hc.new_group(group_desc="late")
        hc.barrier(group=early)
        hc.all_gather_object([None] * process_group.size, "x", group=group)
        x = np.zeros(2)
        with hc.all_reduce_init(x, "max", group=group) as reduction:
            reduction.start()
            reduction.wait()
        hc.destroy_process_group(group)
    records = hpccomm.debug.recorded()
    assert [each.name for each in records] == ["barrier", "all_gather_object", "all_reduce_start"]
    assert len({each.group for each in records}) == 2
    assert records[-1].op == "MAX"
    hc.barrier(group=early)
    assert len(hpccomm.debug.recorded()) == 3  # it is over
    hc.destroy_process_group(early)


def told(records: list[Record], *, without: str = "") -> list[tuple[Any, ...]]:
    return [
        (each.name, each.number, each.count, each.nbytes, each.dtype, each.async_op, each.state)
        for each in records
        if each.name != without
    ]


def test_halos_are_recorded_with_all_of_their_arrays(process_group: hc.ProcessGroup) -> None:
    fields = [np.zeros((4, 5)), np.zeros((3, 3), np.float32)]  # 20 and 9 cells: 196 bytes
    with hc.new_grid((0, 0), periodic=True, group_desc="ocean") as grid:
        first = grid.sequence_number
        with hpccomm.debug.record():
            hc.halo_exchange(fields, grid)
            hc.halo_exchange(fields[1], grid, async_op=True).wait()  # type: ignore[union-attr]
            hc.halo_accumulate(fields[::-1], grid)
            hc.halo_accumulate(fields[0], grid, async_op=True).wait()  # type: ignore[union-attr]
            with hc.halo_exchange_init(fields, grid) as exchange, hc.halo_accumulate_init(fields[1], grid) as deposit:
                for work in (exchange, deposit, exchange):
                    work.start()
                    work.wait()
        records = hpccomm.debug.recorded()
        assert {each.group for each in records} == {key_of(grid)}
        assert told(records, without="all_gather_object") == [
            ("halo_exchange", first + 1, 29, 196, "float64", False, "completed"),
            ("halo_exchange", first + 2, 9, 36, "float32", True, "completed"),
            ("halo_accumulate", first + 3, 29, 196, "float32", False, "completed"),
            ("halo_accumulate", first + 4, 20, 160, "float64", True, "completed"),
            ("halo_exchange_start", first + 7, 29, 196, "float64", False, "completed"),  # each _init compares
            ("halo_accumulate_start", first + 8, 9, 36, "float32", False, "completed"),
            ("halo_exchange_start", first + 9, 29, 196, "float64", False, "completed"),
        ]


def test_redistributions_are_recorded_with_both_arrays(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    whole, mine, boxes = np.zeros((3, n), np.int16), np.zeros((3, 1), np.int16), (slice(0, n), slice(me, me + 1))
    cells = 3 * n + 3
    with hc.new_group() as group:
        first = group.sequence_number
        with hpccomm.debug.record():
            hc.redistribute(whole, mine, *boxes, group=group)
            hc.redistribute(whole, mine, *boxes, group=group, async_op=True).wait()  # type: ignore[union-attr]
            with hc.redistribute_init(whole, mine, *boxes, group=group) as work:
                for _ in range(2):
                    work.start()
                    work.wait()
        records = hpccomm.debug.recorded()
        assert [each.number for each in records] == list(range(first + 1, group.sequence_number + 1))
    assert told(records, without="all_gather_object") == [
        (
            "redistribute",
            first + 3,
            cells,
            2 * cells,
            "int16",
            False,
            "completed",
        ),  # after a look at boxes, and at cells
        ("redistribute", first + 5, cells, 2 * cells, "int16", True, "completed"),
        ("redistribute_start", first + 7, cells, 2 * cells, "int16", False, "completed"),
        ("redistribute_start", first + 8, cells, 2 * cells, "int16", False, "completed"),
    ]


def test_sparse_exchanges_are_recorded_also_those_of_nothing(process_group: hc.ProcessGroup) -> None:
    right, first = (process_group.rank + 1) % process_group.size, process_group.sequence_number
    with hpccomm.debug.record(stack=True):
        hc.exchange_sparse({right: (np.zeros(2, np.float32), np.zeros(3))})
        work = hc.exchange_sparse({right: np.zeros(3)}, async_op=True)
        assert [each.async_op for each in hpccomm.debug.recorded()] == [False, True]
        work.wait()
        hc.exchange_sparse({})
    records = hpccomm.debug.recorded()
    assert told(records, without="") == [  # with what this rank sends
        ("exchange_sparse", first + 1, 5, 32, "float32", False, "completed"),
        ("exchange_sparse", first + 2, 3, 24, "float64", True, "completed"),
        ("exchange_sparse", first + 3, 0, 0, "", False, "completed"),
    ]
    assert all("test_recorder.py" in each.where and 0 < each.begin <= each.end for each in records)


def test_an_asynchronous_operation_is_in_flight_until_it_ends(process_group: hc.ProcessGroup) -> None:
    for tag in (1, 2):  # the fast path, and the long one
        with hpccomm.debug.record():
            receive = hc.irecv(np.zeros(2)[:: 1 if tag == 1 else 2], process_group.rank, tag=tag)
            (record,) = hpccomm.debug.recorded()
            assert (record.state, record.end, record.async_op) == ("in flight", 0.0, True)
            receive.abort()
            (record,) = hpccomm.debug.recorded()
            assert record.state == "failed"
            assert record.end > record.begin


def test_a_blocking_operation_is_in_flight_while_another_thread_looks(process_group: hc.ProcessGroup) -> None:
    if process_group.size == 1:
        pytest.skip("one rank waits for nobody")
    hc.barrier()
    with hpccomm.debug.record(stack=True):
        if process_group.rank == 0:
            seen: list[Record] = []

            def look() -> None:
                deadline = time.monotonic() + 30
                while not seen and time.monotonic() < deadline:
                    seen.extend(each for each in hpccomm.debug.recorded() if each.name == "recv")
                hc.send(np.ones(1), 1, tag=8)  # lets rank 1 send

            thread = threading.Thread(target=look)
            thread.start()
            hc.recv(np.zeros(3), 1, tag=9)
            thread.join()
            number = process_group.message_number
            assert [(each.state, each.peer, each.tag, each.nbytes) for each in seen] == [("in flight", 1, 9, 24)]
            assert seen[0].number in (number - 1, number)
            assert "test_recorder.py" in seen[0].where
        elif process_group.rank == 1:
            hc.recv(np.zeros(1), 0, tag=8)
            hc.send(np.zeros(3), 0, tag=9)


def test_what_fails_is_recorded_as_failed(process_group: hc.ProcessGroup) -> None:
    class Refuse:
        def begin(self, operation: hc.Operation) -> None:
            raise PermissionError

        def end(self, operation: hc.Operation) -> None:
            pass

    with hpccomm.debug.record(), process_group.register_hook(Refuse()), pytest.raises(PermissionError):
        hc.all_reduce(np.zeros(1))
    assert [each.state for each in hpccomm.debug.recorded()] == ["failed"]


def test_the_ring_keeps_the_last() -> None:
    with hpccomm.debug.record(size=3):
        for _ in range(10):
            hc.all_reduce(np.zeros(1))
    numbers = [each.number for each in hpccomm.debug.recorded()]
    assert np.diff(numbers).tolist() == [1, 1]
    with pytest.raises(ValueError, match="size is 0"):
        hpccomm.debug.record(size=0)


@pytest.mark.parametrize("make", [lambda: np.zeros(1), lambda: np.zeros(4)[::2]], ids=["fast", "long"])
def test_the_line_is_that_of_the_program(make: Callable[[], Any]) -> None:
    with hpccomm.debug.record(stack=True):
        hc.all_reduce(make())  # this line
    (record,) = hpccomm.debug.recorded()
    file, _, number = record.where.partition(":")
    assert file.endswith("test_recorder.py")
    with open(__file__) as lines:
        assert "# this line" in lines.readlines()[int(number) - 1]
    with hpccomm.debug.record():
        hc.all_reduce(make())
    assert hpccomm.debug.recorded()[0].where == ""


def test_a_second_recording_leaves_the_first_one_alone() -> None:
    with hpccomm.debug.record():
        with hpccomm.debug.record(size=1):
            hc.barrier()
            hc.barrier()
        hc.barrier()
    assert len(hpccomm.debug.recorded()) == 3


def test_only_the_compiled_fast_path_is_taken_while_operations_are_recorded(process_group: hc.ProcessGroup) -> None:
    hc.barrier()
    before = process_group.dispatcher.fast
    with hpccomm.debug.record():
        assert (process_group.dispatcher.fast is before) == (fastpath is not None)
    assert process_group.dispatcher.fast is before


def test_a_recording_is_as_long_as_it_is_asked_to_be() -> None:
    with hpccomm.debug.record(size=5000):
        for _ in range(4000):
            hc.barrier()
        for _ in range(10):
            hc.all_reduce(np.zeros(4)[::2])
    names = [each.name for each in hpccomm.debug.recorded()]
    assert names == ["barrier"] * 4000 + ["all_reduce"] * 10


@pytest.mark.skipif(fastpath is None, reason="without the compiled extension")
def test_the_last_collectives_are_in_a_report_without_a_recording(process_group: hc.ProcessGroup) -> None:
    for _ in range(2):  # the first array of a dtype, in a process, goes through the checks
        hc.broadcast(np.zeros(3, np.float32), process_group.size - 1)
        hc.all_reduce(np.zeros(4)[::2], "max")
    hc.all_reduce(np.zeros(9000)[::2])  # through the checks
    hc.barrier()
    report = json.loads(hpccomm.debug.dump("test").read_text())
    last = report["groups"][key_of(process_group)]["recent"][-4:]
    number = process_group.sequence_number
    assert last == [
        [number - 3, "broadcast", "float32", 12, 3, "", process_group.size - 1, False],
        [number - 2, "all_reduce", "float64", 16, 2, "MAX", None, False],
        [number - 1, "all_reduce", "float64", 36000],
        [number, "barrier", "", 0, 0, "", None, False],
    ]


def test_what_was_in_flight_at_the_end_of_the_recording_ends_in_it(process_group: hc.ProcessGroup) -> None:
    with hpccomm.debug.record():
        receive = hc.irecv(np.zeros(2), process_group.rank)
    assert [each.state for each in hpccomm.debug.recorded()] == ["in flight"]
    hc.isend(np.zeros(2), process_group.rank).wait()
    receive.wait()
    (record,) = hpccomm.debug.recorded()
    assert record.state == "completed"
    assert record.begin <= record.end


@pytest.mark.parametrize("is_fast", [True, False], ids=["the fast path", "the dispatcher"])
def test_a_recording_forgets_groups_that_have_gone_and_have_no_records(is_fast: bool) -> None:
    with hpccomm.debug.record(size=4):
        recorder = recorders.recorder()
        assert recorder is not None
        there = len(recorder.groups)  # of other tests
        for _ in range(2 * there + 3 * recorders.FEW):
            with hc.ProcessGroup.from_comm(MPI.COMM_SELF) as group:
                hc.barrier(group) if is_fast else hc.all_reduce(np.ones(1 << 17), group=group)
        assert len(recorder.groups) <= max(recorders.FEW, 2 * (there + 4))
        assert len(recorder._places) <= len(recorder.groups)
        records = hpccomm.debug.recorded()
        assert len(records) == 4
        assert {each.group for each in records} <= recorder.groups.keys()
