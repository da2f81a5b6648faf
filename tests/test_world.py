"""Init, destroy, groups, and who is where."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.fixture
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        yield group


def total(group: Any = None) -> float:
    array = np.ones(1)
    hc.all_reduce(array, group=group)
    return float(array[0])


# -- init and destroy --------------------------------------------------------------------------------


def test_init_returns_the_world_group() -> None:
    assert not hc.is_initialized()
    with pytest.raises(AttributeError, match=r"has no attribute 'world'; .* after init_process_group\(\)"):
        _ = hc.world
    group = hc.init_process_group()
    assert hc.is_initialized()
    assert isinstance(group, hc.ProcessGroup)
    assert hc.world is hc.GroupMember.WORLD is group
    assert (group.rank, group.size, group.ranks) == (RANK, SIZE, tuple(range(SIZE)))
    assert (hc.get_rank(), hc.get_world_size()) == (RANK, SIZE)
    assert repr(group) == f"<ProcessGroup 'world': rank {RANK} of {SIZE}, cpu:mpi,cuda:nccl>"
    hc.destroy_process_group()
    assert not hc.is_initialized()
    assert hc.GroupMember.WORLD is None
    assert repr(group).endswith(", cpu:mpi,cuda:nccl, destroyed>")


def test_init_twice_is_an_error_and_init_after_destroy_works() -> None:
    with hc.init_process_group(group_name="first") as first:
        assert first.name == "first"
        with pytest.raises(hc.DistError, match=r"already; call destroy_process_group\(\) first, or, in a cell"):
            hc.init_process_group()
        assert (hc.group.WORLD or hc.init_process_group()) is first  # what the message says to type
        assert total() == SIZE
    with hc.init_process_group():
        assert total() == SIZE


def test_a_destroyed_group_refuses_every_operation() -> None:
    group = hc.init_process_group()
    sub = hc.new_group()
    hc.destroy_process_group()
    for destroyed in (group, sub):
        for refuse in (
            lambda g: hc.all_reduce(np.ones(1), group=g),
            lambda g: hc.barrier(g),
            lambda g: hc.monitored_barrier(g, timeout=1),
            lambda g: hc.isend(np.ones(1), 0, g),
            lambda g: hc.all_gather_object([None] * SIZE, 1, g),
        ):
            with pytest.raises(hc.DistError, match="has been destroyed"):
                refuse(destroyed)
        destroyed.destroy()  # once more does nothing
    with pytest.raises(hc.DistError, match=r"there is no process group: call hpccomm\.init_process_group\(\) first"):
        hc.destroy_process_group()


@pytest.mark.parametrize(
    "function", [hc.get_rank, hc.barrier, hc.get_local_rank, hc.new_group, hc.destroy_process_group]
)
def test_without_init_nothing_works(function: Any) -> None:
    with pytest.raises(hc.DistError, match=r"call hpccomm\.init_process_group\(\) first"):
        function()


def test_destroy_inside_the_block_is_fine() -> None:
    with hc.init_process_group():
        hc.destroy_process_group()
    assert not hc.is_initialized()


def test_an_exception_in_the_block_is_not_turned_into_a_hang() -> None:
    with pytest.raises(ZeroDivisionError), hc.init_process_group() as group:
        raise ZeroDivisionError
    assert total(group) == SIZE  # it is still there: destroying needs all ranks, and this one was on its way out
    hc.destroy_process_group()


def test_destroy_finishes_what_is_in_flight() -> None:
    array, message = np.ones((4, 4))[:, ::2], np.zeros(3)
    group = hc.init_process_group()
    hc.all_reduce(array, async_op=True)
    hc.irecv(message, RANK)
    hc.isend(np.ones(3), RANK)
    hc.destroy_process_group(group)
    assert (array == SIZE).all()
    assert message.tolist() == [1.0] * 3


def test_destroy_tells_of_what_never_ends_and_destroys_nothing() -> None:
    hc.init_process_group(timeout=timedelta(seconds=0.05))
    work = hc.irecv(np.zeros(3), RANK)
    with pytest.raises(hc.DistTimeoutError, match=r"destroy of <ProcessGroup 'world'.*recv #1: not done; it is"):
        hc.destroy_process_group()
    work.abort()
    assert total() == SIZE
    hc.destroy_process_group()


def test_destroy_warns_of_a_dropped_work_that_failed() -> None:
    hc.init_process_group()
    hc.irecv(np.zeros(2), RANK)
    hc.isend(np.zeros(1), RANK).wait()
    with pytest.warns(hc.HpccommWarning, match="recv #1: failed.*the message has 8 bytes, but the array 16"):
        hc.destroy_process_group()


def test_a_communicator_of_ones_own() -> None:
    half = MPI.COMM_WORLD.Split(RANK % 2)
    with hc.init_process_group(comm=half) as group:
        assert (group.rank, group.size) == (half.Get_rank(), half.Get_size())
        assert total() == half.Get_size()
        assert group.comm != half
    half.Barrier()  # it was duplicated, so it is still there
    half.Free()


def test_a_world_on_a_cartesian_grid() -> None:
    grid = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(SIZE, 2), periods=[True, True])
    with hc.init_process_group(comm=grid) as group:
        assert (group.rank, group.size) == (grid.Get_rank(), SIZE)
        before, after = grid.Shift(0, 1)  # ranks of the grid, which are those of the world
        received = np.empty(1)
        hc.sendrecv(np.array([1.0 * group.rank]), after, received, before)
        assert received[0] == before
    grid.Free()


def test_messages_of_ones_own_on_the_same_communicator_do_not_mix() -> None:
    comm = MPI.COMM_WORLD
    with hc.init_process_group(comm=comm):
        theirs, ours = np.zeros(1), np.zeros(1)
        request = comm.Irecv(theirs, RANK, 0)
        work = hc.irecv(ours, RANK)
        hc.isend(np.array([1.0]), RANK).wait()
        comm.Send(np.array([2.0]), RANK, 0)
        request.Wait()
        work.wait()
        assert (ours[0], theirs[0]) == (1.0, 2.0)


def test_arguments_of_init() -> None:
    with hc.init_process_group(rank=RANK, world_size=SIZE, timeout=7) as group:
        assert group.timeout == timedelta(seconds=7)
    with hc.init_process_group(timeout=None) as group:  # c10d's default
        assert group.timeout == timedelta(minutes=30)
        assert hc.new_group(timeout=None).timeout == timedelta(minutes=30)
    with pytest.raises(ValueError, match=f"rank is {RANK + 1}, but MPI says {RANK}; (leave it out|this job)"):
        hc.init_process_group(rank=RANK + 1)
    with pytest.raises(ValueError, match=f"world_size is {SIZE + 1}, but MPI says {SIZE}"):
        hc.init_process_group(world_size=SIZE + 1)
    with pytest.raises(TypeError, match="comm is 3; expected an mpi4py intracommunicator"):
        hc.init_process_group(comm=3)  # type: ignore[arg-type]
    for timeout in (0, timedelta(seconds=-1), float("nan")):
        with pytest.raises(ValueError, match="expected a positive timedelta or number of seconds"):
            hc.init_process_group(timeout=timeout)
    assert not hc.is_initialized()


def test_availability() -> None:
    assert hc.is_mpi_available()
    assert hc.is_available()
    assert hc.is_backend_available("mpi")
    assert hc.is_backend_available(" MPI ")
    assert not hc.is_backend_available("carrier pigeon")
    assert hc.is_nccl_available() in (True, False)


# -- groups ------------------------------------------------------------------------------------------


def test_new_group_of_all(world: hc.ProcessGroup) -> None:
    group = hc.new_group(timeout=5, group_desc="everybody")
    assert isinstance(group, hc.ProcessGroup)
    assert group.ranks == world.ranks
    assert group.timeout == timedelta(seconds=5)
    assert group.description == "everybody"
    assert total(group) == SIZE


@pytest.mark.parametrize("local", [False, True], ids=["everybody calls", "members call"])
def test_new_group_of_some(world: hc.ProcessGroup, local: bool) -> None:
    members = list(range(0, SIZE, 2))
    if local and RANK not in members:
        return
    group = hc.new_group(members, use_local_synchronization=local)
    if RANK in members:
        assert total(group) == len(members)
        assert hc.get_rank(group) == RANK // 2
        assert hc.get_process_group_ranks(group) == members
        assert [hc.get_global_rank(group, i) for i in range(len(members))] == members
        assert [hc.get_group_rank(group, rank) for rank in members] == list(range(len(members)))
        with pytest.raises(ValueError, match=f"rank {SIZE} is not a member of"):
            hc.get_group_rank(group, SIZE)
        with pytest.raises(ValueError, match=f"group rank is {len(members)}; expected 0 to"):
            hc.get_global_rank(group, len(members))
    else:
        assert isinstance(group, hc.NonMember)


def test_sort_ranks(world: hc.ProcessGroup) -> None:
    backwards = list(range(SIZE))[::-1]
    assert hc.get_rank(hc.new_group(backwards)) == RANK
    assert hc.get_rank(hc.new_group(backwards, sort_ranks=False)) == SIZE - 1 - RANK


def test_a_non_member_warns_once_and_returns_none(world: hc.ProcessGroup) -> None:
    group = hc.new_group([0], group_desc="zero")
    if RANK == 0:
        assert group != hc.GroupMember.NON_GROUP_MEMBER
        return
    assert group is not None
    assert group == hc.GroupMember.NON_GROUP_MEMBER
    assert len({group, hc.GroupMember.NON_GROUP_MEMBER}) == 1
    assert (hc.get_rank(group), hc.get_world_size(group)) == (-1, -1)
    assert hc.get_process_group_ranks(group) == [0]
    with pytest.warns(hc.NonMemberWarning, match="all_reduce: this rank is not in <NonMember of 'zero'>") as caught:
        assert hc.all_reduce(np.ones(1), group=group) is None
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = hc.all_reduce(np.ones(1), group=group, async_op=True)
        assert work is not None
        assert work.is_success()
        assert hc.broadcast(np.ones(1), 0, group) is None
        assert hc.gather(np.ones(1), group=group) is None
        assert hc.barrier(group) is None
        assert hc.monitored_barrier(group) is None
        assert hc.send(np.ones(1), 0, group) is None
        assert hc.recv(np.ones(1), group=group) is None
        assert hc.irecv(np.ones(1), 0, group).wait()
        for work in hc.batch_isend_irecv([hc.P2POp(hc.isend, np.ones(1), 0, group)]):
            work.wait()
        with hc.all_reduce_init(np.ones(1), group=group) as persistent:
            persistent.start()
            assert persistent.wait()
        assert hc.get_local_rank(group) == hc.get_node_rank(group) == hc.get_local_size(group) == -1
        assert hc.get_node_count(group) == -1
        assert hc.get_backend_config(group) == "cpu:mpi,cuda:nccl"
        with pytest.raises(ValueError, match="get_backend: this process is not a member of <NonMember of 'zero'>"):
            hc.get_backend(group)
        assert (group.is_destroyed, group.comm, group.sequence_number) == (False, None, 0)
        assert hc.get_group_rank(group, 0) == hc.get_global_rank(group, 0) == 0
        assert hc.sendrecv(np.ones(1), 0, np.ones(1), 0, group) is None
        for objects in (hc.broadcast_object_list, hc.scatter_object_list, hc.send_object_list, hc.recv_object_list):
            assert objects([1], group=group) is None
        assert hc.all_gather_object([1], 1, group) is None
        assert hc.gather_object(1, group=group) is None
        with hc.coalescing(group) as block:
            hc.all_reduce(np.ones(1), group=group)
        block.wait()
        with group:
            pass
        hc.destroy_process_group(group)
    with pytest.raises(AttributeError):
        group.no_such_operation  # noqa: B018
    with pytest.raises(ValueError, match="rank 1 is not a member of"):
        hc.get_group_rank(group, 1)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [([], "is empty"), ([0, 0], "listed twice"), ([SIZE], "there is no rank"), ([-1], "no rank -1"), (0, "a list")],
)
def test_ranks_that_make_no_group(world: hc.ProcessGroup, ranks: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"new_group: .*{message}"):
        hc.new_group(ranks)
    assert total() == SIZE


def test_new_subgroups(world: hc.ProcessGroup) -> None:
    size = 2 if SIZE % 2 == 0 else 1
    mine, every = hc.new_subgroups(size)
    assert len(every) == SIZE // size
    assert every[RANK // size] is mine
    assert total(mine) == size
    assert sum(isinstance(each, hc.NonMember) for each in every) == len(every) - 1
    node, _ = hc.new_subgroups()
    assert hc.get_world_size(node) == hc.get_local_size()
    part = hc.new_group([0])
    first, _ = hc.new_subgroups(1, part)
    assert (hc.get_rank(first), hc.get_rank(hc.new_subgroups(group=part)[0])) == ((-1, -1) if RANK else (0, 0))
    for wrong in (0, SIZE + 1):
        with pytest.raises(ValueError, match=f"group_size is {wrong}, which does not divide the {SIZE} ranks"):
            hc.new_subgroups(wrong)


def test_new_subgroups_by_enumeration(world: hc.ProcessGroup) -> None:
    rows = [list(range(SIZE))[::2], list(range(SIZE))[1::2]]
    mine, every = hc.new_subgroups_by_enumeration([row for row in rows if row])
    assert total(mine) == len(rows[RANK % 2])
    assert len(every) == len([row for row in rows if row])
    outside, _ = hc.new_subgroups_by_enumeration([[0]])
    assert isinstance(outside, hc.ProcessGroup) == (RANK == 0)
    with pytest.raises(ValueError, match="listed twice"):
        hc.new_subgroups_by_enumeration([[0], [0]])
    with pytest.raises(ValueError, match="the list of subgroups is empty"):
        hc.new_subgroups_by_enumeration([])


def test_split_group(world: hc.ProcessGroup) -> None:
    group = hc.split_group(color=RANK % 2, key=-RANK, timeout=3, backend="mpi", group_desc="halves")
    members = [rank for rank in range(SIZE) if rank % 2 == RANK % 2][::-1]
    assert hc.get_process_group_ranks(group) == members
    assert hc.get_backend_config(group) == "cpu:mpi"
    assert group.timeout == timedelta(seconds=3)
    assert total(group) == len(members)
    nested = hc.split_group(group, 0 if hc.get_rank(group) == 0 else None)
    assert isinstance(nested, hc.ProcessGroup) == (hc.get_rank(group) == 0)
    assert hc.get_rank(nested) == (0 if hc.get_rank(group) == 0 else -1)
    for color in (-1, 1 << 40):
        with pytest.raises(ValueError, match=rf"color is {color}; expected 0 to 2\*\*31 - 1, or None"):
            hc.split_group(color=color)
    with pytest.raises(ValueError, match=r"split_group: key is \d+; expected -2"):
        hc.split_group(color=0, key=1 << 31)


def test_a_destroyed_sub_group_leaves_the_world_alone(world: hc.ProcessGroup) -> None:
    with hc.new_group() as group:
        assert total(group) == SIZE
    with pytest.raises(hc.DistError, match="has been destroyed"):
        hc.barrier(group)
    other = hc.new_group()
    hc.destroy_process_group(other)
    assert total() == SIZE


# -- who is where ------------------------------------------------------------------------------------


def test_ranks_on_the_node(world: hc.ProcessGroup) -> None:
    assert (hc.get_local_rank(), hc.get_local_size()) == (RANK, SIZE)  # all ranks are on this machine
    assert (hc.get_node_rank(), hc.get_node_count()) == (0, 1)
    group = hc.new_group(list(range(SIZE))[::-1], sort_ranks=False)
    assert hc.get_local_rank(group) == SIZE - 1 - RANK


def test_ranks_on_pretend_nodes(world: hc.ProcessGroup) -> None:
    world.nodes = tuple(rank // 2 for rank in range(SIZE))
    assert hc.get_local_rank() == RANK % 2
    assert hc.get_node_rank() == RANK // 2
    assert hc.get_node_count() == (SIZE + 1) // 2
    assert hc.get_local_size() == (1 if SIZE % 2 and RANK == SIZE - 1 else 2)
    backwards = hc.new_group(list(range(SIZE))[::-1], sort_ranks=False)
    assert hc.get_local_rank(backwards) == (0 if hc.get_local_size() == 1 else 1 - RANK % 2)


def test_the_device_map_as_text(world: hc.ProcessGroup) -> None:
    assert hc.get_backend_config() == "cpu:mpi,cuda:nccl"
    assert hc.get_backend() == "mpi"


# -- abort -------------------------------------------------------------------------------------------


def test_monitored_barrier_passes_when_all_arrive(world: hc.ProcessGroup) -> None:
    for _ in range(3):
        hc.monitored_barrier(timeout=60)
        hc.monitored_barrier(hc.GroupMember.WORLD, timedelta(seconds=60), wait_all_ranks=True)
