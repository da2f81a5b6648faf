"""Connecting the ranks' GPUs, errors, and the end of a group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.nccl import async_errors, connection, plan

from ..arrays import assert_same, strided
from ..launch import until
from . import gpus
from .test_streams import gpu_goes_on

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
pytestmark = pytest.mark.usefixtures("no_world_left")


# -- connecting --------------------------------------------------------------------------------------


def test_nothing_is_connected_before_the_first_gpu_array(machine: Any) -> None:
    with hc.init_process_group() as group:
        hc.all_reduce(np.ones(1))
        assert "cuda" not in group.dispatcher.backends
        hc.all_reduce(gpus.array(np.ones(1)))
        assert machine.calls.count("connect") == 1
        hc.all_reduce(gpus.array(np.ones(1)))
        assert machine.calls.count("connect") == 1
    assert machine.calls[-1] == "destroy"


def test_device_id_connects_at_once(machine: Any) -> None:
    with hc.init_process_group(device_id=1) as group:
        assert machine.calls == ["connect"]
        assert machine.device == 1
        assert group.device_id == 1
        array = gpus.array(np.ones(1))
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE


@pytest.fixture
def two_gpus(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two GPUs that all ranks see, and may share."""
    machine.identities, machine.version = {0: "one", 1: "two"}, 23000
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return machine


@pytest.mark.several_gpus
def test_the_ranks_of_a_node_take_turns(two_gpus: Any) -> None:
    machine = two_gpus
    with hc.init_process_group(device_id="auto"):
        assert machine.device == hc.get_local_rank() % 2
        assert hc.GroupMember.WORLD.device_id == machine.device
        array = gpus.array(np.ones(1))
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE
        alone = hc.new_group([0])
        if isinstance(alone, hc.ProcessGroup):
            hc.all_reduce(array, group=alone)
            assert gpus.values(array) == SIZE


def test_a_first_message_between_two_of_many_after_device_id() -> None:
    with hc.init_process_group(device_id=gpus.own()):
        if RANK == 0 and SIZE > 1:
            hc.send(gpus.array(np.ones(2)), 1)
        elif RANK == 1:
            array = gpus.array(np.zeros(2))
            hc.recv(array, 0)
            assert_same(gpus.values(array), np.ones(2))


def test_device_ids_that_can_not_be(machine: Any) -> None:
    with pytest.raises(ValueError, match="device_id is -1; expected 0 or more"):
        hc.init_process_group(device_id=-1)
    with pytest.raises(ValueError, match="device_id is cuda:0; expected 0 or more, or 'auto'"):
        hc.init_process_group(device_id="cuda:0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device_id is 0, but backend 'cpu:mpi' has no 'cuda'"):
        hc.init_process_group("mpi", device_id=0)
    with pytest.raises(hc.DistBackendError, match="rank 0 has no usable GPU: cudaErrorInvalidDevice"):
        hc.init_process_group(device_id=7)
    assert not hc.is_initialized()
    machine.devices = 0
    for backend in ("cuda:nccl", "cpu:mpi,cuda:mpi"):
        with pytest.raises(hc.DistBackendError, match="rank 0 has no usable GPU: CUDA shows no GPU"):
            hc.init_process_group(backend, device_id="auto")
        assert not hc.is_initialized()


def test_an_array_on_another_gpu(machine: Any) -> None:
    with hc.init_process_group(device_id=1):
        with pytest.raises(ValueError, match="an array is on GPU 0, but this rank's GPU in the group is 1"):
            hc.all_reduce(gpus.array(np.ones(1), device=0))
        with pytest.raises(ValueError, match="an array is on GPU 0"):
            hc.all_gather_single(gpus.array(np.ones(SIZE)), gpus.array(np.ones(1), device=0))


@pytest.mark.several_gpus
def test_without_device_id_the_first_array_decides(machine: Any) -> None:
    machine.devices = 4
    with hc.init_process_group():
        array = gpus.array(np.ones(1), device=3)
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE
        with pytest.raises(ValueError, match="an array is on GPU 0, but this rank's GPU in the group is 3"):
            hc.all_reduce(gpus.array(np.ones(1), device=0))


@pytest.mark.several_gpus
@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:mpi,cuda:mpi"])
def test_groups_made_later_keep_the_gpu(two_gpus: Any, backend: str) -> None:
    with hc.init_process_group(backend, device_id="auto"):
        mine = two_gpus.device
        for ranks in ([SIZE - 1], range(SIZE - 1, -1, -1)):
            group = hc.new_group(list(ranks), use_local_synchronization=True)
            if isinstance(group, hc.ProcessGroup):
                assert two_gpus.device == group.device_id == mine
                hc.all_reduce(gpus.array(np.ones(1)), group=group)


