"""Persistent operations on GPU arrays."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from ..arrays import assert_same, contiguous, strided, uneven
from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
every_layout = pytest.mark.parametrize("layout", [contiguous, strided, uneven])


def of_rank(rank: int, start: int, n: int) -> Any:
    return np.arange(n, dtype=np.float64) + 10 * rank + start


@every_layout
@pytest.mark.parametrize("op", [hc.ReduceOp.SUM, hc.ReduceOp.AVG, hc.ReduceOp.PREMUL_SUM(0.5)], ids=str)
def test_all_reduce_again_and_again(layout: Any, op: Any, process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.zeros(6), layout)
    factor = {"AVG": 1 / SIZE, "SUM": 1.0}.get(op.name, 0.5)
    with hc.all_reduce_init(array, op) as reduction:
        for start in range(3):
            gpus.write(array, of_rank(RANK, start, 6))
            if start == 1:
                reduction.run()
            else:
                reduction.start()
                reduction.wait()
            expected = factor * sum(of_rank(rank, start, 6) for rank in range(SIZE))
            np.testing.assert_allclose(gpus.values(array), expected, rtol=1e-14)


def test_every_persistent_operation(process_group: hc.ProcessGroup) -> None:
    n = 4
    mine = gpus.array(np.zeros(n))
    gathered, long = gpus.array(np.zeros(n * SIZE)), gpus.array(np.zeros(n * SIZE))
    short, exchanged = gpus.array(np.zeros(n)), gpus.array(np.zeros(n * SIZE))
    several = [gpus.array(np.zeros(k + 1)) for k in range(3)]
    broadcast = gpus.array(np.zeros(n))
    works = [
        hc.broadcast_init(broadcast, SIZE - 1),
        hc.all_gather_single_init(gathered, mine),
        hc.reduce_scatter_single_init(short, long),
        hc.all_to_all_single_init(exchanged, long),
        hc.all_reduce_coalesced_init(several),
    ]
    for start in range(2):
        for array, size in ((mine, n), (broadcast, n), (long, n * SIZE), *((each, each.size) for each in several)):
            gpus.write(array, of_rank(RANK, start, size))
        for work in works:
            work.start()
        for work in works:
            work.wait()
        whole = [of_rank(rank, start, n * SIZE) for rank in range(SIZE)]
        here = slice(RANK * n, RANK * n + n)
        assert_same(gpus.values(broadcast), of_rank(SIZE - 1, start, n))
        assert_same(gpus.values(gathered), np.concatenate([of_rank(rank, start, n) for rank in range(SIZE)]))
        assert_same(gpus.values(short), sum(whole)[here])
        assert_same(gpus.values(exchanged), np.concatenate([each[here] for each in whole]))
        for each in several:
            assert_same(gpus.values(each), sum(of_rank(rank, start, each.size) for rank in range(SIZE)))
    for work in works:
        work.free()


@every_layout
@pytest.mark.parametrize("op", [hc.ReduceOp.SUM, hc.ReduceOp.PREMUL_SUM(0.5)], ids=str)
@pytest.mark.parametrize("blocking_wait", [False, True])
def test_a_cuda_graph_replays_it(
    layout: Any, op: Any, blocking_wait: bool, process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = gpus.array(np.zeros(6), layout)
    hc.all_reduce(array)
    connection = process_group.dispatcher.backends["cuda"]._connection
    monkeypatch.setattr(connection, "wait_blocks", blocking_wait)
    factor = 0.5 if op.factor else 1.0
    with hc.all_reduce_init(array, op) as reduction:
        with gpus.captured() as graph:
            reduction.start()
            reduction.wait()
            assert reduction.is_completed()
        for start in range(3):
            gpus.write(array, of_rank(RANK, start, 6))
            if start == 1:  # in between as it is
                reduction.start()
                reduction.wait()
            else:
                graph.launch()
            assert_same(gpus.values(array), factor * sum(of_rank(rank, start, 6) for rank in range(SIZE)))


def test_a_cuda_graph_of_several(process_group: hc.ProcessGroup) -> None:
    mine, gathered = gpus.array(np.zeros(4)), gpus.array(np.zeros(4 * SIZE))
    several = [gpus.array(np.zeros(k + 1), strided) for k in range(3)]
    hc.all_reduce(mine, async_op=True).wait()  # on another stream, outside the graph
    works = [hc.all_gather_single_init(gathered, mine), hc.all_reduce_coalesced_init(several)]
    with gpus.captured() as graph:
        for work in works:
            work.start()
            work.wait()
    for start in range(2):
        for array in (mine, *several):
            gpus.write(array, of_rank(RANK, start, array.size))
        graph.launch()
        assert_same(gpus.values(gathered), np.concatenate([of_rank(rank, start, 4) for rank in range(SIZE)]))
        for array in several:
            assert_same(gpus.values(array), sum(of_rank(rank, start, array.size) for rank in range(SIZE)))
    for work in works:
        work.start()  # outside of the graph
        work.wait()
        work.free()


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_messages(process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.zeros(3))
    hc.all_reduce(gpus.array(np.zeros(1)))
    if RANK > 1:
        return
    work = hc.send_init(array, 1) if RANK == 0 else hc.recv_init(array, 0)
    for start in range(3):
        if RANK == 0:
            gpus.write(array, of_rank(0, start, 3))
        work.start()
        work.wait()
        assert_same(gpus.values(array), of_rank(0, start, 3))
    work.free()


def test_waiting_does_not_block_the_host(machine: Any, process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.ones(2))
    with hc.all_reduce_init(array) as reduction:
        machine.held = True
        reduction.start()
        with pytest.raises(hc.DistError, match="started already"):
            reduction.start()
        machine.calls.clear()
        reduction.wait()
        assert machine.calls == ["wait"]
        reduction.start()
        assert not reduction.is_completed()
        with pytest.raises(hc.DistTimeoutError):
            reduction.wait(timeout=0.05)
        machine.held = False
        assert reduction.wait(timeout=10)
        assert reduction.is_completed()
    for begin in (reduction.start, reduction.run):
        with pytest.raises(hc.DistError, match="freed"):
            begin()


@every_layout
def test_what_is_freed_in_flight_lives_until_it_is_done(
    machine: Any, process_group: hc.ProcessGroup, layout: Any
) -> None:
    reduction = hc.all_reduce_init(gpus.array(np.ones(2), layout))
    machine.held = True
    reduction.start()
    with gpus.another_stream():
        reduction.wait()  # which is all that the other stream does
    reduction.free()
    del reduction
    process_group.dispatcher.in_flight.clear()  # as where ranks have failed
    gc.collect()
    races = list(machine.races)  # if the memory is used again
    machine.held = False
    hc.all_reduce(gpus.array(np.ones(1)), async_op=True).synchronize()
    assert not races


def test_hooks_see_each_start(process_group: hc.ProcessGroup) -> None:
    seen: list[str] = []

    class Hook:
        def begin(self, operation: Any) -> None:
            seen.append(f"begin {operation.name}")

        def end(self, operation: Any) -> None:
            seen.append(f"end {operation.name} {operation.error}")

    array = gpus.array(np.ones(2))
    with hc.all_reduce_init(array) as reduction, process_group.register_hook(Hook()):
        for _ in range(2):
            reduction.start()
            reduction.wait(timeout=10)
    assert seen == ["begin all_reduce_start", "end all_reduce_start None"] * 2
