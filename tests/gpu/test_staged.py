"""``cuda:mpi``: GPU arrays over MPI, by way of the host or straight."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.cuda import staged_backend
from hpccomm.mpi.cuda_aware_backend import CudaAwareBackend, OnItsGPU
from hpccomm.mpi.works import MPIWork, ReceiveWork

from ..arrays import assert_same, contiguous, strided, uneven
from . import gpus
from .test_fast_path import hpccomms_functions


@pytest.fixture(params=["staged", "CUDA-aware"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hc.ProcessGroup]:
    """The world with GPU arrays over MPI."""
    if request.param == "CUDA-aware" and gpus.is_real():
        pytest.skip("the collectives are tested so, where the MPI library is CUDA-aware")
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "01"[request.param == "CUDA-aware"])
    with hc.init_process_group("cpu:mpi,cuda:mpi") as world:
        yield world


@pytest.mark.usefixtures("no_world_left")
def test_a_gpu_that_one_rank_has_not_is_every_ranks_error() -> None:
    last = MPI.COMM_WORLD.Get_size() - 1
    device = 1000 if MPI.COMM_WORLD.Get_rank() == last else gpus.own()
    with pytest.raises(hc.DistBackendError, match=f"rank {last} has no usable GPU"):
        hc.init_process_group("cpu:mpi,cuda:mpi", device_id=device)
    assert not hc.is_initialized()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_backend, "CHUNK_BYTES", 64)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("layout", [contiguous, strided])
@pytest.mark.parametrize("size", [7, 8, 9, 16, 17, 40, 100])
def test_large_arrays_go_in_chunks(group: hc.ProcessGroup, size: int, layout: Any) -> None:
    n, me = group.size, group.rank
    given = [np.arange(size) * 10.0 + rank for rank in range(n)]
    total = np.sum(given, axis=0)

    def array() -> Any:
        return gpus.array(given[me], layout)

    for _ in range(2):
        summed = array()
        hc.all_reduce(summed)
        assert_same(gpus.values(summed), total)
    for root in range(n):
        reduced, copied = array(), array()
        hc.reduce(reduced, root)
        assert_same(gpus.values(reduced), total if me == root else given[me])
        hc.broadcast(copied, root)
        assert_same(gpus.values(copied), given[root])
    prefix, before = array(), array()
    hc.scan(prefix)
    assert_same(gpus.values(prefix), np.sum(given[: me + 1], axis=0))
    hc.exscan(before)
    assert_same(gpus.values(before), np.sum(given[:me], axis=0) if me else given[0])


@pytest.mark.usefixtures("small_chunks")
def test_copies_and_messages_overlap(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "0")
    with hc.init_process_group("cpu:mpi,cuda:mpi") as group:
        hc.all_reduce(gpus.array(np.ones(1)))
        host = group.dispatcher.backends["cuda"]._host
        original = host.all_reduce
        monkeypatch.setattr(host, "all_reduce", lambda *args: machine.calls.append("message") or original(*args))
        array = gpus.array(np.ones(4 * 8))
        machine.calls.clear()
        hc.all_reduce(array)
        order = [call for call in machine.calls if call in ("to_host", "message", "to_device")]
        fetched_ahead = ["to_host", "to_host", "message", "to_device", "to_host", "message", "to_device"]
        assert order[:7] == fetched_ahead
        assert_same(gpus.values(array), np.full(32, float(group.size)))


def test_a_cuda_aware_mpi_gets_the_gpus_memory(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "1")
    with hc.init_process_group("cpu:mpi,cuda:mpi") as group:
        to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        for layout in (contiguous, strided):
            array, other = gpus.array(np.ones(4), layout), gpus.array(np.zeros(4), layout)
            work = hc.irecv(other, source)
            hc.isend(array, to).wait()
            work.wait()
            assert work.source_rank() == source
            assert_same(gpus.values(other), np.ones(4))
            hc.all_reduce(array)
            assert_same(gpus.values(array), np.full(4, float(group.size)))
        assert "to_host" not in machine.calls
        assert "to_device" not in machine.calls
        half = gpus.array(np.ones(4, np.float16))
        hc.all_reduce(half)  # MPI would round after every addition
        assert "to_host" in machine.calls
        assert_same(gpus.values(half), np.full(4, group.size, np.float16))
        array = gpus.array(np.array([1.0, np.nan if group.rank else 2.0]))
        hc.all_reduce(array, "max")  # MPI may drop a NaN
        np.testing.assert_array_equal(gpus.values(array), [1.0, np.nan if group.size > 1 else 2.0])


@pytest.mark.parametrize("layout", [contiguous, strided])
def test_arrays_that_a_cuda_aware_mpi_uses_live_until_it_is_done(
    machine: Any, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "1")
    with hc.init_process_group("cpu:mpi,cuda:mpi") as group:
        hc.all_reduce(gpus.array(np.ones(1)))
        backend = group.dispatcher.backends["cuda"]
        works = [
            backend.recv(gpus.array(np.zeros(1000), layout), (group.rank - 1) % group.size, 0, True),
            backend.send(gpus.array(np.ones(1000), layout), (group.rank + 1) % group.size, 0, True),
        ]
        kept = [(work._request, work.alive) for work in works]  # references that are kept if ranks have failed
        del works
        gc.collect()
        assert not machine.races  # the memory would have been used again
        for request, _ in kept:
            request.Wait()


def test_the_input_may_be_a_part_of_the_output(group: hc.ProcessGroup) -> None:
    output = gpus.array(np.full(2 * group.size, float(group.rank)))
    hc.all_gather_single(output, output[2 * group.rank : 2 * group.rank + 2])
    assert_same(gpus.values(output), np.repeat(np.arange(group.size) * 1.0, 2))


def test_messages(group: hc.ProcessGroup) -> None:
    n, me = group.size, group.rank
    to, source = (me + 1) % n, (me - 1) % n
    array, output = gpus.array(np.full(3, me), strided), gpus.array(np.zeros(3, int), strided)
    assert hc.sendrecv(array, to, output, source, tag=4) == source
    assert_same(gpus.values(output), np.full(3, source))
    works = hc.batch_isend_irecv(
        [hc.P2POp(hc.isend, gpus.array(np.full(2, 7 + me)), to, tag=2), hc.P2POp(hc.irecv, output[:2], source, tag=2)]
    )
    for work in works:
        work.wait()
    assert_same(gpus.values(output)[:2], np.full(2, 7 + source))
    if me > 0:
        hc.send(gpus.array(np.full(2, me)), 0, tag=me)
    for sender in range(1, n if me == 0 else 0):
        received = gpus.array(np.zeros(2, int))
        assert hc.recv(received, tag=sender) == sender  # from any rank
        assert_same(gpus.values(received), np.full(2, sender))


def test_messages_between_host_and_gpu(group: hc.ProcessGroup) -> None:
    n, me = group.size, group.rank
    to, source = (me + 1) % n, (me - 1) % n
    work = hc.isend(np.full(3, float(me)), to)
    received = gpus.array(np.zeros(3))
    if n > 1:
        hc.recv(received, source)
        assert_same(gpus.values(received), np.full(3, float(source)))
    else:
        hc.irecv(received, 0).wait()
    work.wait()


@pytest.mark.parametrize(("size", "async_op", "blocking_wait"), [(10_000, False, "0"), (8, True, "0"), (8, False, "1")])
def test_arrays_are_complete_for_every_stream(
    monkeypatch: pytest.MonkeyPatch, size: int, async_op: bool, blocking_wait: str
) -> None:
    """MPI knows no streams: the host has waited."""
    monkeypatch.setenv("HPCCOMM_BLOCKING_WAIT", blocking_wait)
    with hc.init_process_group("cpu:mpi,cuda:mpi") as world:
        array = gpus.array(np.zeros(size))
        gpus.values(array)  # the host has waited for it
        with gpus.another_stream():
            gpus.write(array, np.ones(size))
            work = hc.all_reduce(array, async_op=async_op)
        if work is not None:
            work.wait()
        assert_same(gpus.values(array), np.full(size, float(world.size)))


SMALL: dict[str, Callable[[Any, Any, int, int], object]] = {  # of an array, a larger one, and the ranks beside this one
    "all_reduce": lambda x, y, to, source: hc.all_reduce(x),
    "broadcast": lambda x, y, to, source: hc.broadcast(x, 0),
    "all_gather_single": lambda x, y, to, source: hc.all_gather_single(y, x),
    "all_gather": lambda x, y, to, source: hc.all_gather(list(y), x),
    "scatter": lambda x, y, to, source: hc.scatter(x, list(y) if hc.get_rank() == 0 else None, 0),
    "all_reduce_coalesced": lambda x, y, to, source: hc.all_reduce_coalesced([x, y]),
    "sendrecv": lambda x, y, to, source: hc.sendrecv(x, to, y[0], source),
}


@pytest.mark.parametrize("layout", [contiguous, strided, uneven])
@pytest.mark.parametrize("name", SMALL)
def test_the_host_waits_once_in_a_small_operation(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str, layout: Any
) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "0")
    with hc.init_process_group("cpu:mpi,cuda:mpi") as world:
        n, me = world.size, world.rank
        on_host = np.full((3, 5), me + 1.0), np.zeros((n, 3, 5))
        with gpus.another_stream():
            on_gpu = [gpus.array(each, layout) for each in on_host]
            SMALL[name](*on_host, (me + 1) % n, (me - 1) % n)
            machine.calls.clear()
            SMALL[name](*on_gpu, (me + 1) % n, (me - 1) % n)
            assert [call for call in machine.calls if "synchronize" in call] == ["synchronize_stream"]
            for one, other in zip(on_gpu, on_host):
                assert_same(gpus.values(one), other)


@pytest.mark.parametrize("layout", [contiguous, strided, uneven])
@pytest.mark.parametrize("name", ["halo_exchange", "halo_accumulate"])
def test_the_host_waits_once_in_a_small_exchange(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str, layout: Any
) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "0")
    with hc.init_process_group("cpu:mpi,cuda:mpi") as world, gpus.another_stream():
        grid = hc.new_grid((world.size, 1), periodic=True)
        on_host = np.arange(20.0).reshape(4, 5) + 100 * world.rank
        on_gpu = gpus.array(on_host, layout)
        getattr(hc, name)(on_host, grid)
        machine.calls.clear()
        getattr(hc, name)(on_gpu, grid)
        assert [call for call in machine.calls if "synchronize" in call] == ["synchronize_stream"]
        assert_same(gpus.values(on_gpu), on_host)


def test_a_small_operation_enters_few_functions(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "0")
    with hc.init_process_group("cpu:mpi,cuda:mpi"):
        array = gpus.array(np.ones(4))
        hc.all_reduce(array)
        entered = hpccomms_functions(lambda: hc.all_reduce(array))
        assert len(entered) <= 24, entered
        gpus.values(array)


@pytest.mark.parametrize("layout", [contiguous, strided])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_small_operation_waits_for_the_last_copy_from_its_buffer(
    group: hc.ProcessGroup, name: str, layout: Any
) -> None:
    n, me = group.size, group.rank
    arrays = [gpus.array(np.full(8, float(10 * i + me)), layout) for i in range(2)]
    for array in arrays:
        gpus.values(array)  # the host has waited for it
    with gpus.another_stream():
        hc.all_reduce(arrays[0])
        with gpus.another_stream():
            SMALL[name](arrays[1], None, 0, 0)
            expected = 10.0 if name == "broadcast" else 10.0 * n + n * (n - 1) / 2
            assert_same(gpus.values(arrays[1]), np.full(8, expected))
        assert_same(gpus.values(arrays[0]), np.full(8, n * (n - 1) / 2))


def test_a_small_operation_of_another_thread_has_its_own_buffer(
    group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = gpus.array(np.full(8, 1.0)), gpus.array(np.full(8, 2.0))
    hc.all_reduce(inner)
    if isinstance(backend := group.dispatcher.backends["cuda"], CudaAwareBackend):
        return
    original = backend._host.all_reduce

    def at_the_same_time(*arguments: Any) -> None:
        monkeypatch.undo()
        hc.all_reduce(inner)
        original(*arguments)

    monkeypatch.setattr(backend._host, "all_reduce", at_the_same_time)
    hc.all_reduce(outer)
    assert_same(gpus.values(outer), np.full(8, 1.0 * group.size))
    assert_same(gpus.values(inner), np.full(8, 2.0 * group.size**2))


def test_large_asynchronous_operations(group: hc.ProcessGroup) -> None:
    arrays = [gpus.array(np.full(300_000, float(i))) for i in range(3)]
    for work in [hc.all_reduce(array, async_op=True) for array in arrays]:
        work.wait()
    for i, array in enumerate(arrays):
        assert_same(gpus.values(array), np.full(300_000, float(i * group.size)))


def test_a_persistent_operation_is_staged_at_each_start(group: hc.ProcessGroup) -> None:
    array = gpus.array(np.ones(2))
    with hc.all_reduce_init(array) as reduction:
        for _ in range(2):
            reduction.start()
            reduction.wait()
    assert_same(gpus.values(array), np.full(2, float(group.size) ** 2))


def test_what_is_refused(group: hc.ProcessGroup) -> None:
    if not gpus.is_real():
        with pytest.raises(ValueError, match="arrays of one call are on GPUs 1 and 0"):
            hc.all_gather_single(gpus.array(np.ones(group.size)), gpus.array(np.ones(1), device=0))


def test_errors_are_told(group: hc.ProcessGroup, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import stand_in

    def fail(*_: Any) -> None:
        raise stand_in.CUDAError("cudaErrorIllegalAddress")

    hc.barrier()
    monkeypatch.setattr(stand_in.Runtime, "synchronize_stream", fail)
    with pytest.raises(hc.DistBackendError, match=r"all_reduce #\d+ of '\w+': CUDA reports cudaErrorIllegalAddress"):
        hc.all_reduce(gpus.array(np.ones(2)))
    monkeypatch.undo()
    array = gpus.array(np.ones(1 + group.rank))
    if group.size == 2:
        if group.rank == 1:
            hc.send(array, 0)
        else:
            with pytest.raises(hc.DistBackendError, match=r"recv #\d+ of "):
                hc.recv(array, 1)


def test_an_error_in_copying_the_result_of_an_asynchronous_operation_is_told(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import stand_in

    def fail(*_: Any) -> None:
        raise stand_in.CUDAError("cudaErrorIllegalAddress")

    with hc.init_process_group("cpu:mpi,cuda:mpi"):
        work = hc.all_reduce(gpus.array(np.ones(2)), async_op=True)
        monkeypatch.setattr(stand_in.Runtime, "to_device", fail)
        with pytest.raises(
            hc.DistBackendError, match=r"all_reduce #\d+ of '\w+': CUDA reports cudaErrorIllegalAddress"
        ):
            work.wait()
        monkeypatch.undo()


def test_a_thread_works_on_the_gpu_of_the_arrays(
    machine: Any, group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's calls on GPU 0 make a context there; and UCX needs that of the buffer."""
    asked: set[int] = set()
    for kind in (MPIWork, ReceiveWork):

        def noted(work: Any, poll: Any = kind.poll) -> bool:
            if isinstance(work, OnItsGPU):
                asked.add(machine.device)
            return bool(poll(work))

        monkeypatch.setattr(kind, "poll", noted)
    machine.devices, machine.device = 2, 1
    machine.contexts.clear()
    me, n = group.rank, group.size
    sent, received = gpus.array(np.full(3, float(me)), device=1), gpus.array(np.zeros(3), device=1)
    works = [hc.irecv(received, (me - 1) % n), hc.isend(sent, (me + 1) % n)]
    hc.collect_all([work.get_future().then(lambda _: None) for work in works]).wait()  # by the progress thread
    assert_same(gpus.values(received), np.full(3, float((me - 1) % n)))
    assert asked <= {1}
    assert machine.contexts == {1}


