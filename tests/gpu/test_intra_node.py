"""all_reduce among the GPUs of a node by CUDA IPC: the choice of the algorithm, and the algorithms."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.nccl.intra_node import choose

from ..arrays import assert_same, backwards, contiguous, strided
from . import gpus
from .kernels import build

pytestmark = pytest.mark.skipif(not gpus.is_real() and not build.is_available(), reason=build.NEEDS)

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
K, M = 1 << 10, 1 << 20
SUM = hc.ReduceOp.SUM
needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


# -- the choice --------------------------------------------------------------------------------------


@pytest.mark.serial
@pytest.mark.parametrize(
    ("nbytes", "dtype", "op", "by_host", "expected"),
    [
        (16, "float32", SUM, False, "one_shot"),
        (16, "float16", SUM, False, "one_shot"),
        (16, "bfloat16", SUM, False, "one_shot"),
        (256 * K, "float32", SUM, False, "one_shot"),
        (256 * K + 16, "float32", SUM, False, "two_shot"),
        (10 * M, "float32", SUM, False, "two_shot"),
        (10 * M + 16, "float32", SUM, False, None),
        (0, "float32", SUM, False, None),
        (20, "float32", SUM, False, None),  # no multiple of 16 bytes
        (16, "float64", SUM, False, None),
        (16, "int32", SUM, False, None),
        (16, "float32", hc.ReduceOp.MAX, False, None),
        (16, "float32", hc.ReduceOp.AVG, False, None),
        (16, "float32", hc.ReduceOp.PREMUL_SUM(2), False, None),
        (16, "float32", SUM, True, "one_shot"),
        (1 * M, "float32", SUM, True, "one_shot"),
        (11 * M, "float32", SUM, True, None),
    ],
)
def test_choice(nbytes: int, dtype: str, op: Any, by_host: bool, expected: str | None) -> None:
    assert choose(nbytes, dtype, op, by_host) == expected


# -- the operation -----------------------------------------------------------------------------------


def summed_ones() -> Any:
    """Return an array of ones after an all_reduce, whose result is right."""
    array = gpus.array(np.ones(4, np.float32))
    hc.all_reduce(array)
    assert_same(gpus.values(array), np.full(4, SIZE, np.float32))
    return array


@pytest.fixture(params=["1", "host"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hc.ProcessGroup]:
    if gpus.is_shared() and request.param == "1":
        pytest.skip("ranks share a GPU")
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", request.param)
    with hc.init_process_group() as group:
        yield group


def expected_sum(contributions: list[Any]) -> Any:
    """In float32, in the order of the ranks."""
    total = np.zeros(contributions[0].shape, np.float32)
    for each in contributions:
        total += each.astype(np.float32)
    return total.astype(contributions[0].dtype)


@pytest.mark.parametrize(
    ("nbytes", "dtype"),
    [
        *((nbytes, np.float32) for nbytes in (16, 48, 4096, 256 * K, 256 * K + 16, 512 * K)),
        *((nbytes, dtype) for nbytes in (48, 256 * K + 16) for dtype in (np.float16, ml_dtypes.bfloat16)),
    ],
)
def test_sums_are_those_of_float32_in_the_order_of_the_ranks(world: hc.ProcessGroup, nbytes: int, dtype: Any) -> None:
    count = nbytes // np.dtype(dtype).itemsize
    for call, (layout, async_op) in enumerate(itertools.product((contiguous, strided, backwards), (False, True))):
        given = [np.random.default_rng([rank, call]).normal(size=count).astype(dtype) for rank in range(SIZE)]
        array = gpus.array(given[RANK], layout)
        work = hc.all_reduce(array, async_op=async_op)
        if work is not None:
            work.wait()
        assert_same(gpus.values(array), expected_sum(given), layout, async_op)


def test_an_address_that_is_not_aligned_on_some_ranks(world: hc.ProcessGroup) -> None:
    memory = gpus.array(np.full(1000, RANK + 1, np.float32))
    array = memory[1:997] if RANK % 2 else memory[:996]
    hc.all_reduce(array)
    assert_same(gpus.values(array), np.full(996, sum(range(1, SIZE + 1)), np.float32))


@needs_two
@pytest.mark.several_gpus
def test_the_gpu_of_the_array_need_not_be_the_current_one(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "host")
    machine.devices, machine.device = 2, 0
    with hc.init_process_group() as group:
        hc.all_reduce(gpus.array(np.ones(4, np.float32), device=1))
        backend: Any = group.dispatcher.backends["cuda"]
        assert backend._intra_node._is_usable


def test_which_calls_are_made(world: hc.ProcessGroup, machine: Any) -> None:
    hc.all_reduce(gpus.array(np.ones(4, np.float32)))
    machine.calls.clear()
    hc.all_reduce(gpus.array(np.ones(4, np.float32)))
    hc.all_reduce(gpus.array(np.ones(4, np.float64)))
    expected = ["one_shot", "all_reduce"] if SIZE > 1 else ["all_reduce", "all_reduce"]
    assert [call for call in machine.calls if call in ("one_shot", "two_shot", "all_reduce")] == expected


@needs_two
def test_a_group_of_one_of_ranks_that_share_a_gpu_has_nccl(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.identities = {gpus.own(): "the same"}
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "host")
    with hc.init_process_group():
        array = gpus.array(np.ones(4, np.float32))
        hc.all_reduce(array)
        alone = hc.split_group(color=RANK)
        hc.all_reduce(array, group=alone)
        hc.broadcast(array, RANK, group=alone)
        assert_same(gpus.values(array), np.full(4, SIZE, np.float32))


@needs_two
def test_where_one_rank_can_not_compile_the_kernels_all_leave_it_to_nccl(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .stand_in import CUDAError

    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group():
        if RANK == 1:
            machine.cuda_failures.append(CUDAError("NVRTC_ERROR_COMPILATION"))
        array = gpus.array(np.ones(4, np.float32))
        hc.all_reduce(array)
        assert "all_reduce" in machine.calls
        assert "one_shot" not in machine.calls
        assert_same(gpus.values(array), np.full(4, SIZE, np.float32))


@needs_two
def test_in_a_capture_it_is_refused(world: hc.ProcessGroup) -> None:
    array = gpus.array(np.ones(4, np.float32))
    hc.all_reduce(array)
    refused = "an all_reduce by HPCCOMM_INTRA_NODE can't be replayed"
    with gpus.captured(), pytest.raises(hc.DistBackendError, match=refused):
        hc.all_reduce(array)


def test_groups_of_their_own(world: hc.ProcessGroup) -> None:
    hc.all_reduce(gpus.array(np.ones(4, np.float32)))
    half = hc.split_group(color=RANK % 2)
    array = gpus.array(np.full(8, RANK, np.float32))
    hc.all_reduce(array, group=half)
    assert_same(gpus.values(array), np.full(8, sum(half.ranks), np.float32))


@needs_two
@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_operations_on_several_streams_take_turns_at_the_buffers(
    machine: Any, monkeypatch: pytest.MonkeyPatch, first: bool, second: bool
) -> None:
    from .stand_in import Runtime

    def twice() -> None:
        machine.held = True
        for async_op in (first, second):
            with gpus.another_stream():
                hc.all_reduce(gpus.array(np.ones(4, np.float32)), async_op=async_op)
        machine.held = False

    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group():
        hc.all_reduce(gpus.array(np.ones(4, np.float32)))  # the connection is there
        twice()
        assert not machine.races
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "wait", lambda *_: None)
            twice()
        races, machine.races = machine.races, []
        assert any("does not wait for one_shot on stream" in race for race in races)
        machine.accesses.clear()


@needs_two
def test_what_it_uses_is_kept_without_the_work(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group() as group:
        hc.all_reduce(gpus.array(np.ones(4, np.float32)))  # the connection is there
        machine.held = True
        hc.all_reduce(gpus.array(np.ones(4, np.float32)), async_op=True)
        group.dispatcher.in_flight.clear()  # as where an abort has failed
        gc.collect()
        machine.held = False
        assert not machine.races  # the memory would have been used again


@needs_two
def test_destroy_waits_for_what_is_on_a_stream_of_the_program(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL, which waits for its own kernels, does not know of it."""
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group(), gpus.another_stream() as stream:
        array = gpus.array(np.ones(4, np.float32))
        hc.all_reduce(array)
        assert machine.host.get(stream, 0) < machine.streams[stream][stream]
    assert machine.host[stream] == machine.streams[stream][stream]


