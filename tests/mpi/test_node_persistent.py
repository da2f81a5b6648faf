"""Persistent collectives in memory of the node: which those are, that turns do not meet, and that memory comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
import hpccomm.debug
from hpccomm.mpi import shared_memory
from hpccomm.native import fastpath

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(fastpath is None, reason="without the compiled extension MPI does them"),
]

LARGEST = 2 << 20  # bytes


def is_in_node(work: Any) -> bool:
    return isinstance(work, fastpath.Halves)  # type: ignore[union-attr]


class Case:
    """A persistent operation on arrays of `size` elements for each rank, and what a turn makes of them."""

    def __init__(self, name: str, group: hc.ProcessGroup, size: int) -> None:
        self.n, self.me, self.name = group.size, group.rank, name
        self.small, self.large, self.received = np.zeros(size), np.zeros((self.n, size)), np.zeros((self.n, size))
        self.pieces = np.array_split(self.small, 3)
        init: dict[str, Callable[[], hc.PersistentWork]] = {
            "all_reduce": lambda: hc.all_reduce_init(self.small, group=group),
            "avg": lambda: hc.all_reduce_init(self.small, "avg", group),
            "broadcast": lambda: hc.broadcast_init(self.small, group.ranks[-1], group),
            "all_gather_single": lambda: hc.all_gather_single_init(self.large, self.small, group),
            "reduce_scatter_single": lambda: hc.reduce_scatter_single_init(self.small, self.large, group=group),
            "all_to_all_single": lambda: hc.all_to_all_single_init(self.received, self.large, group=group),
            "coalesced": lambda: hc.all_reduce_coalesced_init(self.pieces, group=group),
        }
        self.work = init[name]()

    def fill(self, turn: int) -> None:
        """Give the input the values of this turn."""
        self.small[:] = turn + self.me
        if self.name in ("reduce_scatter_single", "all_to_all_single"):
            self.large[:] = turn + self.me + 100 * np.arange(self.n)[:, None]

    def check(self, turn: int) -> None:
        """Compare the output with what NumPy makes of all ranks' inputs."""
        given = turn + np.arange(self.n)
        wanted = {
            "broadcast": given[-1],
            "avg": given.mean(),
            "all_gather_single": given[:, None],
            "reduce_scatter_single": given.sum() + 100 * self.n * self.me,
            "all_to_all_single": given[:, None] + 100 * self.me,
        }.get(self.name, given.sum())
        outputs = {"all_gather_single": self.large, "all_to_all_single": self.received}
        output = outputs.get(self.name, self.small)
        assert (output == wanted).all(), (self.name, turn)


CASES = [
    "all_reduce",
    "avg",
    "broadcast",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "coalesced",
]
every_case = pytest.mark.parametrize("name", CASES)
every_size = pytest.mark.parametrize("size", [3, 20_000], ids=["small", "large"])  # with 3 ranks, the second in shares