# -- reads and writes of the host --------------------------------------------------------------------


@pytest.mark.once
def test_before_the_host_has_waited_it_finds_rubbish(machine: Any) -> None:
    from .stand_in import RUBBISH, Runtime

    cuda, array = Runtime(), gpus.array(np.arange(4, dtype=np.uint8))
    event = cuda.create_event(machine.device)
    for wait in (
        lambda: cuda.synchronize_stream(0),
        lambda: cuda.synchronize_event(event),
        lambda: cuda.is_done(event),
    ):
        host = cuda.pinned(4)
        cuda.record(event, 0)
        cuda.to_host(host, array, 0)
        assert cuda.is_done(event)  # which is before the copy
        assert_same(host, np.full(4, RUBBISH, np.uint8))
        cuda.record(event, 0)
        wait()
        assert_same(host, np.arange(4, dtype=np.uint8))


@pytest.mark.once
@pytest.mark.parametrize("copy", ["to_host", "to_device"])
def test_host_memory_that_is_dropped_too_early_is_seen(machine: Any, copy: str) -> None:
    from .stand_in import Runtime

    cuda, array, host = Runtime(), gpus.array(np.zeros(4)), np.ones(4)
    getattr(cuda, copy)(*((host, array) if copy == "to_host" else (array, host)), 0)
    del host
    races, machine.races = machine.races, []
    assert races == ["host memory was dropped before the copy to or from it was done"]
    gpus.values(array)


