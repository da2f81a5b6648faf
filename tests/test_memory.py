"""Memory of operations beside the program's arrays: at most what docs/concepts/arrays.md says, nothing afterwards."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.debug.lonely import Lonely
from hpccomm.debug.watchdog import Watchdog
from hpccomm.mpi.fast_path import RUN_BYTES
from hpccomm.process.tuning import Tuning

from .arrays import contiguous, strided
from .launch import time_limit

pytestmark = pytest.mark.usefixtures("process_group")

LARGE = 48 << 20  # bytes: larger than every threshold
SLACK = 100_000


@pytest.fixture(scope="module", autouse=True)
def _nobody_looks(process_group: hc.ProcessGroup) -> Iterator[None]:
    """Keep the watchdog's thread from looking: what it takes, and imports at its first look, would be measured, too."""
    has_come = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        for each in (Watchdog, Lonely):  # that of many ranks, or of one
            patch.setattr(each, "look", lambda *_: has_come.set())
        assert has_come.wait(time_limit(60))
        yield


def large(dtype: Any = np.float32) -> Any:
    return np.ones(LARGE // np.dtype(dtype).itemsize, dtype)


def extra(call: Callable[[], Any]) -> int:
    """Return the bytes that NumPy and Python hold at the peak of a call more than before it; the first one imports."""
    call()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def finished(work: Any) -> None:
    work.wait()


CONTIGUOUS: dict[str, Callable[[Any, Any, int], Any]] = {
    "broadcast": lambda whole, part, n: hc.broadcast(whole, 0),
    "all_reduce": lambda whole, part, n: hc.all_reduce(whole),
    "all_reduce, asynchronous": lambda whole, part, n: finished(hc.all_reduce(whole, async_op=True)),
    "reduce": lambda whole, part, n: hc.reduce(whole, 0),
    "scan": lambda whole, part, n: hc.scan(whole),
    "all_gather_single": lambda whole, part, n: hc.all_gather_single(whole, part),
    "all_to_all_single": lambda whole, part, n: hc.all_to_all_single(whole, np.empty_like(whole)),
    "sendrecv": lambda whole, part, n: hc.sendrecv(whole, hc.get_rank(), np.empty_like(whole), hc.get_rank()),
}


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_contiguous_arrays_are_not_copied(process_group: hc.ProcessGroup, name: str) -> None:
    n = process_group.size
    whole = np.ones(LARGE // 4 // n * n, np.float32)
    part = np.ones(whole.size // n, np.float32)
    own = whole.nbytes if "empty_like" in CONTIGUOUS[name].__code__.co_names else 0
    assert extra(lambda: CONTIGUOUS[name](whole, part, n)) - own < SLACK


def test_reduce_scatter_single_holds_one_segment(process_group: hc.ProcessGroup) -> None:
    n = process_group.size
    whole = np.ones(LARGE // 4 // n * n, np.float32)
    part = np.ones(whole.size // n, np.float32)
    assert whole.nbytes > Tuning().reduce_scatter_bytes
    assert extra(lambda: hc.reduce_scatter_single(part, whole)) < Tuning().segment_bytes + SLACK


def test_what_is_not_contiguous_is_packed_once() -> None:
    strided = large()[::2]
    assert extra(lambda: hc.all_reduce(strided)) < strided.nbytes + SLACK


def test_half_precision_is_reduced_in_a_copy_of_twice_the_size() -> None:
    half = large(np.float16)
    assert extra(lambda: hc.all_reduce(half)) < 2 * half.nbytes + SLACK


def test_node_shared_arrays_take_a_chunk_at_most(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    array = hc.empty_shared(8 << 20, np.float32, group)
    array[...] = 1
    hc.all_reduce(array, group=group)
    if process_group.size > 1:
        assert extra(partial(hc.reduce, array, 0, group=group)) < Tuning().shared_chunk_bytes + SLACK
    del array
    hc.destroy_process_group(group)


@pytest.mark.parametrize("way", ["shared memory", "messages"])
@pytest.mark.parametrize("name", ["halo_exchange", "halo_accumulate", "redistribute"])
def test_persistent_exchanges_take_no_memory_when_they_run(
    process_group: hc.ProcessGroup, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "messages":  # as between nodes
        monkeypatch.setattr("hpccomm.mpi.node_exchange.has_room_to_spare", lambda _: False)
    n, me = process_group.size, process_group.rank
    with hc.new_grid((0, 0), periodic=True) as grid:
        if name == "redistribute":
            mine, columns = hc.block_slice(600, n, me), hc.block_slice(800, n, me)
            rows, whole = strided(np.ones((mine.stop - mine.start, 800))), np.ones((800, 600)).T
            boxes = (slice(0, 600), columns), (mine, slice(0, 800))
            works = [hc.redistribute_init(whole[:, columns], rows, *boxes, group=grid)]
        else:
            fields = [layout(np.ones((9, 9, 8000), t)) for t in ("f4", "c16") for layout in (contiguous, strided)]
            works = [getattr(hc, f"{name}_init")(each, grid, ((1, 2), 1)) for each in (fields[:3], fields[3])]

        def steps() -> None:
            for turn in range(10):
                for work in works:
                    work.start()
                for work in works:
                    while turn % 2 and not work.is_completed():
                        pass
                    work.wait()

        working_memory = 2 * np.getbufsize() * 16 if name == "halo_accumulate" else 0  # of NumPy's additions
        assert extra(steps) < working_memory + SLACK  # what goes to one rank has 190,000 bytes and more


def test_coalesced_operations_keep_one_run_at_most(process_group: hc.ProcessGroup) -> None:
    group = hc.new_group()
    for count in (100, 20_000, 100):
        hc.all_reduce_coalesced([np.ones(100) for _ in range(count)], group=group)
        backend: Any = group.dispatcher.backends["cpu"]  # type: ignore[union-attr]
        assert 0 < backend._coalesced.scratch.nbytes <= RUN_BYTES
    hc.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rounds", [8000, pytest.param(800_000, marks=pytest.mark.slow)])  # of 13: a little over 10^7
def test_many_small_operations_leave_nothing_behind(process_group: hc.ProcessGroup, rounds: int) -> None:
    if process_group.size > 2:
        pytest.skip("on 2 ranks: with more, a small machine takes minutes")
    n, me = process_group.size, process_group.rank
    after, before = (me + 1) % n, (me - 1) % n
    array, all_of_them, other, strided = np.ones(1), np.ones(n), np.ones(1), np.ones((4, 2))[:, 0]
    parts, others = [np.ones(1) for _ in range(n)], [np.ones(1) for _ in range(n)]

    def some(times: int) -> None:
        for _ in range(times):
            hc.all_reduce(array, "max")
            hc.broadcast(array, 0)
            hc.all_gather_single(all_of_them, array)
            hc.sendrecv(array, after, other, before)
            hc.all_reduce(array[:], "avg")
            hc.all_reduce(strided, "max")
            hc.all_to_all(others, parts)
            hc.all_reduce_coalesced(parts, "max")
            hc.all_reduce(array, "max", async_op=True).wait()  # type: ignore[union-attr]
            hc.all_reduce(np.ones(1), "max", async_op=True)  # dropped
            hc.barrier()
            hc.isend(array, after)  # dropped
            hc.irecv(other, before).wait()  # type: ignore[union-attr]
        gc.collect()
        process_group.barrier()

    some(max(5000, rounds // 10))  # MPICH takes 2.5 MiB after 40,000 of these rounds, once
    at_first = resident()
    some(rounds)
    assert resident() - at_first <= max(256 << 10, rounds)  # a byte for 13 of them, or what Python keeps for later


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
