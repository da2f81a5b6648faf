"""Groups: without a world, from communicators, and what is left when one ends."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from .launch import run_program

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)


def total(group: Any = None) -> float:
    array = np.ones(1)
    hc.all_reduce(array, group=group)
    return float(array[0])


# -- a group without the world -----------------------------------------------------------------------


def test_a_group_on_a_communicator_needs_no_world() -> None:
    assert not hc.is_initialized()
    reverse = MPI.COMM_WORLD.Split(0, -RANK)
    with hc.ProcessGroup.from_comm(reverse, config="cpu:mpi", timeout=9, name="mine") as group:
        assert not hc.is_initialized()
        assert (group.rank, group.size, group.ranks) == (SIZE - 1 - RANK, SIZE, tuple(range(SIZE)))
        assert (group.name, group.timeout.total_seconds(), str(group.config)) == ("mine", 9.0, "cpu:mpi")
        assert total(group) == SIZE
        gathered = np.empty(SIZE)
        hc.all_gather_single(gathered, np.array([float(RANK)]), group=group)
        assert gathered.tolist() == list(range(SIZE))[::-1]
        assert hc.get_local_rank(group) == group.rank
        half = hc.split_group(group, group.rank % 2)  # groups of its own
        assert half.ranks == tuple(range(group.rank % 2, SIZE, 2))
        assert total(half) == len(half.ranks)
    assert half.is_destroyed  # with the group that it was made from
    with pytest.raises(hc.DistError, match="has been destroyed"):
        total(group)
    reverse.Barrier()  # it was duplicated, so it is still there
    reverse.Free()


def test_a_group_beside_the_world() -> None:
    with hc.init_process_group() as world:
        group = hc.ProcessGroup.from_comm(MPI.COMM_WORLD)
        array = np.full(1, float(RANK))
        hc.all_reduce(array, "max", group=group)
        assert array[0] == SIZE - 1
        assert total() == total(world) == SIZE
        group.destroy()
    group.destroy()  # once more does nothing


def test_every_step_of_destroy_runs_if_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    group = hc.ProcessGroup.from_comm(MPI.COMM_WORLD)
    comm = group.comm
    backend = group.dispatcher.backends["cpu"]
    close = backend.close

    def close_and_raise() -> None:
        close()
        raise OSError("the first")

    def end(_: hc.ProcessGroup) -> None:
        raise ValueError("the last")

    monkeypatch.setattr(backend, "close", close_and_raise)
    monkeypatch.setattr(group, "on_destroy", end)
    with pytest.raises(ValueError, match="the last") as raised:
        group.destroy()
    assert isinstance(raised.value.__context__, OSError)
    assert group.is_destroyed
    assert comm == MPI.COMM_NULL


def test_what_makes_no_group() -> None:
    for nothing in (None, 3, MPI.COMM_NULL):
        with pytest.raises(TypeError, match="expected an mpi4py intracommunicator"):
            hc.ProcessGroup.from_comm(nothing)
    with pytest.raises(ValueError, match="no backend is called 'nope'"):
        hc.ProcessGroup.from_comm(MPI.COMM_WORLD, config="nope")
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="expected a positive timedelta or number of seconds"):
            hc.ProcessGroup.from_comm(MPI.COMM_WORLD, timeout=timeout)
    for timeout in ("x", [], True):
        with pytest.raises(TypeError, match="expected a timedelta or a number of seconds"):
            hc.ProcessGroup.from_comm(MPI.COMM_WORLD, timeout=timeout)  # type: ignore[arg-type]


def test_settings_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_SEGMENT_BYTES", str(1000 + RANK))
    monkeypatch.setenv("HPCCOMM_BLOCKING_WAIT", "1" if RANK == 0 else "0")
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "0" if RANK == 0 else "1")
    with hc.ProcessGroup.from_comm(MPI.COMM_WORLD) as group:
        assert group.tuning.segment_bytes == 1000
        assert group.settings.blocking_wait
        assert not group.settings.cuda_aware
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "maybe" if RANK == 0 else "0")
    with pytest.raises(ValueError, match="HPCCOMM_INTRA_NODE is 'maybe'; expected 0, 1 or host"):
        hc.ProcessGroup.from_comm(MPI.COMM_WORLD)


# -- new_group of a communicator ---------------------------------------------------------------------


def test_new_group_of_a_communicator() -> None:
    with hc.init_process_group():
        grid = MPI.COMM_WORLD.Create_cart([SIZE, 1], [True, False])
        column, row = grid.Sub([True, False]), grid.Sub([False, True])
        group, alone = hc.new_group(comm=column, group_desc="column"), hc.new_group(comm=row)
        assert group.ranks == tuple(range(SIZE))
        assert alone.ranks == (RANK,)
        assert (total(group), total(alone)) == (SIZE, 1.0)
        assert group.comm != column
        nobody = hc.new_group(comm=MPI.COMM_NULL)
        assert isinstance(nobody, hc.NonMember)
        with pytest.raises(ValueError, match="both ranks and comm are given"):
            hc.new_group([0], comm=column)
        with pytest.raises(TypeError, match="comm is 3; expected an mpi4py intracommunicator"):
            hc.new_group(comm=3)  # type: ignore[arg-type]
        for comm in (column, row, grid):
            comm.Free()


@several
def test_new_group_of_a_communicator_that_is_not_of_the_world() -> None:
    halves = MPI.COMM_WORLD.Split(RANK % 2)
    with (
        hc.init_process_group(comm=halves),
        pytest.raises(ValueError, match=r"new_group: rank 1 of comm is not in the world group|rank 0 of comm"),
    ):
        hc.new_group(comm=MPI.COMM_WORLD)
    halves.Free()


# -- one end for the world ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["method", "with", "function"])
def test_the_world_ends_in_whichever_way(how: str) -> None:
    world = hc.init_process_group()
    child = hc.new_group()
    if how == "method":
        world.destroy()
    elif how == "function":
        hc.destroy_process_group()
    else:
        with world:
            pass
    assert not hc.is_initialized()
    assert hc.GroupMember.WORLD is None
    assert child.is_destroyed
    with hc.init_process_group():
        assert total() == SIZE


def test_a_group_that_is_destroyed_by_its_method_is_forgotten_by_the_world() -> None:
    with hc.init_process_group() as world:
        for _ in range(3):
            group = hc.new_group()
            assert group in world.children
            group.destroy()
        assert world.children == []


def test_a_destroyed_group_can_not_be_split() -> None:
    with hc.init_process_group() as world:
        group = hc.new_group()
        group.destroy()
        with pytest.raises(hc.DistError, match=r"split_group: the process group 'group .*' has been destroyed"):
            hc.split_group(group, 0)
        comms = hc.new_group()
        with pytest.raises(ValueError, match="no backend is called 'nope'"):
            hc.split_group(comms, 0, backend="nope")  # refused before anything is split
        for color, key in ((0.0, 0), (True, 0), ([0], 0), (0, 0.5)):
            with pytest.raises(TypeError, match=r"split_group: (color|key) is .*; expected an integer"):
                hc.split_group(world, color, key=key)  # type: ignore[arg-type]
        assert total(comms) == SIZE


@pytest.mark.parametrize("ranks", [[0.0], [True], ["0"], [[0]]])
def test_ranks_are_integers(ranks: Any) -> None:
    with hc.init_process_group(), pytest.raises(TypeError, match=r"new_group: a rank is .*; expected an integer"):
        hc.new_group(ranks)


# -- what is left on a communicator ------------------------------------------------------------------


@several
def test_a_message_that_nobody_received_does_not_reach_the_next_group() -> None:
    with hc.init_process_group():
        for _ in range(3):
            left = hc.new_group()
            if RANK == 0:
                hc.send(np.full(1, 111.0), 1, group=left)
                hc.send(np.full(2, 112.0), 1, group=left, tag=3)
            hc.barrier()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                hc.destroy_process_group(left)
            said = [str(each.message) for each in caught]
            assert len(said) == (RANK == 1), said
            for text in said:
                assert "2 messages were sent to this rank and never received" in text
                assert "8 bytes from rank 0 with tag 0" in text
                assert "16 bytes from rank 0 with tag 3" in text
            following = hc.new_group()
            if RANK == 0:
                hc.send(np.full(1, 222.0), 1, group=following)
            if RANK == 1:
                received = np.zeros(1)
                hc.recv(received, 0, group=following)
                assert received[0] == 222.0
            hc.destroy_process_group(following)


@several  # alone, MPICH keeps a message to oneself until it is received
def test_a_message_to_oneself_that_nobody_received_is_told_of() -> None:
    with hc.init_process_group() as world:
        for _ in range(20):
            group = hc.new_group()
            hc.isend(np.ones(1), world.rank, group).wait()
            with pytest.warns(RuntimeWarning, match="1 message was sent to this rank and never received"):
                group.destroy()


@several
def test_a_failed_monitored_barrier_leaves_nothing_to_the_next_group() -> None:
    with hc.init_process_group():
        for _ in range(3):
            group = hc.new_group()
            if RANK == 0:
                with pytest.raises(hc.DistTimeoutError, match="rank"):
                    hc.monitored_barrier(group, timeout=0.05)  # the others never call it
            hc.barrier()
            hc.destroy_process_group(group)  # without a warning: these are hpccomm's own messages
            following = hc.new_group()
            missing = SIZE - 1
            if missing == RANK:
                hc.barrier()
            else:
                with pytest.raises(hc.DistTimeoutError, match=rf"\b{missing}\b.* not arrived"):
                    hc.monitored_barrier(following, timeout=1, wait_all_ranks=True)
                hc.barrier()
            hc.destroy_process_group(following)


# -- two communicators, two orders -------------------------------------------------------------------


@several
@pytest.mark.parametrize("what", ["shared", "persistent", "make", "objects"])
def test_a_group_is_made_and_freed_beside_a_large_operation_of_another(what: str) -> None:
    """One rank waits for the large operation before, the others after."""
    with hc.init_process_group():
        hc.all_reduce(np.ones(200_000), async_op=True).wait()
        for _ in range(5):
            group = hc.new_group()
            if what == "shared":
                hc.empty_shared(1000, group=group)[:] = 1
            if what == "persistent":
                with hc.all_reduce_init(np.ones(3), group=group) as sums:
                    sums.start()
                    sums.wait()
            hc.barrier()
            large = np.ones(1_000_000)
            work = hc.all_reduce(large, async_op=True)
            if RANK == 1:
                work.wait()
            if what == "make":
                hc.empty_shared(1000, group=group)
            if what == "objects":
                slots = [None] * SIZE
                hc.all_gather_object(slots, RANK, group)
                assert slots == list(range(SIZE))
            hc.destroy_process_group(group)
            work.wait()
            assert (large == SIZE).all()


def test_the_first_large_operation_of_a_group_beside_small_ones() -> None:
    with hc.init_process_group():
        for round_ in range(10):
            group = hc.new_group()
            if (round_ + RANK) % SIZE == 0:
                time.sleep(0.001)
            large = np.ones(200_000)
            works = [hc.all_reduce(large, group=group, async_op=True)]
            small = [np.full(1 + k % 7, float(RANK + k)) for k in range(20)]
            works += [hc.all_reduce(array, group=group, async_op=True) for array in small]
            for work in works:
                work.wait()
            assert (large == SIZE).all()
            for k, array in enumerate(small):
                assert (array == sum(r + k for r in range(SIZE))).all()
            hc.destroy_process_group(group)


# -- destroy is collective ---------------------------------------------------------------------------


@several
def test_destroy_waits_for_all_ranks() -> None:
    with hc.init_process_group():
        group = hc.new_group()
        arrived = threading.Event()
        if RANK == 0:
            time.sleep(0.2)
            arrived.set()
        group.destroy()
        assert arrived.is_set() or RANK


@several
def test_destroy_tells_of_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpccomm.core import ending as module

    monkeypatch.setattr(module, "SHORTEST_MEETING", 0.1)
    with hc.init_process_group():
        group = hc.new_group(timeout=0.1)
        if RANK == 0:
            with pytest.raises(hc.DistTimeoutError, match=r"destroy of .*other ranks have not called it within"):
                group.destroy()
            assert not group.is_destroyed
        hc.barrier()
        monkeypatch.undo()
        group.destroy()  # the next try goes on where the first has ended
        assert group.is_destroyed


@several
@pytest.mark.parametrize("how", ["a new group", "the communication thread"])
def test_what_makes_a_communicator_takes_no_message_of_the_program(how: str) -> None:
    # Open MPI sends messages of the communicator's own, with the tag of MPI_Comm_create_group
    with hc.init_process_group(timeout=30) as world:
        others = [rank for rank in range(SIZE) if rank != RANK]
        received = {(rank, tag): np.zeros(100) for rank in others for tag in range(4)}
        receives = [hc.irecv(array, rank, tag=tag) for (rank, tag), array in received.items()]
        hc.barrier()
        if how == "a new group":
            hc.new_group()
        else:
            hc.all_reduce(np.ones(world.tuning.thread_bytes // 8), async_op=True).wait()
        for rank, tag in received:
            hc.send(np.full(100, 10.0 * RANK + tag), rank, tag=tag)
        for receive in receives:
            receive.wait()
        for (rank, tag), array in received.items():
            assert (array == 10 * rank + tag).all()


@pytest.mark.serial
def test_more_groups_than_mpi_has_communicators_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    program = """
        from mpi4py import MPI
        import hpccomm as hc
        with hc.init_process_group() as world:
            own = world.comm.Dup()
            for name, make in {
                'new_group': hc.new_group,
                'new_group by comm': lambda: hc.new_group(comm=own),
                'new_grid': lambda: hc.new_grid((world.size, 1)),
                'split_group': lambda: hc.split_group(color=0),
            }.items():
                try:
                    made = [make() for _ in range(2100 if 'MPICH' in MPI.Get_library_version() else 20)]
                except hc.DistBackendError as error:
                    text = str(error)
                    assert text.startswith(f'{name.split()[0]}: MPI reports: '), text
                    assert 'Too many communicators' in text and 'destroy_process_group(group)' in text, text
                for group in list(world.children):
                    group.destroy()
            hc.barrier()
        """
    run_program(program, tmp_path, 2, status=0, timeout=120)
