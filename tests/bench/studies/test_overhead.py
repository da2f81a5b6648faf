"""The overhead of calls and messages: both contenders do the same work, and the table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import hpccomm as hc
from hpccomm import native
from hpccomm.bench.measure import Plan
from hpccomm.bench.session import Session
from hpccomm.bench.studies import overhead
from hpccomm.bench.studies.overhead import Comparison, Overhead

CALLS = [
    "all_reduce",
    "all_reduce, AVG",
    "all_reduce, strided",
    "all_reduce, float16",
    "all_reduce_coalesced, 3 arrays",
    "broadcast",
    "reduce",
    "all_gather_single",
    "all_gather, list of arrays",
    "reduce_scatter_single",
    "all_to_all_single",
    "sendrecv",
    "barrier",
    "all_reduce, async + wait",
    "broadcast, async + wait",
    "barrier, async + wait",
    "isend + irecv + wait_all",
    "batch of isend + irecv + wait_all",
    "hpccomm run: Allreduce",
    "hpccomm run: Isend + Irecv + Waitall",
]
MESSAGES = [
    "ping-pong: send + recv",
    "sendrecv",
    "isend + irecv + wait_all",
    "halo: 2 irecv + 2 isend + wait_all",
    "halo: batch_isend_irecv + wait_all",
    "all_reduce, get_future().wait()",
    "all_reduce, await",
    "coalescing(), 3 all_reduce",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "new_group + destroy",
]
ONCE = Plan(iterations=1, warmup=0, batch=1)


@pytest.fixture
def session(process_group: hc.ProcessGroup) -> Iterator[Session]:
    with Session(process_group, ["mpi4py", "python"]) as session:
        yield session


def test_both_contenders_leave_what_numpy_computes(session: Session) -> None:
    found = list(overhead.on_one_rank(session))
    if session.group.size > 1:
        found += overhead.on_two_ranks(session)
    for each in found:
        for call in each.calls.values():
            each.arrays.fill()
            session.comm.Barrier()  # nobody writes into a rank that is still filling its arrays
            call()
            assert each.arrays.wrong() == 0, (each.operation, call)


def test_the_arrays_are_what_the_rows_are_named_after(session: Session) -> None:
    found: dict[str, Comparison] = {each.operation: each for each in overhead.on_one_rank(session)}
    strided, half = (found[f"all_reduce, {what}"].arrays.receive for what in ("strided", "float16"))
    assert not strided.flags.c_contiguous
    assert half.dtype == np.float16
    for operation, count in (("all_reduce_coalesced, 3 arrays", 3), ("all_gather, list of arrays", session.group.size)):
        arrays = found[operation].arrays.receive
        assert len(arrays) == count
        assert all(each.base is None for each in arrays)  # not rows of one
    (batch,) = (each for name, each in found.items() if name.startswith("batch"))
    assert batch.arrays.send.nbytes == overhead.BYTES


def test_calls_are_measured_on_one_rank(process_group: hc.ProcessGroup) -> None:
    alone = hc.split_group(color=process_group.rank)
    assert isinstance(alone, hc.ProcessGroup)
    found = overhead.overheads(alone, ONCE)
    assert [each.operation for each in found] == CALLS
    assert all(min(each.mpi4py_ns, each.hpccomm_ns, each.recorded_ns) > 0 for each in found)
    has_both = [each for each in found if not each.operation.startswith("hpccomm run")]
    assert all((each.python_ns is None) == (native.fastpath is None) for each in has_both)
    hc.destroy_process_group(alone)


def test_messages_are_measured_on_two_ranks(process_group: hc.ProcessGroup) -> None:
    if process_group.size == 1:
        return
    pair = hc.new_group([0, 1])
    if isinstance(pair, hc.ProcessGroup):
        found = overhead.overheads(pair, ONCE)
        assert [each.operation for each in found] == MESSAGES
        assert pair.comm is not None
        assert pair.comm.bcast(found) == found  # the slower rank's times, on both
        hc.destroy_process_group(pair)
    if process_group.size > 2:
        with pytest.raises(ValueError, match=f"on 1 or 2 ranks; this group has {process_group.size}"):
            overhead.overheads(process_group)


def test_a_row_says_what_is_added_and_how_many_times_as_long_it_takes() -> None:
    first = Overhead("all_reduce", 280.0, 854.0, 1054.0)
    second = Overhead(MESSAGES[1], 12345.0, 1234567.0, 1234568.0)
    assert (first.added_ns, first.ratio, first.recorder_ns) == (574.0, pytest.approx(3.05), 200.0)
    title, columns, units, *lines, watchdog = overhead.table([first, second], 1, 25e-6).splitlines()
    assert title == (
        "what hpccomm adds to mpi4py's own call (below 0: faster than mpi4py): "
        "1 rank, 8 bytes, minimum of the repetitions"
    )
    assert columns.split() == ["operation", "mpi4py", "hpccomm", "added", "ratio", "recorder", "adds"]
    assert units.split() == ["(ns)"] * 4
    assert [line.split()[-5:] for line in lines] == [
        ["280", "854", "574", "3.05", "200"],
        ["12345", "1234567", "1222222", "100.01", "1"],
    ]
    assert len({len(line) for line in [columns, *lines]}) == 1
    assert watchdog == "the watchdog looks once in 1 s, for 25 us: 0.0025 % of the time, 0.021 ns of each all_reduce"
    assert "2 ranks, 8 bytes, median" in overhead.table([second], 2, 25e-6)


def test_each_path_has_a_column_where_there_are_two() -> None:
    first = Overhead("all_reduce", 280.0, 140.0, 240.0, 854.0)
    second = Overhead("barrier", 110.0, 100.0, 190.0, 1000.0)
    third = Overhead("monitored_barrier", 110.0, 200.0, 290.0)
    assert (first.added_ns, first.python_added_ns) == (-140.0, 574.0)
    _, columns, units, *lines, _ = overhead.table([first, second, third], 2, 25e-6).splitlines()
    assert columns.split()[1:] == ["mpi4py", "compiled", "added", "ratio", "python", "added", "recorder", "adds"]
    assert units.split() == ["(ns)"] * 6
    assert [line.split() for line in lines] == [
        ["all_reduce", "280", "140", "-140", "0.50", "854", "574", "100"],
        ["barrier", "110", "100", "-10", "0.91", "1000", "890", "90"],
        ["monitored_barrier", "110", "200", "90", "1.82", "-", "-", "90"],
    ]
    assert len({len(line) for line in [columns, *lines]}) == 1


@pytest.mark.skipif(native.fastpath is None, reason="without the compiled extension")
def test_the_path_in_python_is_another_one(session: Session) -> None:
    groups = [session.contenders[name].group for name in ("hpccomm", "python")]
    for group in groups:
        group.barrier()  # the first operation makes the backend, and with it the fast path
    mine, python = (group.dispatcher for group in groups)
    assert (mine.fast.is_open, python.fast.is_open) == (True, False)
    before = python.collectives
    for call in next(overhead.on_one_rank(session)).calls.values():
        call()
    assert python.collectives == before + 1


def test_a_look_of_the_watchdog_is_timed(process_group: hc.ProcessGroup) -> None:
    assert 0 < overhead.watchdog_look(3) < 60
