"""Messages between GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.nccl import connection

from ..arrays import assert_same, backwards, contiguous, strided, uneven
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(autouse=True)
def _connected(process_group: hc.ProcessGroup) -> None:
    hc.all_reduce(gpus.array(np.ones(1)))


def neighbours(group: hc.ProcessGroup) -> tuple[int, int]:
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


@pytest.mark.parametrize("layout", [contiguous, strided, backwards, uneven])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (0,)])
def test_send_and_recv(process_group: hc.ProcessGroup, layout: object, shape: tuple[int, ...]) -> None:
    n, me = process_group.size, process_group.rank
    for sender in range(n - 1):
        if me == sender:
            hc.send(gpus.array(np.full(shape, sender + 1.0), layout), sender + 1)
        elif me == sender + 1:
            array = gpus.array(np.zeros(shape), layout)
            assert hc.recv(array, sender) == sender
            assert_same(gpus.values(array), np.full(shape, sender + 1.0))


@pytest.mark.parametrize("ndim", [1, 2, 3, 5, 9, 12])
def test_kernels_that_unpack_are_loaded_before_a_receive_waits(
    process_group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch, ndim: int
) -> None:
    monkeypatch.setattr(machine, "loaded", set())
    monkeypatch.setattr(connection, "HAVE_KERNELS", set())
    n, me = process_group.size, process_group.rank
    with hc.new_group() as group:
        hc.all_reduce(gpus.array(np.ones(1)), group=group)
        output = gpus.array(np.zeros((2,) * ndim), strided)
        if me > 0:
            hc.irecv(output, me - 1, group).wait()
            assert_same(gpus.values(output), np.full((2,) * ndim, 3.0))
        if me < n - 1:
            hc.send(gpus.array(np.full((2,) * ndim, 3.0)), me + 1, group)


@pytest.mark.parametrize("async_op", [False, True])
def test_sendrecv_round_a_ring(process_group: hc.ProcessGroup, async_op: bool) -> None:
    to, source = neighbours(process_group)
    array, output = gpus.array(np.full(4, process_group.rank), strided), gpus.array(np.zeros(4, int), strided)
    outcome = hc.sendrecv(array, to, output, source, async_op=async_op)
    if async_op:
        outcome.wait()
        outcome = outcome.source_rank()
    assert outcome == source
    assert_same(gpus.values(output), np.full(4, source))


def test_a_batch_is_one_group_call(process_group: hc.ProcessGroup, request: pytest.FixtureRequest) -> None:
    to, source = neighbours(process_group)
    sent = [gpus.array(np.full(3, process_group.rank + i), strided) for i in (0, 10)]
    received = [gpus.array(np.zeros(3, int), strided) for _ in sent]
    machine = None if gpus.is_real() else request.getfixturevalue("machine")
    works = hc.batch_isend_irecv(
        [hc.P2POp(hc.isend, array, to) for array in sent] + [hc.P2POp(hc.irecv, array, source) for array in received]
    )
    assert [work.op_type for work in works] == ["send", "send", "recv", "recv"]
    for work in works:
        work.wait()
    for array, i in zip(received, (0, 10), strict=True):
        assert_same(gpus.values(array), np.full(3, source + i))
    assert works[-1].source_rank() == source
    if machine is not None:
        assert machine.calls.count("group_start") == machine.calls.count("group_end") == 1


def test_a_batch_that_is_too_large(process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.zeros(1))
    with pytest.raises(ValueError, match="2049 messages on GPU arrays; NCCL takes 2048 at once"):
        hc.batch_isend_irecv([hc.P2POp(hc.isend, array, process_group.rank)] * 2049)


def test_many_batches(process_group: hc.ProcessGroup) -> None:
    """So many that the group lets go of completed works while the next batch is being collected."""
    to, source = neighbours(process_group)
    array, output = gpus.array(np.full(3, process_group.rank)), gpus.array(np.zeros(3, int))
    for _ in range(100):
        for work in hc.batch_isend_irecv([hc.P2POp(hc.irecv, output, source), hc.P2POp(hc.isend, array, to)]):
            work.wait()
    assert_same(gpus.values(output), np.full(3, source))


def test_a_batch_on_host_and_gpu(process_group: hc.ProcessGroup) -> None:
    to, source = neighbours(process_group)
    sent = [np.full(2, process_group.rank), gpus.array(np.full(2, process_group.rank))]
    received = [np.zeros(2, int), gpus.array(np.zeros(2, int))]
    works = hc.batch_isend_irecv(
        [hc.P2POp(hc.isend, array, to) for array in sent] + [hc.P2POp(hc.irecv, array, source) for array in received]
    )
    for work in works:
        work.wait()
    assert_same(received[0], np.full(2, source))
    assert_same(gpus.values(received[1]), np.full(2, source))


def test_a_batch_over_two_groups(process_group: hc.ProcessGroup) -> None:
    to, source = neighbours(process_group)
    with hc.new_group() as other:
        hc.all_reduce(gpus.array(np.ones(1)), group=other)
        received = [gpus.array(np.zeros(3, int), strided) for _ in range(2)]
        messages = []
        for group, array, value in zip((process_group, other), received, (0, 10), strict=True):
            messages.append(hc.P2POp(hc.irecv, array, source, group))
            messages.append(hc.P2POp(hc.isend, gpus.array(np.full(3, process_group.rank + value)), to, group))
        for work in hc.batch_isend_irecv(messages):
            work.wait()
        for array, value in zip(received, (0, 10), strict=True):
            assert_same(gpus.values(array), np.full(3, source + value))


@pytest.mark.parametrize("wrong", ["tag=5", "src=None", "another GPU"])
def test_a_batch_with_a_wrong_message_starts_none(
    process_group: hc.ProcessGroup, machine: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of the host neither: a receive left behind would take the next message."""
    to, source = neighbours(process_group)
    array, output, on_host = gpus.array(np.zeros(2)), gpus.array(np.ones(2)), np.ones(2)
    last = hc.P2POp(hc.irecv, output, None) if wrong == "src=None" else hc.P2POp(hc.isend, array, to, tag=5)
    if wrong == "another GPU":
        last = hc.P2POp(hc.isend, array, to)
        monkeypatch.setattr("hpccomm.nccl.backend.gpu_of", lambda each: gpus.own() + (each is array))
    texts = {"tag=5": "tag is 5, and NCCL has no tags", "src=None": "give src=", "another GPU": "one GPU per rank"}
    with pytest.raises((hc.UnsupportedOperationError, ValueError), match=texts[wrong]):
        hc.batch_isend_irecv([hc.P2POp(hc.irecv, each, source) for each in (on_host, output)] + [last])
    assert machine.depth == 0
    assert all(work.has_ended() for work in list(process_group.dispatcher.in_flight))
    monkeypatch.undo()
    hc.sendrecv(array, to, output, source)
    hc.sendrecv(np.zeros(2), to, on_host, source)
    assert_same(gpus.values(output), np.zeros(2))
    assert_same(on_host, np.zeros(2))


