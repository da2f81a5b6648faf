from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import hpccomm as hc

from .arrays import ALL_DTYPES, LAYOUTS, SHAPES, assert_same, dtype_name, values

pytestmark = pytest.mark.usefixtures("process_group")
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
needs_two = pytest.mark.mpi(min_size=2)

Groups = list[hc.ProcessGroup]


def neighbours(group: hc.ProcessGroup) -> tuple[int, int]:
    """The global ranks before and after this one in a ring."""
    return group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]


@every_dtype
def test_a_ring_of_isend_and_irecv(groups: Groups, dtype: Any) -> None:
    for group, layout, shape in itertools.product(groups, LAYOUTS, SHAPES):
        left, right = neighbours(group)
        output = layout(np.zeros(shape, dtype))
        receive = hc.irecv(output, left, group)
        send = hc.isend(layout(values(dtype, shape, hc.get_rank())), right, group)
        assert receive.wait()
        assert send.wait()
        assert receive.source_rank() == left
        assert receive.op_type == "recv"
        assert_same(output, values(dtype, shape, left), layout, shape, group)


@every_dtype
def test_blocking_send_and_recv(groups: Groups, dtype: Any) -> None:
    for group, layout, shape in itertools.product(groups, LAYOUTS, SHAPES):
        if group.size == 1:
            continue
        left, right = neighbours(group)
        output = layout(np.zeros(shape, dtype))
        if group.rank == 0:
            assert hc.send(layout(values(dtype, shape, hc.get_rank())), right, group, tag=3) is None
            assert hc.recv(output, left, group, tag=3) == left
        else:
            assert hc.recv(output, left, group, tag=3) == left
            hc.send(layout(values(dtype, shape, hc.get_rank())), right, group, tag=3)
        assert_same(output, values(dtype, shape, left), layout, shape, group)


@every_dtype
def test_sendrecv(groups: Groups, dtype: Any) -> None:
    for group, layout, shape, async_op in itertools.product(groups, LAYOUTS, SHAPES, (False, True)):
        left, right = neighbours(group)
        output = layout(np.zeros(shape, dtype))
        array = layout(values(dtype, shape, hc.get_rank()))
        outcome = hc.sendrecv(array, right, output, left, group, async_op=async_op)
        if async_op:
            assert isinstance(outcome, hc.Work)
            outcome = outcome.source_rank()
        assert outcome == left
        assert_same(output, values(dtype, shape, left), layout, shape, group)


def test_sendrecv_in_one_array_exchanges_it(groups: Groups) -> None:
    for group in groups:
        left, right = neighbours(group)
        array = np.full(4, float(hc.get_rank()))
        assert hc.sendrecv(array, right, array, left, group, tag=1, recv_tag=1) == left
        assert_same(array, np.full(4, float(left)))


@needs_two
def test_recv_from_any_rank_tells_the_global_rank(groups: Groups) -> None:
    for group in groups:
        if group.rank:
            hc.send(np.array([hc.get_rank()]), group.ranks[0], group)
            hc.isend(np.array([hc.get_rank()]), group.ranks[0], group, tag=1).wait()
            continue
        for sources in (set(), set()):
            for _ in range(group.size - 1):
                message = np.zeros(1, int)
                if sources or group.size < 3:
                    source = hc.recv(message, None, group)
                else:
                    source = hc.irecv(message, None, group).source_rank()
                assert source == message[0]
                sources.add(source)
            assert sources == set(group.ranks[1:])
            break
        for _ in range(group.size - 1):
            message = np.zeros(1, int)
            assert hc.irecv(message, None, group, tag=1).source_rank() == message[0]


@needs_two
def test_tags_choose_the_message(process_group: hc.ProcessGroup) -> None:
    if process_group.rank == 0:
        for tag in (1, 2, 3):
            hc.send(np.array([tag]), 1, tag=tag)
    elif process_group.rank == 1:
        message = np.zeros(1, int)
        for tag in (3, 1, 2):
            hc.recv(message, 0, tag=tag)
            assert message[0] == tag


@needs_two
def test_messages_with_equal_tags_arrive_in_order(process_group: hc.ProcessGroup) -> None:
    if process_group.rank == 0:
        for work in [hc.isend(np.array([i]), 1) for i in range(100)]:
            work.wait()
    elif process_group.rank == 1:
        messages = np.zeros((100, 1), int)
        works = [hc.irecv(message, 0) for message in messages]
        for work in reversed(works):
            work.wait()
        assert messages[:, 0].tolist() == list(range(100))


def test_batch_isend_irecv_in_a_ring(groups: Groups) -> None:
    for group in groups:
        left, right = neighbours(group)
        mine = np.full(3, float(hc.get_rank()))
        from_left, from_right = np.empty(3), np.empty(3)
        works = hc.batch_isend_irecv(
            [
                hc.P2POp(hc.isend, mine, right, group, tag=1),
                hc.P2POp(hc.isend, mine, left, group, tag=2),
                hc.P2POp(hc.irecv, from_left, left, group, tag=1),
                hc.P2POp(hc.irecv, from_right, group=group, tag=2, group_peer=(group.rank + 1) % group.size),
            ]
        )
        assert [work.op_type for work in works] == ["send", "send", "recv", "recv"]
        for work in works:
            work.wait()
        assert_same(from_left, np.full(3, float(left)))
        assert_same(from_right, np.full(3, float(right)))


