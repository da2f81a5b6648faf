"""Ranks that outnumber cores sleep while they wait for each other in memory of the node, and still serve MPI."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.job import mpi_library
from hpccomm.native import fastpath
from tests.native.test_fastpath import one_of_lists

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(fastpath is None, reason="without the compiled extension MPI does them"),
]

SLEEPS = 20  # of a millisecond each
LARGE = 1 << 18  # elements: no MPI sends them before the receiver answers


@pytest.fixture
def group(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[hc.ProcessGroup]:
    """A group of all ranks that sleep at once, with open memory of the node."""
    from hpccomm.mpi import compiled

    monkeypatch.setattr(mpi_library, "ranks_outnumber_cores", True)
    monkeypatch.setattr(compiled, "YIELDS", 0)
    group = hc.new_group()
    hc.all_reduce(np.ones(1), group=group)
    yield group
    hc.destroy_process_group(group)


def sleeps_of(pid: int) -> int:
    """Return how often the main thread of a process has left its core by itself; sched_yield does not count."""
    found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/task/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux counts the sleeps of a thread")
def test_a_rank_that_waits_sleeps_again_and_again(group: hc.ProcessGroup) -> None:
    pids = [os.getpid()]
    hc.broadcast_object_list(pids, 0, group)
    if group.rank != 0:
        before = sleeps_of(pids[0])
        while sleeps_of(pids[0]) < before + SLEEPS:
            os.sched_yield()
    hc.barrier(group)


def test_a_rank_that_sleeps_serves_a_large_message(group: hc.ProcessGroup) -> None:
    array = np.full(LARGE, group.rank + 1.0)
    if group.rank == 0:
        work = hc.irecv(array, 1, group=group)
        hc.barrier(group)  # rank 1 comes when its message has been sent
        work.wait()
        np.testing.assert_array_equal(array, np.full(LARGE, 2.0))
    else:
        if group.rank == 1:
            hc.send(array, 0, group=group)
        hc.barrier(group)


def test_operations_of_ranks_that_sleep_have_numpys_results(group: hc.ProcessGroup) -> None:
    n, me = group.size, group.rank
    for turn in range(200):
        root, small, large = turn % n, np.full(3, me + turn), np.full(20_000, float(me + turn))
        hc.all_reduce(small, group=group)
        np.testing.assert_array_equal(small, np.full(3, n * turn + n * (n - 1) // 2))
        hc.broadcast(large, root, group=group)
        np.testing.assert_array_equal(large, np.full(20_000, root + turn))
        hc.all_reduce(large, "max", group=group)
        np.testing.assert_array_equal(large, np.full(20_000, root + turn))
        gathered = [np.empty(1, int) for _ in range(n)] if me == root else None
        hc.gather(np.array([me * turn]), gathered, root, group=group)
        if gathered is not None:
            np.testing.assert_array_equal(np.concatenate(gathered), np.arange(n) * turn)


def test_broadcasts_in_a_cell_and_in_a_slot(group: hc.ProcessGroup) -> None:
    for nbytes in (8, 960, 961, 4096):
        for strided in (False, True):
            whole = np.full(2 * nbytes, group.rank, np.uint8)
            array = whole[::2] if strided and group.rank == 0 else whole[:nbytes]
            hc.broadcast(array, group.size - 1, group=group)
            np.testing.assert_array_equal(array, np.full(nbytes, group.size - 1, np.uint8))


def test_a_rank_that_takes_no_values_is_many_operations_ahead(
    process_group: hc.ProcessGroup, group: hc.ProcessGroup
) -> None:
    last, turns = group.size - 1, 30  # fewer than cells
    arrays = [np.array([1000 * turn + group.rank]) for turn in range(turns)]
    if group.rank != last:
        hc.barrier(process_group)  # the last rank calls it when it has ended all operations
    for array in arrays:
        hc.broadcast(array, last, group=group)
    if group.rank == last:
        hc.barrier(process_group)
    np.testing.assert_array_equal(np.concatenate(arrays), 1000 * np.arange(turns) + last)


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_of_lists(group: hc.ProcessGroup, seed: int) -> None:
    generator = np.random.default_rng([1, seed])
    for _ in range(50):
        one_of_lists(generator, group)


def test_a_rank_that_takes_values_hears_of_another_call(group: hc.ProcessGroup) -> None:
    outputs = [np.zeros(3) for _ in range(group.size)]
    error = r"rank \d of the group calls another operation, or with another op"
    if group.rank == 0:
        with pytest.raises(hc.DistBackendError, match=error):
            hc.gather(np.ones(3), outputs, 0, group=group)
    else:
        with pytest.raises(hc.DistBackendError, match=error):
            hc.scatter(np.ones(3), None, 0, group=group)
    array = np.ones(2000 if group.rank == 0 else 3)  # in a slot, and in a cell
    with contextlib.ExitStack() as stack:
        if group.rank < 2:  # the others only give values
            error = r"reduce .*: rank \d of the group calls another operation"
            stack.enter_context(pytest.raises(hc.DistBackendError, match=error))
        hc.reduce(array, 1, group=group)
    hc.barrier(group)


@pytest.mark.parametrize("count", [3, 1 << 18])  # packed; copied from array to array
def test_exchanges_of_ranks_that_sleep_have_numpys_results(group: hc.ProcessGroup, count: int) -> None:
    n, me = group.size, group.rank
    block = np.zeros(count + 2)
    with hc.new_grid((n,), (True,)) as grid, hc.halo_exchange_init(block, grid) as halo:
        for turn in range(50):
            block[1:-1] = 1000 * turn + me
            halo.start()
            halo.wait()
            assert (block[0], block[-1]) == (1000 * turn + (me - 1) % n, 1000 * turn + (me + 1) % n)
            hc.barrier(group)


def test_cores_are_counted_for_all_ranks_of_a_node(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = process_group.comm
    for cores, outnumber in (
        (lambda: {comm.rank}, False),
        (lambda: {0, *range(comm.size)}, False),
        (lambda: {7}, True),
    ):
        monkeypatch.setattr(mpi_library, "ranks_outnumber_cores", False)
        monkeypatch.setattr(mpi_library, "cores", cores)
        mpi_library.number_nodes(comm)
        assert mpi_library.ranks_outnumber_cores is outnumber