def test_what_nccl_has_not(process_group: hc.ProcessGroup) -> None:
    array = gpus.array(np.zeros(2))
    peer = neighbours(process_group)[0]
    with pytest.raises(hc.UnsupportedOperationError, match="NCCL can't receive from any rank; give src="):
        hc.irecv(array)
    with pytest.raises(hc.UnsupportedOperationError, match="sendrecv: NCCL can't receive from any rank"):
        hc.sendrecv(array, peer, gpus.array(np.zeros(2)))
    with pytest.raises(hc.UnsupportedOperationError, match="send: tag is 3, and NCCL has no tags"):
        hc.isend(array, peer, tag=3)


def test_a_first_message_needs_the_connection(process_group: hc.ProcessGroup) -> None:
    with hc.new_group(use_local_synchronization=True) as group:
        array = gpus.array(np.zeros(2))
        if group.size <= 2:
            hc.sendrecv(
                array, (group.rank + 1) % group.size, gpus.array(np.zeros(2)), group.ranks[group.rank - 1], group
            )
        else:
            with pytest.raises(hc.DistError, match=r"start with init_process_group\(device_id=...\)"):
                hc.isend(array, 0, group)
            with pytest.raises(hc.DistError, match="not connected by NCCL yet, and that takes all of them"):
                hc.batch_isend_irecv([hc.P2POp(hc.isend, array, 0, group)])
