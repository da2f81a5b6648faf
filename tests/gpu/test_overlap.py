"""Inputs and outputs that share memory give the results of inputs that are copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from ..arrays import assert_same, contiguous, strided
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")

Groups = list[hc.ProcessGroup]


def parts(memory: Any, group: hc.ProcessGroup, start: int = 0) -> list[Any]:
    """Return two elements for each rank."""
    return [memory[start + 2 * rank : start + 2 * rank + 2] for rank in range(group.size)]


# Operations that read `a` and write `b`: not at the places in `b` that they read in `a`, but one beside them.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda a, b, group, how: hc.all_gather(parts(b, group), a[1:3], **how),
    "all_gather_single": lambda a, b, group, how: hc.all_gather_single(b[: 2 * group.size], a[1:3], **how),
    "all_gather_coalesced": lambda a, b, group, how: hc.all_gather_coalesced(
        [list(pair) for pair in zip(parts(b, group), parts(b, group, 2 * group.size), strict=True)],
        [a[1:3], a[2 * group.size - 1 : 2 * group.size + 1]],
        **how,
    ),
    "all_gather_single_coalesced": lambda a, b, group, how: hc.all_gather_single_coalesced(
        [b[: 2 * group.size], b[2 * group.size : 4 * group.size]],
        [a[1:3], a[2 * group.size - 1 : 2 * group.size + 1]],
        **how,
    ),
    "gather": lambda a, b, group, how: hc.gather(
        a[1:3], parts(b, group) if group.rank == 0 else None, group_dst=0, **how
    ),
    "scatter": lambda a, b, group, how: hc.scatter(
        b[1:3], parts(a, group) if group.rank == 0 else None, group_src=0, **how
    ),
    "reduce_scatter": lambda a, b, group, how: hc.reduce_scatter(b[1:3], parts(a, group), **how),
    "reduce_scatter_single": lambda a, b, group, how: hc.reduce_scatter_single(b[1:3], a[: 2 * group.size], **how),
    "reduce_scatter_single_coalesced": lambda a, b, group, how: hc.reduce_scatter_single_coalesced(
        [b[1:3], b[2 * group.size + 1 : 2 * group.size + 3]],
        [a[: 2 * group.size], a[2 * group.size : 4 * group.size]],
        **how,
    ),
    "all_to_all": lambda a, b, group, how: hc.all_to_all(parts(b, group, 1), parts(a, group), **how),
    "all_to_all_single": lambda a, b, group, how: hc.all_to_all_single(
        b[1 : 2 * group.size + 1], a[: 2 * group.size], **how
    ),
    "all_to_all_single of sizes": lambda a, b, group, how: hc.all_to_all_single(
        b[1 : 2 * group.size + 1], a[: 2 * group.size], [2] * group.size, [2] * group.size, **how
    ),
    "sendrecv": lambda a, b, group, how: hc.sendrecv(
        a[:2], group.ranks[(group.rank + 1) % group.size], b[1:3], group.ranks[group.rank - 1], **how
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_written_is_as_if_inputs_and_outputs_did_not_overlap(groups: Groups, name: str) -> None:
    seen = []
    for group in groups:
        for layout in (contiguous, strided):
            for async_op in (False, True):
                given = np.arange(4.0 * group.size + 2) + 100 * group.rank
                apart, memory = gpus.array(given, layout), gpus.array(given, layout)
                for source, target in ((gpus.array(given), apart), (memory, memory)):
                    work = OPERATIONS[name](source, target, group, {"group": group, "async_op": async_op})
                    if isinstance(work, hc.Work):
                        work.wait()
                seen.append((gpus.values(memory), gpus.values(apart), layout, async_op, group))
    for each in seen:  # not before: the ranks would part, where some are wrong
        assert_same(*each)


def test_outputs_may_share_memory_with_inputs(groups: Groups) -> None:
    for group in groups:
        n, me = group.size, group.rank
        memory = gpus.array(np.arange(4.0 * n) + 100 * me)
        hc.all_gather_single(memory, memory[4 * me : 4 * me + 4], group=group)
        expected = np.concatenate([np.arange(4.0 * r, 4 * r + 4) + 100 * r for r in range(n)])
        assert_same(gpus.values(memory), expected)
        memory = gpus.array(np.arange(2.0 * n) + 100 * me)
        hc.all_to_all_single(memory, memory, group=group)
        assert_same(gpus.values(memory), np.concatenate([np.arange(2.0 * me, 2 * me + 2) + 100 * r for r in range(n)]))
        parts = [gpus.array(np.full(2, 10.0 * me + r)) for r in range(n)]
        hc.all_to_all(parts, list(reversed(list(reversed(parts)))), group=group)
        for r, part in enumerate(parts):
            assert_same(gpus.values(part), np.full(2, 10.0 * r + me))
        memory = gpus.array(np.arange(3.0 * n))
        hc.reduce_scatter_single(memory[:3], memory, group=group)
        assert_same(gpus.values(memory[:3]), np.arange(3.0 * me, 3 * me + 3) * n)


@pytest.mark.once
def test_a_copy_between_overlapping_arrays_is_seen(machine: Any) -> None:
    from .stand_in import Runtime

    memory, gaps = gpus.array(np.arange(8.0)), gpus.array(np.arange(8.0), strided)
    cuda = Runtime()
    for target, source in ((memory[4:], memory[:4]), (memory[::2], memory[1::2]), (memory[:0], memory[:0])):
        cuda.copy(target, source, 0)
    cuda.copy_bytes(memory.data.ptr, memory.data.ptr + 32, 32, 0)
    assert not machine.races
    for call in (
        lambda: cuda.copy(memory, memory, 0),
        lambda: cuda.copy(memory[1:5], memory[:4], 0),
        lambda: cuda.copy(gaps[1:5], gaps[:4], 0),
        lambda: cuda.copy(memory[:4], memory[3::-1], 0),
        lambda: cuda.copy_bytes(memory.data.ptr, memory.data.ptr + 31, 32, 0),
    ):
        call()
        races, machine.races = machine.races, []
        assert races == ["a copy reads memory that it writes"]


@pytest.mark.once
def test_calls_of_one_group_that_use_the_same_memory_are_seen(machine: Any) -> None:
    from .stand_in import TYPES, Communicator

    comm = Communicator(blocks=True)
    comm.comm = MPI.COMM_SELF
    memory = gpus.array(np.arange(8.0))
    start, double = memory.data.ptr, TYPES.index(np.dtype("f8"))

    def found(*calls: Callable[[], None]) -> list[str]:
        comm.group_start()
        for call in calls:
            call()
        comm.group_end()
        machine.host_waits(machine.streams[0])
        races, machine.races = machine.races, []
        return races

    def sends(element: int) -> Callable[[], None]:
        return lambda: comm.send(start + 8 * element, 2, double, 0, 0)

    def receives(element: int) -> Callable[[], None]:
        return lambda: comm.recv(start + 8 * element, 2, double, 0, 0)

    def gathers(source: int, target: int) -> Callable[[], None]:
        return lambda: comm.all_gather(start + 8 * source, start + 8 * target, 2, double, 0)

    def shared(*calls: str) -> list[str]:
        return [f"{' and '.join(calls)} of the same group use the same memory"]

    assert not found(sends(0), receives(2), sends(0), receives(4))
    assert found(sends(0), receives(1)) == shared("recv", "send")
    assert found(sends(0), receives(4), sends(0), receives(5)) == shared("recv", "recv")
    assert not found(gathers(0, 0), gathers(2, 4))  # in place, and into other memory
    assert found(gathers(0, 1)) == shared("all_gather", "all_gather")
    assert found(gathers(0, 2), gathers(2, 4)) == shared("all_gather", "all_gather")
    assert found(gathers(0, 0), gathers(1, 4)) == shared("all_gather", "all_gather")


def test_outputs_may_lie_between_each_other_but_not_share_elements(process_group: hc.ProcessGroup) -> None:
    n, me = process_group.size, process_group.rank
    memory, inputs = gpus.array(np.zeros(2 * n)), [gpus.array(np.full(1, float(me))), gpus.array(np.full(1, me + 0.5))]
    for shared in ([memory[:n], memory[n - 1 : -1]], [memory[1::2], memory[-n:]]):
        with pytest.raises(ValueError, match=r"outputs\[0\] and outputs\[1\] share memory"):
            hc.all_gather_single_coalesced(shared, inputs)
    if n > 1:
        with pytest.raises(ValueError, match=r"output_list\[0\] and output_list\[1\] share memory"):
            hc.all_gather([memory[:1]] * n, inputs[0])
    hc.all_gather_single_coalesced([memory[::2], memory[1::2]], inputs)
    assert_same(gpus.values(memory), np.arange(n).repeat(2) + np.tile([0.0, 0.5], n))
