"""The fast path makes the same call of MPI as the long one, is really taken, and stays fast."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.backend import FastPath
from hpccomm.debug.watchdog import Watchdog
from hpccomm.native import fastpath
from hpccomm.process.tuning import Tuning

from ..arrays import contiguous, strided

RANKS_OF_CALL: dict[str, Callable[[Any, int, int], tuple[Any, Any]]] = {}  # name -> (result, expected)


def _case(function: Callable[[Any, int, int], tuple[Any, Any]]) -> Callable[[Any, int, int], tuple[Any, Any]]:
    RANKS_OF_CALL[function.__name__] = function
    return function


def _everyone(n: int, columns: int) -> Any:
    """Row r is what rank r contributes."""
    return np.arange(n * columns, dtype=np.float64).reshape(n, columns)


@_case
def broadcast(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    array = layout(_everyone(n, 4)[me])
    hc.broadcast(array, n - 1)
    return array, _everyone(n, 4)[n - 1]


@_case
def all_reduce(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    array = layout(_everyone(n, 4)[me])
    hc.all_reduce(array)
    return array, _everyone(n, 4).sum(axis=0)


@_case
def reduce(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    array = layout(_everyone(n, 4)[me])
    hc.reduce(array, n - 1, "max")
    return array, _everyone(n, 4).max(axis=0) if me == n - 1 else _everyone(n, 4)[me]


@_case
def all_gather_single(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    output = layout(np.zeros((n, 4)))
    hc.all_gather_single(output, layout(_everyone(n, 4)[me]))
    return output, _everyone(n, 4)


@_case
def reduce_scatter_single(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    output = layout(np.zeros(3))
    hc.reduce_scatter_single(output, layout(_everyone(n, 3 * n)[me]))
    return output, _everyone(n, 3 * n).sum(axis=0)[3 * me : 3 * me + 3]


@_case
def all_to_all_single(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    output = layout(np.zeros(2 * n))
    hc.all_to_all_single(output, layout(_everyone(n, 2 * n)[me]))
    return output, _everyone(n, 2 * n)[:, 2 * me : 2 * me + 2].reshape(-1)


@_case
def sendrecv(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    output = layout(np.zeros(4))
    sender = hc.sendrecv(layout(_everyone(n, 4)[me]), (me + 1) % n, output, (me - 1) % n)
    assert sender == (me - 1) % n
    return output, _everyone(n, 4)[(me - 1) % n]


@_case
def send_and_recv(layout: Any, n: int, me: int) -> tuple[Any, Any]:
    array = layout(_everyone(n, 4)[me])
    if n > 1 and me == n - 1:
        hc.send(array, 0, tag=3)
    elif n > 1 and me == 0:
        assert hc.recv(array, n - 1, tag=3) == n - 1
    return array, _everyone(n, 4)[n - 1 if me == 0 else me]


every_call = pytest.mark.parametrize("name", RANKS_OF_CALL)


@every_call
@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_on_the_fast_and_on_the_long_path_meet(process_group: hc.ProcessGroup, name: str, odd: int) -> None:
    layout = strided if process_group.rank % 2 == odd else contiguous
    result, expected = RANKS_OF_CALL[name](layout, process_group.size, process_group.rank)
    np.testing.assert_array_equal(result, expected)


@every_call
@pytest.mark.skipif(fastpath is None, reason="the fast path is compiled")
def test_contiguous_arrays_take_the_fast_path(
    process_group: hc.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "send_and_recv" and process_group.size == 1:
        pytest.skip("one rank has nobody to send to")
    hc.barrier()  # makes the backend
    fast, taken = process_group.dispatcher.fast, []

    class Watched(FastPath):
        def __getattribute__(self, operation: str) -> Any:
            def call(*arguments: Any) -> Any:
                outcome = getattr(fast, operation)(*arguments)
                taken.append(outcome is not None and outcome is not False)
                return outcome

            return call

    monkeypatch.setattr(process_group.dispatcher, "fast", Watched())
    RANKS_OF_CALL[name](contiguous, process_group.size, process_group.rank)
    uninvolved = name == "send_and_recv" and process_group.rank not in (0, process_group.size - 1)
    assert taken == ([] if uninvolved else [True])


def test_short_operations_are_numbered_like_all_others(process_group: hc.ProcessGroup) -> None:
    numbers = []
    for array in (np.ones(2), np.ones((2, 4))[:, ::2]):  # the fast path, and the long one
        numbers.append(hc.barrier(async_op=True).sequence_number)  # type: ignore[union-attr]
        hc.all_reduce(array)
    numbers.append(hc.barrier(async_op=True).sequence_number)  # type: ignore[union-attr]
    assert np.diff(numbers).tolist() == [2, 2]


@pytest.mark.mpi(min_size=3)
def test_split_sizes_may_be_equal_on_one_rank_and_not_on_another(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    counts = np.ones((n, n), int)  # [sender, receiver]
    counts[1, 1:3] = 2, 0  # the others send one row to each; rank 2 receives none from rank 1
    sent = np.concatenate([np.full(counts[me, receiver], 10 * me + receiver) for receiver in range(n)])
    expected = np.concatenate([np.full(counts[sender, me], 10 * sender + me) for sender in range(n)])
    output = np.zeros(expected.shape, int)
    hc.all_to_all_single(output, sent, counts[:, me], counts[me])
    np.testing.assert_array_equal(output, expected)


def test_the_sender_is_a_global_rank_whatever_kind_of_number_names_it(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    group = hc.new_group(list(reversed(range(n))), sort_ranks=False)
    assert isinstance(group, hc.ProcessGroup)
    right, left = np.int64((group.rank + 1) % n), np.int64((group.rank - 1) % n)
    array, output = np.full(2, group.rank), np.zeros(2, int)
    sender = hc.sendrecv(array, None, output, group=group, group_dst=right, group_src=left)
    assert sender == group.ranks[left]
    assert (output == left).all()


def test_no_split_sizes_may_be_said_in_two_ways(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    output = np.zeros(n, int)
    given: Any = [] if me % 2 else None
    hc.all_to_all_single(output, np.full(n, me), given, given)
    assert output.tolist() == list(range(n))


REDUCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {  # of small arrays, and of a large one for each rank
    "all_reduce": lambda x, xs, group: hc.all_reduce(x, group=group),
    "reduce": lambda x, xs, group: hc.reduce(x, group.ranks[0], group=group),
    "reduce_scatter_single": lambda x, xs, group: hc.reduce_scatter_single(x, xs, group=group),
}
REDUCTIONS_IN_C: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scan": lambda x, xs, group: hc.scan(x, group=group),
    "avg": lambda x, xs, group: hc.all_reduce(x[:1000], "avg", group),
    "strided": lambda x, xs, group: hc.all_reduce(x[:2000:2], group=group),
    "all_reduce_coalesced": lambda x, xs, group: hc.all_reduce_coalesced([x, xs], group=group),
    "reduce_scatter_single_coalesced": lambda x, xs, group: hc.reduce_scatter_single_coalesced([x], [xs], group=group),
}


@pytest.mark.skipif(fastpath is None, reason="the fast path is compiled")
def test_a_node_shared_array_slows_none_but_large_reductions(process_group: hc.ProcessGroup) -> None:
    """Below `shared_bytes` none is done in place, whatever the array is."""
    with hc.new_group() as group:  # type: ignore[union-attr]
        hc.barrier(group)  # makes the backend
        calls = {**REDUCTIONS, **REDUCTIONS_IN_C}
        if group.size == 1:
            calls.pop("scan", None)
        small, large = (np.ones(size) for size in (16 // group.size * 1000, Tuning().shared_bytes // 8 * group.size))
        shared = hc.empty_shared(100, group=group)
        for name, call in calls.items():
            for array in (small, shared) if name in ("all_reduce", "reduce") else (small,):
                before = group.dispatcher.collectives  # of those that took the long path
                call(array, np.ones((group.size, array.size)), group)
                assert group.dispatcher.collectives == before, name
        for name in REDUCTIONS:
            before = group.dispatcher.collectives
            REDUCTIONS[name](large[:: group.size].copy(), large, group)
            assert group.dispatcher.collectives == before + 1, name


ME = MPI.COMM_WORLD.Get_rank()
STRIDED, HALF, OTHER = np.ones(6)[::2], np.ones(1, np.float16), np.ones(1)
PAIR = ((hc.irecv, np.ones(1), ME), (hc.isend, np.ones(1), ME))

# -- a guard against growth that does not time anything --------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "in_c", "in_python"),
    [
        (lambda x, y: hc.all_reduce(x), 2, 12),
        (lambda x, y: hc.broadcast(x, 0), 2, 14),
        (lambda x, y: hc.all_gather_single(y, x), 2, 16),
        (lambda x, y: hc.reduce(x, 0), 2, 21),
        (lambda x, y: hc.all_reduce(x, async_op=True).wait(), 2, 19),
        (lambda x, y: hc.all_reduce(x, "avg"), 2, 12),
        (lambda x, y: hc.all_reduce(STRIDED), 2, 13),
        (lambda x, y: hc.all_reduce(HALF), 2, 18),
        (lambda x, y: [work.wait() for work in (hc.irecv(x, ME), hc.isend(OTHER, ME))], 3, 52),
        (lambda x, y: [work.wait() for work in hc.batch_isend_irecv([hc.P2POp(*each) for each in PAIR])], 3, 52),
    ],
    ids=[
        "all_reduce",
        "broadcast",
        "all_gather_single",
        "reduce",
        "async",
        "avg",
        "strided",
        "float16",
        "isend and irecv",
        "batch",
    ],
)
def test_a_short_operation_enters_few_functions_and_leaves_no_memory(
    process_group: hc.ProcessGroup,
    call: Callable[[Any, Any], None],
    in_c: int,
    in_python: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array, output = np.ones(1), np.ones(process_group.size)
    for _ in range(10):  # one of the first makes memory of the node
        call(array, output)
        hc.barrier()
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    gc.collect()
    gc.disable()  # what it calls for groups that are gone is not the operation's
    sys.setprofile(note)
    try:
        call(array, output)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(entered[1:]) <= (in_c if fastpath else in_python), entered  # the first is the lambda

    monkeypatch.setattr(Watchdog, "look", lambda self, now: None)  # which keeps notes of its own
    monkeypatch.setattr(Watchdog, "_looks_for_questions", lambda self: False)  # whose files take memory, for a moment
    tracemalloc.start()
    try:
        growths = []
        for _ in range(5):  # a thread of hpccomm may keep a note in one of them
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(1000):
                call(array, output)
            growths.append(tracemalloc.get_traced_memory()[0] - before)
        assert min(growths[1:]) < 1000, growths  # less than a byte for each call
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", [2**70, -(2**70), 2**63])
def test_a_rank_or_tag_that_no_long_holds_is_refused_as_any_other(
    process_group: hc.ProcessGroup, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    hc.all_reduce(np.ones(3))
    for call in (
        lambda: hc.send(np.ones(3), number),
        lambda: hc.isend(np.ones(3), 0, tag=number),
        lambda: hc.recv(np.ones(3), number),
        lambda: hc.broadcast(np.ones(3), number),
    ):
        with pytest.raises(ValueError, match=str(number)):
            call()
    assert capfd.readouterr().err == ""  # no "Exception ignored in ..."