def test_memory_that_can_not_be_opened(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.blind = RANK == 0
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group():
        summed_ones()
        assert "all_reduce" in machine.calls  # NCCL's


@needs_two
def test_ranks_that_share_a_gpu_can_sum_by_way_of_the_host(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.identities = {gpus.own(): "the same"}
    machine.version = 22703
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "host")
    with hc.init_process_group() as group:
        array = summed_ones()
        with pytest.raises(hc.DistBackendError, match=r"broadcast needs NCCL; .* have the same GPU"):
            hc.broadcast(array, 0)
        half = hc.new_group([0, 1])
        if isinstance(half, hc.ProcessGroup):
            hc.all_reduce(array, group=half)
            assert gpus.values(array)[0] == 2 * SIZE
        assert group.dispatcher.backends["cuda"]._connection.failure is None
    assert "connect" not in machine.calls


@pytest.mark.parametrize("intra_node", ["1", "host"])
def test_where_ranks_share_a_gpu_kernels_do_not_wait_for_each_other(
    machine: Any, monkeypatch: pytest.MonkeyPatch, intra_node: str
) -> None:
    machine.identities = {gpus.own(): "the same"}
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", intra_node)
    with hc.init_process_group():
        summed_ones()
    by = "one_shot" if SIZE > 1 and intra_node == "host" else "all_reduce"
    assert {"one_shot", "all_reduce"} & {*machine.calls} == {by}


@needs_two
def test_memory_that_reads_wrong_is_not_used(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle opens, but to other memory than that of the other rank."""
    from .stand_in import MEMORY, Runtime

    opens = Runtime.open_ipc

    def open_something_else(runtime: Runtime, handle: bytes, device: int) -> int:
        memory = opens(runtime, handle, device)
        with tempfile.TemporaryFile() as other:
            other.truncate(MEMORY.mapped[memory].nbytes)
            address = MEMORY.map(other.fileno(), MEMORY.mapped[memory].nbytes)
        machine.shared[address] = runtime._unmapped(memory)
        return address

    if RANK == 0:
        monkeypatch.setattr(Runtime, "open_ipc", open_something_else)
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group():
        summed_ones()
        assert "all_reduce" in machine.calls  # NCCL's
        assert len(machine.shared) == (1 if RANK == 0 else SIZE)  # memory that reads wrong is closed
    assert not machine.shared


@needs_two
def test_no_shared_memory_is_left(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group():
        hc.all_reduce(gpus.array(np.ones(4, np.float32)))
        assert machine.shared
    assert not machine.shared


def test_after_a_failure_destroy_does_not_wait_for_the_others(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_INTRA_NODE", "1")
    with hc.init_process_group() as group:
        hc.all_reduce(gpus.array(np.ones(4, np.float32)))
        backend = group.dispatcher.backends.pop("cuda")
        backend._connection.fail("ncclRemoteError (6)")
        if RANK == 0:  # alone
            backend.close()
        hc.barrier()
        if RANK > 0:
            backend.close()
