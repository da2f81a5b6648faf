"""Large broadcasts and the like go by the faster of two ways, which a group's first calls have timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.job import mpi_library
from hpccomm.native import fastpath
from hpccomm.process.tuning import Tuning

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(fastpath is None, reason="without the compiled extension MPI does them"),
]

NBYTES = 96 << 10
EACH = 5  # trials of each way
CALLS = 2 * EACH + 4
OPERATIONS = ["broadcast", "all_gather_single", "all_to_all_single"]


class Clock:
    """The first EACH calls of a timed operation are in memory of the node, as many more by MPI."""

    def __init__(self, in_node: int, by_mpi: int) -> None:
        self.took = in_node, by_mpi
        self.calls = self.time = 0

    def __call__(self) -> int:
        if self.calls % 2:
            self.time += self.took[self.calls // 2 // EACH % 2]
        self.calls += 1
        return self.time


@pytest.fixture
def group(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[hc.ProcessGroup]:
    """A group of all ranks that does not sleep, with open memory of the node."""
    monkeypatch.setattr(mpi_library, "ranks_outnumber_cores", False)
    group = hc.new_group()
    hc.all_reduce(np.ones(1), group=group)
    yield group
    hc.destroy_process_group(group)


def timed(group: hc.ProcessGroup, in_node: int, by_mpi: int) -> Clock:
    clock = group.dispatcher.fast_path.clock = Clock(in_node, by_mpi)
    return clock


def call(name: str, group: hc.ProcessGroup, turn: int, is_strided: bool = False, nbytes: int = NBYTES) -> None:
    """Call an operation of `nbytes` bytes, and compare the result with NumPy's."""
    n, me = group.size, group.rank
    count = nbytes // 8 // n * n
    rows = np.arange(n * count, dtype="f8").reshape(n, count) + turn

    def laid_out(array: np.ndarray) -> np.ndarray:
        return np.repeat(array, 2)[::2] if is_strided else array.copy()

    if name == "broadcast":
        output, expected = laid_out(rows[me]), rows[turn % n]
        hc.broadcast(output, turn % n, group=group)
    elif name == "all_gather_single":
        part = count // n
        output, expected = laid_out(np.zeros(count)), np.concatenate([row[:part] for row in rows])
        hc.all_gather_single(output, rows[me, :part], group=group)
    else:
        part = count // n
        output, expected = laid_out(np.zeros(count)), np.concatenate([row[me * part :][:part] for row in rows])
        hc.all_to_all_single(output, laid_out(rows[me]), group=group)
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [*((name, size) for name in OPERATIONS for size in (NBYTES, 3 << 20)), ("broadcast", 5 << 20)],
)
@pytest.mark.parametrize(("in_node", "by_mpi", "is_by_mpi"), [(100, 50, True), (50, 100, False), (100, 95, False)])
def test_all_ranks_take_the_faster_way(
    group: hc.ProcessGroup, name: str, nbytes: int, in_node: int, by_mpi: int, is_by_mpi: bool
) -> None:
    clock = timed(group, in_node, by_mpi)
    for turn in range(CALLS):
        call(name, group, turn, nbytes=nbytes)
    assert clock.calls == 20  # twice in each trial, and not in later calls
    assert [each[0] for each in group.dispatcher.fast_path.decided()] == [name]
    assert [each[2] for each in group.dispatcher.fast_path.decided()] == [is_by_mpi]


def test_ranks_whose_times_differ_agree(group: hc.ProcessGroup) -> None:
    timed(group, 100_000, 50_000 if group.rank == 0 else 200_000)
    for turn in range(CALLS):
        call("broadcast", group, turn)
    assert group.dispatcher.fast_path.decided() == [("broadcast", 64 << 10, False, 100_000, 200_000)]
    assert "broadcast from 64 to 128 KiB: by memory of the node (100 us), not MPI (200 us)" in group.describe()


def test_a_rank_that_takes_the_checked_way_counts_alike(group: hc.ProcessGroup) -> None:
    timed(group, 100, 50)
    for name in OPERATIONS:
        for turn in range(CALLS):
            call(name, group, turn, is_strided=group.rank == turn % 2)
    assert [each[:3] for each in group.dispatcher.fast_path.decided()] == [
        (name, 64 << 10, True) for name in OPERATIONS
    ]


@pytest.mark.parametrize("sees", ["all ranks", "one rank"])
def test_after_calls_that_differ_the_trials_go_on(group: hc.ProcessGroup, sees: str) -> None:
    clock, is_first = timed(group, 100, 50), group.rank == 0
    for turn in range(3):
        call("broadcast", group, turn)
    if sees == "all ranks":
        with pytest.raises(hc.DistBackendError, match="calls another operation"):
            call("broadcast" if is_first else "all_gather_single", group, 0)
    else:
        lists = [np.zeros(4 + (rank > 0)) for rank in range(group.size)] if is_first else None
        with pytest.raises(hc.DistBackendError) if is_first else contextlib.nullcontext():
            hc.gather(np.ones(4), lists, group_dst=0, group=group)
    for turn in range(CALLS):
        call("broadcast", group, turn)
    assert clock.calls == 20
    assert group.dispatcher.fast_path.decided() == [("broadcast", 64 << 10, True, 100, 50)]


def test_the_thread_of_asynchronous_operations_tries_nothing(group: hc.ProcessGroup) -> None:
    work = hc.broadcast(np.ones(1 << 18), 0, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert not group.dispatcher.backends["cpu"]._thread._backend.fast_path.tries


def test_a_table_of_the_program_turns_it_off(process_group: hc.ProcessGroup) -> None:
    from hpccomm.mpi.compiled import CompiledFastPath

    for table, tries in ((Tuning(), True), (Tuning(segment_bytes=100), True), (Tuning(node_bytes=1 << 20), False)):
        assert CompiledFastPath(process_group.comm, {}, table, 1 << 20).tries is tries


def test_ranks_that_outnumber_cores_try_nothing(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_library, "ranks_outnumber_cores", True)
    with hc.new_group() as group:
        hc.all_reduce(np.ones(1), group=group)
        clock = timed(group, 100, 50)
        for turn in range(CALLS):
            call("broadcast", group, turn)
        assert clock.calls == 0