@pytest.mark.several_gpus
@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:mpi,cuda:mpi"])
def test_a_rank_that_sees_one_gpu_only_takes_that(two_gpus: Any, backend: str) -> None:
    # as under srun --gpus-per-task=1: for every rank it has number 0
    two_gpus.devices, two_gpus.identities = 1, {}
    with hc.init_process_group(backend, device_id="auto"):
        assert two_gpus.device == 0


@pytest.mark.several_gpus
@pytest.mark.skipif(SIZE < 3, reason="needs three ranks")
def test_ranks_that_see_different_gpus_do_not_collide(machine: Any) -> None:
    # as under srun --gpu-bind=closest: even ranks see one half, odd ones the other
    machine.identities = {index: f"GPU {index + 2 * (RANK % 2)}" for index in range(2)}
    with hc.init_process_group("cuda:nccl", device_id="auto"):
        assert machine.device == RANK // 2 % 2


@pytest.mark.several_gpus
def test_mig_instances_are_explained(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.devices, machine.identities = 1, {0: "the first instance"}
    monkeypatch.delenv("NCCL_HOSTID", raising=False)  # with which ranks may share one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    if SIZE > 1:
        with pytest.raises(hc.DistBackendError, match="one MIG instance, the first that CUDA_VISIBLE_DEVICES names"):
            hc.init_process_group(device_id="auto")
    with hc.init_process_group("cpu:mpi,cuda:mpi", device_id="auto"):
        assert machine.device == 0


@pytest.mark.several_gpus
def test_without_an_array_the_ranks_of_a_node_take_turns(two_gpus: Any) -> None:
    with hc.init_process_group("nccl") as group:
        hc.barrier()
        assert group.dispatcher.backends["cuda"]._connection.device == hc.get_local_rank() % 2


def test_no_context_is_made_on_a_gpu_of_another_rank(machine: Any) -> None:
    with hc.init_process_group(device_id=1):
        assert machine.contexts == {1}
        array = gpus.array(np.ones(4))
        futures = [hc.all_reduce(array, async_op=True).get_future().then(lambda _: None) for _ in range(2)]
        hc.collect_all(futures).wait()  # the progress thread has asked for the events
        hc.all_reduce(array, async_op=True).wait(timeout=10)
        half = hc.split_group(color=RANK % 2)
        hc.all_reduce(array, group=half)
    assert machine.contexts == {1}


# -- errors when connecting --------------------------------------------------------------------------


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_ranks_that_share_a_gpu_are_named(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.identities = {gpus.own(): "the same"} if RANK < 2 else {}
    monkeypatch.delenv("NCCL_HOSTID", raising=False)  # with which they may
    with hc.init_process_group():
        array = gpus.array(np.ones(1))
        for version, allowed in ((22703, "1"), (23000, "0")):
            machine.version = version
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed)
            with pytest.raises(hc.DistBackendError, match=r"ranks 0, 1 have the same GPU. Give each rank one"):
                hc.all_reduce(array)
        assert "connect" not in machine.calls
        machine.version = 23000
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE


@pytest.mark.mpi(min_size=2)
def test_ranks_that_nccl_takes_for_ranks_of_other_hosts_may_share_a_gpu(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.identities, machine.version = {gpus.own(): "the same"}, 22703
    monkeypatch.setenv("NCCL_HOSTID", f"rank-{RANK}")
    with hc.init_process_group():
        array = gpus.array(np.ones(1))
        hc.all_reduce(array)
        assert gpus.values(array) == SIZE


@pytest.mark.parametrize("setting", ["NCCL_COMM_BLOCKING=0", "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1"])
def test_a_variable_with_which_nccl_would_not_work_is_refused_on_every_rank(
    machine: Any, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    if RANK == SIZE - 1:
        monkeypatch.setenv(*setting.split("="))
    match = f"rank {SIZE - 1} has no usable GPU: {setting} is set, .*unset it"
    with hc.init_process_group(), pytest.raises(hc.DistBackendError, match=match):
        hc.all_reduce(gpus.array(np.ones(1)))


def test_an_error_of_the_root_reaches_every_rank(machine: Any) -> None:
    from .stand_in import NCCLError

    with hc.init_process_group():
        if RANK == 0:
            machine.failures.append(NCCLError("ncclSystemError (2): no network interface"))
        array = gpus.array(np.ones(1))
        with pytest.raises(hc.DistBackendError, match=r"NCCL on rank 0 can't make a unique id: ncclSystemError \(2\)"):
            hc.all_reduce(array)
        hc.all_reduce(array)  # the next attempt is a new one
        assert gpus.values(array) == SIZE


def test_an_error_of_nccl_closes_the_group_of_calls(machine: Any) -> None:
    from .stand_in import NCCLError

    with hc.init_process_group():
        array = gpus.array(np.ones(1))
        hc.all_reduce(array)
        machine.failures.append(NCCLError("ncclInternalError (3)"))
        match = "all_reduce_coalesced #2 of 'world': NCCL reports ncclInternalError"
        with pytest.raises(hc.DistBackendError, match=match):
            hc.all_reduce_coalesced([array, gpus.array(np.ones(1))])
        assert machine.depth == 0  # the group was closed
        machine.grouped.clear()


def test_a_barrier_of_a_group_on_gpus_waits_on_the_host(machine: Any) -> None:
    with hc.init_process_group("cuda:nccl", device_id=gpus.own()):
        hc.barrier()
        machine.held = True  # as if another rank had not come
        with pytest.raises(hc.DistTimeoutError):
            hc.barrier(timeout=0.01)
        work = hc.barrier(async_op=True)
        assert not work.waits_on_stream
        with gpu_goes_on(machine):
            work.wait()
        assert work.is_completed()


# -- sub-groups --------------------------------------------------------------------------------------


def test_groups_made_after_connecting_are_split_off(machine: Any) -> None:
    with hc.init_process_group(device_id=gpus.own()):
        machine.calls.clear()
        last = hc.new_group([SIZE - 1])
        halves = hc.split_group(color=RANK % 2, key=-RANK)
        nobody = hc.split_group(color=None)
        assert machine.calls.count("split") == 3
        assert "connect" not in machine.calls
        assert isinstance(nobody, hc.NonMember)
        for group in (last, halves):
            if isinstance(group, hc.ProcessGroup):
                array = gpus.array(np.array([1.0 + RANK]))
                hc.all_reduce(array, group=group)
                assert gpus.values(array) == sum(1.0 + rank for rank in group.ranks)
                gathered = gpus.array(np.zeros(group.size))
                hc.all_gather_single(gathered, gpus.array(np.array([float(RANK)])), group=group)
                assert_same(gpus.values(gathered), np.array(group.ranks, float))


def test_nothing_is_in_flight_when_a_communicator_is_split() -> None:
    with hc.init_process_group(device_id=gpus.own()):
        array = gpus.array(np.ones(4))
        for _ in range(2):  # alone and together
            hc.all_reduce(array)
            hc.new_group([0])
            hc.all_reduce(array, async_op=True)
            hc.new_group([0])
        assert_same(gpus.values(array), np.full(4, float(SIZE**4)))


def test_a_capture_of_one_rank_refuses_the_new_group_on_all() -> None:
    with hc.init_process_group(device_id=gpus.own()):
        match = rf"rank {SIZE - 1} .*can't be replayed by a CUDA graph"
        with gpus.captured() if RANK == SIZE - 1 else nullcontext(), pytest.raises(hc.DistBackendError, match=match):
            hc.new_group()
        hc.new_group().destroy()


def test_groups_that_only_their_members_make_are_connected_anew(machine: Any) -> None:
    with hc.init_process_group(device_id=gpus.own()):
        machine.calls.clear()
        group = hc.new_group([0, SIZE - 1][: min(SIZE, 2)], use_local_synchronization=True)
        assert ("connect" in machine.calls) == isinstance(group, hc.ProcessGroup)
        assert "split" not in machine.calls


def test_groups_made_before_are_connected_when_needed(machine: Any) -> None:
    with hc.init_process_group():
        group = hc.new_group()
        other = hc.new_group(backend="cpu:mpi")
        array = gpus.array(np.ones(1))
        hc.all_reduce(array, group=group)
        assert gpus.values(array) == SIZE
        assert machine.calls.count("connect") == 1
        with pytest.raises(hc.DistError, match="has no backend for cuda arrays"):
            hc.all_reduce(array, group=other)


# -- the end -----------------------------------------------------------------------------------------


def test_destroy_waits_for_what_is_in_flight() -> None:
    group = hc.init_process_group()
    array = gpus.array(np.ones(1000))
    work = hc.all_reduce(array, async_op=True)
    group.destroy()
    assert work.is_success()


@pytest.mark.parametrize("blocking_wait", [False, True])
def test_what_is_done_is_let_go(blocking_wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_BLOCKING_WAIT", "01"[blocking_wait])
    with hc.init_process_group() as group:
        array = gpus.array(np.ones(3))
        for finish in (
            lambda work: work.synchronize(),
            lambda work: work.wait(timeout=10),
            lambda work: work.result(),
            lambda work: work.get_future().wait(),
        ):
            for _ in range(3):
                finish(hc.all_reduce(array, async_op=True))
            gpus.values(array)  # the host waits
        hc.all_reduce(array, async_op=True).synchronize()
        nccl = group.dispatcher.backends["cuda"]._connection
        assert not any(nccl.in_flight.values())  # no arrays: a wait has only put the end of some on a stream
        assert len(nccl.in_flight) + len(nccl.events) <= 4  # of 13 operations
        gpus.values(array)


def test_destroy_of_a_communicator_that_does_not_end(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group = hc.init_process_group(timeout=0.2)
    hc.all_reduce(gpus.array(np.ones(1)))
    machine.held = True
    with pytest.raises(hc.DistTimeoutError, match=r"could not be destroyed within 0.2 s, and was given up"):
        group.dispatcher.backends["cuda"].close()
    machine.held = False
    assert "abort" in machine.calls
    group.dispatcher.backends.pop("cuda")


def test_destroy_while_python_exits_and_starts_no_thread(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group = hc.init_process_group()
    hc.all_reduce(gpus.array(np.ones(1)))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    group.destroy()
    assert "destroy" in machine.calls


def test_asynchronous_errors_reach_the_work_and_the_group(machine: Any) -> None:
    with hc.init_process_group():
        array = gpus.array(np.ones(1))
        machine.held = True
        work = hc.all_reduce(array, async_op=True)
        machine.async_error = "ncclRemoteError (6): rank 3 has closed the connection"
        deadline = time.monotonic() + 20
        while work.exception() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        text = r"NCCL reports ncclRemoteError \(6\): rank 3 has closed the connection; .* have been ended"
        with pytest.raises(hc.DistBackendError, match=text):
            raise work.exception()
        with pytest.raises(hc.DistBackendError, match=text):
            work.wait()
        assert work.status is hc.WorkStatus.FAILED
        assert "abort" in machine.calls
        with pytest.raises(hc.DistBackendError, match=text):
            hc.all_reduce(array)
        machine.held = False


def test_wait_raises_an_asynchronous_error(machine: Any) -> None:
    with hc.init_process_group() as group:
        machine.held = True
        work = hc.all_reduce(gpus.array(np.ones(1)), async_op=True)
        group.dispatcher.backends["cuda"]._connection.fail("ncclSystemError (2)")
        with pytest.raises(hc.DistBackendError, match=r"NCCL reports ncclSystemError \(2\)"):
            work.wait()
        machine.held = False


@pytest.mark.parametrize("end", [lambda work: work.wait(), lambda work: work.is_completed()])
def test_a_failure_of_a_persistent_operation(machine: Any, end: Callable[[hc.PersistentWork], bool]) -> None:
    with hc.init_process_group() as group:
        array = gpus.array(np.ones(2))
        reduction = hc.all_reduce_init(array)
        machine.held = True
        reduction.start()
        group.dispatcher.backends["cuda"]._connection.fail("ncclSystemError (2)")
        with pytest.raises(hc.DistBackendError, match=r"ncclSystemError \(2\)"):
            end(reduction)
        with pytest.raises(hc.DistBackendError, match=r"NCCL reports ncclSystemError \(2\); the group's"):
            reduction.start()
        machine.held = False


def test_errors_of_cuda_are_the_backends(machine: Any) -> None:
    from .stand_in import CUDAError

    with hc.init_process_group():
        array = gpus.array(np.ones(1))
        for wait in (
            lambda work: work.wait(timeout=10),
            lambda work: work.synchronize(),
            lambda work: work.get_future().wait(),
        ):
            machine.held = True
            work = hc.all_reduce(array, async_op=True)
            machine.cuda_failures.append(CUDAError("cudaErrorIllegalAddress"))
            machine.held = False
            with pytest.raises(
                hc.DistBackendError, match=r"all_reduce #\d+ of 'world': CUDA reports cudaErrorIllegalAddress"
            ):
                wait(work)
        hc.all_reduce(array)  # behind those that failed
        gpus.values(array)


def test_what_could_not_be_aborted_is_kept(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LONGEST_ABORT", 0.1)
    monkeypatch.setattr(connection, "ABANDONED", [])
    ends = threading.Event()
    with hc.init_process_group() as group:
        array = gpus.array(np.ones(4))
        hc.all_reduce(array)
        nccl = group.dispatcher.backends["cuda"]._connection
        machine.held = True
        work = hc.all_reduce(array, async_op=True)
        monkeypatch.setattr(nccl.comm, "abort", ends.wait, raising=False)
        nccl.fail("ncclSystemError (2)")
        with pytest.raises(hc.DistBackendError, match="ncclSystemError"):
            work.wait()
        kept = [each for alive in connection.ABANDONED for one in alive.values() for each in one]
        assert any(each is array for each in kept)
        ends.set()
        machine.held = False
        machine.host_waits(machine.streams[nccl.stream])  # the GPU has ended: now the array may go


def test_no_thread_is_inside_nccl_when_it_is_aborted(machine: Any) -> None:
    with hc.init_process_group() as group:
        hc.all_reduce(gpus.array(np.ones(4)))
        nccl = group.dispatcher.backends["cuda"]._connection
        machine.calls.clear()
        with nccl.issuing.calling:  # as this thread has it while it calls NCCL
            failing = threading.Thread(target=nccl.fail, args=("ncclRemoteError (6)",))
            failing.start()
            failing.join(0.2)
            assert failing.is_alive()
            assert "abort" not in machine.calls
        failing.join(20)
        assert machine.calls == ["abort"]


def test_an_error_is_seen_while_a_thread_waits_in_a_call_of_another_group(machine: Any) -> None:
    with hc.init_process_group() as group:
        hc.all_reduce(gpus.array(np.ones(4)))
        nccl = group.dispatcher.backends["cuda"]._connection
        with plan.ISSUING:  # as another thread has it in a first message of another group
            machine.async_error = "ncclRemoteError (6): a rank is gone"
            until(lambda: nccl.ended_by, "end of the group")
            machine.async_error = None
        with pytest.raises(hc.DistBackendError, match="a rank is gone"):
            hc.all_reduce(gpus.array(np.ones(4)))


@pytest.mark.parametrize("layout", [np.array, strided], ids=["fast", "long"])
def test_no_call_is_made_on_an_aborted_communicator(machine: Any, monkeypatch: pytest.MonkeyPatch, layout: Any) -> None:
    with hc.init_process_group() as group:
        array = gpus.array(np.ones(4), layout)
        hc.all_reduce(array)
        nccl = group.dispatcher.backends["cuda"]._connection
        current_stream = nccl.runtime.current_stream

        def fails_meanwhile(device: int) -> int:
            nccl.fail("ncclRemoteError (6)")
            return int(current_stream(device))

        monkeypatch.setattr(nccl.runtime, "current_stream", fails_meanwhile)
        machine.calls.clear()
        with pytest.raises(hc.DistBackendError, match="ncclRemoteError"):
            hc.all_reduce(array)
        assert "all_reduce" not in machine.calls


def test_behind_stop_nobody_looks_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it might ask a communicator that is gone."""
    monkeypatch.setattr(async_errors, "SECONDS_BETWEEN_LOOKS", 0)
    looks, may_end = threading.Event(), threading.Event()

    def look() -> None:
        looks.set()
        may_end.wait(30)

    errors = async_errors.AsyncErrors(look, lambda reason: None)
    assert looks.wait(30)
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    errors.stop()
    assert may_end.is_set()
    timer.join()


def test_abort_ends_the_communicators_first(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with hc.init_process_group() as group:
        hc.all_reduce(gpus.array(np.ones(1)))
        ended: list[int] = []
        monkeypatch.setattr(MPI, "COMM_WORLD", SimpleNamespace(Abort=ended.append))
        monkeypatch.setattr("hpccomm.process.abort._ends_all_of", lambda _: False)  # as prterun does
        with pytest.raises(SystemExit):
            group.abort(3)
        monkeypatch.undo()
        assert machine.calls[-1] == "abort"
        assert ended == [3]


def test_dropped_communicators_are_not_destroyed(machine: Any) -> None:
    """Destroying is collective, and a finaliser runs when it likes."""
    hc.init_process_group()
    group = hc.new_group()
    hc.all_reduce(gpus.array(np.ones(1)), group=group)
    machine.calls.clear()
    del group
    assert "destroy" not in machine.calls
    hc.destroy_process_group()
    assert machine.calls.count("destroy") == 1


@pytest.mark.several_gpus
@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_the_memory_kept_for_a_groups_streams_is_freed_whatever_gpu_is_current(transport: str, machine: Any) -> None:
    machine.devices, machine.device = 2, 0
    with hc.init_process_group(f"cpu:mpi,cuda:{transport}"):
        hc.all_reduce(gpus.array(np.ones(4), strided, device=0))
        machine.device = 1
    assert not machine.races