def test_arrays_of_a_node_need_no_messages_and_others_do(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    for array, op, without_messages in (
        (np.ones(1), "sum", True),
        (np.ones(LARGEST // 8)[::-1], "avg", True),
        (np.ones(2, np.float16), "sum", True),
        (np.ones(LARGEST // 8 + 1), "sum", False),
        (np.ones(0), "sum", False),
    ):
        with hc.all_reduce_init(array, op) as work:
            assert is_in_node(work) == without_messages, (array.size, op)
            work.start()
            work.wait()
            assert (array == (1 if op == "avg" else n)).all()


@every_case
@every_size
def test_ranks_may_be_late(process_group: hc.ProcessGroup, name: str, size: int) -> None:
    case = Case(name, process_group, size)
    assert is_in_node(case.work)
    for turn in range(60):
        case.fill(turn)
        if turn % 20 == case.me:
            time.sleep(0.002)
        case.work.start()
        if turn % 10 == case.me:
            time.sleep(0.002)
        case.work.wait()
        case.check(turn)
    case.work.free()


@every_case
@pytest.mark.parametrize("size", [3, LARGEST])
def test_a_rank_alone_has_them_too(process_group: hc.ProcessGroup, name: str, size: int) -> None:
    with hc.new_group([process_group.rank], use_local_synchronization=True) as alone:  # type: ignore[union-attr]
        case = Case(name, alone, size)
        assert is_in_node(case.work) or (name == "coalesced" and size == LARGEST)  # which are several
        for turn in range(3):
            case.fill(turn)
            case.work.start()
            case.work.wait()
            case.check(turn)
        case.work.free()


@every_case
@every_size
def test_between_its_halves_the_group_does_other_operations(
    process_group: hc.ProcessGroup, name: str, size: int
) -> None:
    case, other = Case(name, process_group, size), np.zeros(2000)
    for turn in range(10):
        case.fill(turn)
        case.work.start()
        for _ in range(5):  # they use the group's own memory of the node, each set of it several times
            other[:] = turn
            hc.all_reduce(other)
            assert (other == turn * case.n).all()
        hc.barrier()
        case.work.wait()
        case.check(turn)
    case.work.free()


@every_case
@every_size
def test_a_wait_needs_nothing_of_what_others_do_in_theirs(process_group: hc.ProcessGroup, name: str, size: int) -> None:
    """Rank 0 waits, then sends what the others receive before they wait."""
    case = Case(name, process_group, size)
    for turn in range(10):
        case.fill(turn)
        case.work.start()
        if case.me == 0:
            case.work.wait()
            for rank in range(1, case.n):
                hc.send(np.ones(1), rank)
        else:
            hc.recv(np.ones(1), 0)
            case.work.wait()
        case.check(turn)
        hc.barrier()
    case.work.free()


def test_operations_may_be_waited_for_in_any_order(process_group: hc.ProcessGroup) -> None:
    cases = [Case(name, process_group, size) for name in CASES for size in (2, 5000)]
    for turn in range(20):
        for case in cases:
            case.fill(turn)
            case.work.start()
        for i in range(len(cases)):
            cases[(i + process_group.rank + turn) % len(cases)].work.wait()  # another order on each rank
        for case in cases:
            case.check(turn)
    for case in cases:
        case.work.free()


@every_case
def test_a_rank_that_waits_sees_when_the_others_have_begun(process_group: hc.ProcessGroup, name: str) -> None:
    case = Case(name, process_group, 3)
    case.fill(1)
    if process_group.rank:
        case.work.start()
        with pytest.raises(hc.DistTimeoutError, match=r": not done after 0.01 s; it is still in flight"):
            case.work.wait(0.01)
        assert not case.work.is_completed()
        hc.barrier()
    else:
        hc.barrier()
        case.work.start()
    while not case.work.is_completed():
        pass
    case.check(1)
    case.work.free()


@pytest.mark.parametrize("size", [1, 30_000])
def test_ranks_that_differ_hear_of_it_and_go_on(process_group: hc.ProcessGroup, size: int) -> None:
    array = np.ones(size)
    differing = hc.all_reduce_init(array, "max" if process_group.rank else "min")
    differing.start()
    with pytest.raises(hc.DistBackendError, match="calls another operation"):
        differing.wait()
    with hc.all_reduce_init(array) as work:
        work.start()
        work.wait()
        assert (array == process_group.size).all()
    hc.barrier()
    differing.start()
    with pytest.raises(hc.DistBackendError, match="calls another operation"):
        differing.wait(60)
    differing.free()


def memory_of(group: Any) -> Any:
    return group.dispatcher.backends["cpu"].node_persistent


def test_there_is_always_another_window(process_group: hc.ProcessGroup) -> None:
    with hc.new_group() as group:  # type: ignore[union-attr]
        arrays = [np.full(size, process_group.rank) for size in range(1, 400)]
        works = [hc.all_reduce_init(array, "max", group) for array in arrays]
        assert 1 < len(memory_of(group)._windows) < 10
        for work in works:
            work.start()
        for work, array in zip(works, arrays, strict=True):
            work.wait()
            assert (array == group.size - 1).all()


def test_memory_of_freed_operations_is_used_again(process_group: hc.ProcessGroup) -> None:
    """The last rank frees them late: until then the others have memory of their own."""
    array = np.zeros(LARGEST // 8)
    is_late = process_group.rank == process_group.size - 1
    with hc.new_group() as group:  # type: ignore[union-attr]
        kept: list[hc.PersistentWork] = []
        for turn in range(40):
            work = hc.all_reduce_init(array, group=group)
            assert is_in_node(work), turn
            array[:] = turn
            work.start()
            work.wait()
            assert (array == turn * group.size).all()
            kept.append(work)
            if len(kept) > is_late:
                kept.pop(0).free()
        assert memory_of(group)._made <= 64 << 20


@pytest.mark.parametrize("limit", ["what a group may have", "what is free"])
def test_where_there_is_no_more_shared_memory_mpi_takes_over(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    with hc.new_group() as group:  # type: ignore[union-attr]
        array, in_node = np.zeros(500), []
        hc.all_reduce(array, group=group)  # the group has its own memory of the node already
        if limit == "what is free":
            monkeypatch.setattr(shared_memory, "free_bytes", lambda: 150_000 if process_group.rank == 0 else 1 << 40)
        else:
            monkeypatch.setattr("hpccomm.mpi.node_persistent.MOST_BYTES", 64 << 10)
        for turn in range(40):
            work = hc.all_reduce_init(array, group=group)
            in_node.append(is_in_node(work))
            array[...] = turn
            work.start()
            work.wait()
            assert (array == turn * process_group.size).all()
    assert in_node[0]
    assert not in_node[-1]


def test_a_factor_that_overflows_is_silent_as_in_mpi(process_group: hc.ProcessGroup) -> None:
    array = np.full(2, 3e38, np.float32)
    with hc.all_reduce_init(array, hc.ReduceOp.PREMUL_SUM(100)) as work:
        work.start()
        work.wait()
    assert np.isinf(array).all()


def test_destroying_the_group_gives_the_memory_back(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    work = hc.all_reduce_init(np.ones(5), "avg", group)
    work.start()
    work.wait()
    before = len(shared_memory._outliving)
    hc.destroy_process_group(group)
    assert len(shared_memory._outliving) == before
    with pytest.raises(hc.DistError, match="all_reduce: freed"):
        work.start()


def facts(record: Any) -> tuple[Any, ...]:
    return record.name, record.dtype, record.count, record.nbytes, record.op, record.peer, record.tag, record.state


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i1", "c16", "?", "M8[s]", "V3"])
def test_a_start_is_recorded_as_the_plain_operation_is(process_group: hc.ProcessGroup, dtype: str) -> None:
    """A rank that is in it is compared with one that has gone on by what the compiled fast path remembers."""
    n = process_group.size
    one, all_ = np.zeros(6, dtype), np.zeros((n, 6), dtype)
    other, many = all_.copy(), [one.copy(), one[::2].copy(), one[::3].copy()]
    calls: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        (hc.broadcast, hc.broadcast_init, (one, n - 1)),
        (hc.all_gather_single, hc.all_gather_single_init, (all_, one)),
        (hc.all_to_all_single, hc.all_to_all_single_init, (other, all_)),
    ]
    ops = ["avg", "sum"] if dtype == "c16" else ["sum", "max", "avg", hc.ReduceOp.PREMUL_SUM(2)]
    for op in [] if dtype in "M8[s] V3" else ops[:2] if np.dtype(dtype).kind in "bi" else ops:
        calls.append((hc.all_reduce, hc.all_reduce_init, (one, op)))
        calls.append((hc.reduce_scatter_single, hc.reduce_scatter_single_init, (one, all_, op)))
        calls.append((hc.all_reduce_coalesced, hc.all_reduce_coalesced_init, (many, op)))
        calls.append((hc.all_reduce_coalesced, hc.all_reduce_coalesced_init, ([one[::2]], op)))
    for plain, init, arguments in calls:
        with init(*arguments) as work, hpccomm.debug.record():
            plain(*arguments)
            for _ in range(2):
                work.start()
                work.wait()
        expected, *found = map(facts, hpccomm.debug.recorded())
        assert found == [(f"{plain.__name__}_start", *expected[1:])] * 2, arguments