@pytest.mark.once
def test_host_memory_that_is_changed_too_early_is_seen(machine: Any) -> None:
    from .stand_in import Runtime

    cuda, array, host = Runtime(), gpus.array(np.zeros(4)), np.ones(4)
    cuda.to_device(array, host, 0)
    host[0] = 2
    assert_same(gpus.values(array), np.ones(4))
    races, machine.races = machine.races, []
    assert races == ["host memory was changed before the copy from it to the GPU was done"]


def test_mpi_that_gets_the_gpus_memory_too_early_is_seen(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from .stand_in import Runtime

    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "1")
    with hc.init_process_group("cpu:mpi,cuda:mpi"):
        array = gpus.array(np.zeros(4))
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "synchronize_stream", lambda *_: None)
            hc.all_reduce(array)
        gpus.values(array)
        races, machine.races = machine.races, []
        assert len(races) == 1
        assert races[0].startswith("MPI's Allreduce on stream")
        assert "does not wait for the program's writing on stream 0" in races[0]


def test_memory_that_mpi_still_has_is_not_the_programs(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_CUDA_AWARE", "1")
    with hc.init_process_group("cpu:mpi,cuda:mpi") as group:
        array = gpus.array(np.zeros(4))
        work = hc.irecv(array, (group.rank - 1) % group.size)
        gpus.write(array, np.ones(4))
        hc.isend(gpus.array(np.ones(4)), (group.rank + 1) % group.size)
        work.wait()
        gpus.values(array)
        races, machine.races = machine.races, []
        assert any(race.startswith("the program's writing on stream 0 does not wait for MPI's Irecv") for race in races)