def test_batch_isend_irecv_refuses_what_is_no_operation(process_group: hc.ProcessGroup) -> None:
    assert hc.batch_isend_irecv([]) == []  # a rank without neighbours
    with pytest.raises(TypeError, match="expected P2POp objects"):
        hc.batch_isend_irecv([hc.isend])  # type: ignore[list-item]
    for given in (hc.P2POp(hc.isend, np.zeros(1), 0), None):
        with pytest.raises(TypeError, match=r"p2p_op_list is a \w+; expected a list of P2POp objects"):
            hc.batch_isend_irecv(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected hpccomm\.isend or hpccomm\.irecv"):
        hc.P2POp(hc.send, np.zeros(1), 0)


def test_a_rank_can_send_to_itself_without_blocking(process_group: hc.ProcessGroup) -> None:
    me, output = process_group.rank, np.empty(2)
    receive = hc.irecv(output, me)
    send = hc.isend(np.array([1.0, 2.0]), me)
    receive.wait()
    send.wait()
    assert output.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("function", [hc.send, hc.recv, hc.send_object_list, hc.recv_object_list])
def test_a_blocking_message_to_oneself_is_refused(process_group: hc.ProcessGroup, function: Any) -> None:
    with pytest.raises(ValueError, match="is this rank itself"):
        function([1] if "object" in function.__name__ else np.zeros(1), process_group.rank)


@needs_two
def test_a_message_longer_than_the_array_is_an_error_and_the_group_goes_on(process_group: hc.ProcessGroup) -> None:
    if process_group.rank == 0:
        hc.send(np.zeros(8), 1)
        hc.send(np.zeros(8), 1)
    elif process_group.rank == 1:
        with pytest.raises(
            hc.DistBackendError, match=r"(?s)recv #\d+ of 'world': MPI reports: .*smaller than what another"
        ):
            hc.recv(np.zeros(4), 0)
        work = hc.irecv(np.zeros(4), 0)
        with pytest.raises(hc.DistBackendError, match="smaller than what another rank sent"):
            work.wait()
        assert work.status is hc.WorkStatus.FAILED
        assert isinstance(work.exception(), hc.DistBackendError)
    sent, rows = np.zeros(3 if process_group.rank == 1 else 2), [np.zeros(2) for _ in range(process_group.size)]
    if process_group.rank == 0:  # several requests
        with pytest.raises(hc.DistBackendError, match=r"on all ranks\? HPCCOMM_DEBUG=DETAIL compares the ranks' calls"):
            hc.gather(sent, rows, dst=0)
    else:
        hc.gather(sent, dst=0)
    check = np.ones(1)
    hc.all_reduce(check)
    assert check[0] == process_group.size


@needs_two
@pytest.mark.parametrize("function", ["recv", "irecv", "sendrecv"])
def test_a_message_shorter_than_the_array_is_an_error(process_group: hc.ProcessGroup, function: str) -> None:
    me = process_group.rank
    if me > 1:
        return
    if me == 0:
        hc.send(np.zeros(4, np.float32), 1)
        if function == "sendrecv":
            hc.recv(np.zeros(1), 1)
    else:
        receive = {
            "recv": lambda array: hc.recv(array, 0),
            "irecv": lambda array: hc.irecv(array, 0).wait(),
            "sendrecv": lambda array: hc.sendrecv(np.zeros(1), 0, array, 0),
        }[function]
        with pytest.raises(hc.DistBackendError, match="the message has 16 bytes, but the array 64"):
            receive(np.zeros(8))


@pytest.mark.parametrize("tag", [-1, 2**31 - 1])
def test_tags_out_of_range_are_refused(process_group: hc.ProcessGroup, tag: int) -> None:
    for function in (hc.isend, hc.irecv):
        with pytest.raises(ValueError, match=f"tag is {tag}; this MPI allows 0 to"):
            function(np.zeros(1), process_group.rank, tag=tag)
    with pytest.raises(ValueError, match="recv_tag is"):
        hc.sendrecv(np.zeros(1), process_group.rank, np.zeros(1), recv_tag=tag)


@pytest.mark.parametrize("function", [hc.send, hc.recv, hc.isend, hc.irecv])
def test_ranks_that_do_not_exist_are_refused(process_group: hc.ProcessGroup, function: Any) -> None:
    n = process_group.size
    for wrong in (n, -7):  # -1 and -2 are MPI.PROC_NULL and MPI.ANY_SOURCE, or the other way round
        with pytest.raises(ValueError, match=f"is {wrong}, which is not in the group"):
            function(np.zeros(1), wrong)
        with pytest.raises(ValueError, match=f"is {wrong}; expected 0 to {n - 1}"):
            function(np.zeros(1), **{"group_dst" if "send" in function.__name__ else "group_src": wrong})
    other = {"group_dst" if "send" in function.__name__ else "group_src": 0}
    with pytest.raises(ValueError, match=r"both .* are given; choose one"):
        function(np.zeros(1), 0, **other)
    if "send" in function.__name__:
        with pytest.raises(ValueError, match="neither dst nor group_dst is given"):
            function(np.zeros(1))
