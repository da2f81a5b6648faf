from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.mpi.works import joined

pytestmark = pytest.mark.usefixtures("process_group")


class Memory(bytearray):
    """Memory of an array that can be referenced weakly: it lives as long as any view of it."""


OPERATIONS: dict[str, Callable[[Callable[..., Any], int, int], Any]] = {
    "broadcast": lambda new, n, me: hc.broadcast(new(4), 0, async_op=True),
    "all_reduce": lambda new, n, me: hc.all_reduce(new(4), async_op=True),
    "all_reduce in segments": lambda new, n, me: hc.all_reduce(new(3 << 20), async_op=True),
    "reduce": lambda new, n, me: hc.reduce(new(4), 0, async_op=True),
    "scan": lambda new, n, me: hc.scan(new(4), async_op=True),
    "exscan": lambda new, n, me: hc.exscan(new(4), async_op=True),
    "all_gather_single": lambda new, n, me: hc.all_gather_single(new(4 * n), new(4), async_op=True),
    "all_gather": lambda new, n, me: hc.all_gather([new(4) for _ in range(n)], new(4), async_op=True),
    "gather": lambda new, n, me: hc.gather(new(4), None if me else [new(4) for _ in range(n)], async_op=True),
    "scatter": lambda new, n, me: hc.scatter(new(4), None if me else [new(4) for _ in range(n)], async_op=True),
    "reduce_scatter_single": lambda new, n, me: hc.reduce_scatter_single(new(4), new(4 * n), async_op=True),
    "reduce_scatter": lambda new, n, me: hc.reduce_scatter(new(4), [new(4) for _ in range(n)], async_op=True),
    "all_to_all_single": lambda new, n, me: hc.all_to_all_single(new(4 * n), new(4 * n), async_op=True),
    "send": lambda new, n, me: hc.isend(new(4), me, tag=1),
    "recv": lambda new, n, me: hc.irecv(new(4), me, tag=1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_mpi_works_on_lives_until_the_work_is_done(process_group: hc.ProcessGroup, name: str) -> None:
    memory: list[weakref.ref[Any]] = []

    def new(size: int) -> Any:
        block = Memory(8 * size)
        memory.append(weakref.ref(block))
        return np.frombuffer(block)

    work = OPERATIONS[name](new, process_group.size, process_group.rank)
    gc.collect()
    packed = ("all_gather", "gather", "scatter", "reduce_scatter")  # their lists are packed: MPI sees the copy
    alive = [reference() is not None for reference in memory]
    assert all(alive) or name in packed, alive
    if name == "send":
        hc.irecv(np.empty(4), process_group.rank, tag=1).wait()
    if name == "recv":
        hc.isend(np.ones(4), process_group.rank, tag=1).wait()
    work.wait()
    assert work.alive is None
    del work
    gc.collect()
    assert [reference() for reference in memory] == [None] * len(memory)


def test_packed_copies_live_until_the_work_is_done(process_group: hc.ProcessGroup) -> None:
    # Freed too early, the memory of the packed and premultiplied inputs would be reused by the next ones.
    n = process_group.size
    double = hc.ReduceOp.PREMUL_SUM(2)
    outputs = np.zeros((50, 3))
    works = []
    for i, output in enumerate(outputs):
        strided = np.full((n, 6), float(i))[:, ::2]
        works.append(hc.reduce_scatter(output, list(strided), double, async_op=True))
    rooted = [np.full(6, float(i))[::2] for i in range(50)]
    works += [hc.reduce(array, 0, double, async_op=True) for array in rooted]
    for work in works:
        work.wait()
    expected = 2.0 * n * np.arange(50.0)
    assert np.array_equal(outputs, expected.repeat(3).reshape(-1, 3))
    if process_group.rank == 0:
        assert np.array_equal(np.stack(rooted), outputs)


def test_only_requests_of_mpi_can_be_joined() -> None:
    with pytest.raises(TypeError, match="a part of a composed operation is <CompletedWork"):
        joined([hc.CompletedWork()], None)
