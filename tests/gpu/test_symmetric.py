"""hc.empty_symmetric, and the address of the communicator for other libraries."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from ..arrays import assert_same
from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
pytestmark = pytest.mark.usefixtures("no_world_left")
GPU = {"device_id": gpus.own()}


@pytest.mark.parametrize("on_timeout", ["abort", "raise"])
def test_symmetric_arrays_are_arrays_for_every_operation(on_timeout: str) -> None:
    with hc.init_process_group(on_timeout=on_timeout, **GPU) as group:
        array, parts = hc.empty_symmetric((2, 3), np.float32), group.empty_symmetric(SIZE, "int64")
        assert (array.shape, array.dtype, array.flags.c_contiguous) == ((2, 3), np.float32, True)
        gpus.write(array, np.full((2, 3), RANK + 1))
        hc.all_reduce(array)
        assert_same(gpus.values(array), np.full((2, 3), SIZE * (SIZE + 1) / 2, np.float32))
        mine = gpus.array(np.array([RANK * RANK]))
        hc.all_gather_single(parts, mine)
        assert_same(gpus.values(parts), np.arange(SIZE) ** 2)


def test_the_first_call_connects_the_group() -> None:
    with hc.init_process_group(**GPU), hc.new_group(use_local_synchronization=True) as group:
        assert hc.empty_symmetric((), np.uint8, group).nbytes == 1
        assert hc.empty_symmetric(0, group=group).dtype == np.float64
        assert group.nccl_handle > 0


def test_memory_is_freed_with_the_group_unless_an_array_is_there(machine: Any) -> None:
    with hc.init_process_group(**GPU):
        dropped, kept, viewed = (hc.empty_symmetric(4) for _ in range(3))
        hc.all_reduce(dropped)  # still in flight when the group is destroyed
        view, address = viewed[1:], dropped.data.ptr
        del dropped, viewed
        assert address in machine.symmetric
    assert address not in machine.symmetric
    assert kept.data.ptr in machine.symmetric
    assert view.data.ptr - 8 in machine.symmetric
    order = [call for call in machine.calls if call in ("deregister_window", "destroy", "free")]
    assert order == ["deregister_window"] * 3 + ["destroy", "free"]


def test_memory_is_kept_where_nccl_has_failed(machine: Any) -> None:
    group = hc.init_process_group(**GPU)
    address = hc.empty_symmetric(4).data.ptr
    group.dispatcher.backends["cuda"].abort()
    hc.destroy_process_group()
    assert address in machine.symmetric


def test_gpus_without_symmetric_memory_have_ordinary_arrays(machine: Any) -> None:
    machine.has_symmetric = False
    with hc.init_process_group(**GPU):
        array = hc.empty_symmetric(2)
        gpus.write(array, np.ones(2))
        hc.all_reduce(array)
        assert_same(gpus.values(array), np.full(2, float(SIZE)))
    assert "deregister_window" not in machine.calls


def test_every_rank_learns_that_one_has_no_memory(machine: Any) -> None:
    from .stand_in import NCCLError

    with hc.init_process_group(**GPU):
        before = set(machine.symmetric)
        if RANK == SIZE - 1:
            machine.failures = [NCCLError("ncclUnhandledCudaError (1): out of memory")]
        text = rf"^empty_symmetric #1 of 'world': rank {SIZE - 1} of the group gets no 32 bytes of NCCL: ncclUnhandled"
        with pytest.raises(hc.DistBackendError, match=text):
            hc.empty_symmetric(4)
        assert machine.symmetric.keys() == before
        assert hc.empty_symmetric(4).size == 4  # the group goes on


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_every_rank_learns_that_the_ranks_want_different_arrays(machine: Any, what: str) -> None:
    if SIZE == 1:
        return
    wanted: Any = {"shape": (4 + RANK // (SIZE - 1), float), "dtype": (4, "f4" if RANK == SIZE - 1 else "f8")}[what]
    before = set(machine.symmetric)
    other = {"shape": r"\(5,\) and dtype float64", "dtype": r"\(4,\) and dtype float32"}[what]
    with hc.init_process_group(**GPU):
        text = (
            rf"^empty_symmetric: rank {SIZE - 1} of the group asks for shape {other}, but rank 0 for \(4,\) and float64"
        )
        with pytest.raises(ValueError, match=text):
            hc.empty_symmetric(*wanted)
        assert machine.symmetric.keys() == before


def test_what_is_refused() -> None:
    with hc.init_process_group(**GPU):
        with pytest.raises(ValueError, match=r"^empty_symmetric: shape is \(2, -1\); a length can't be negative"):
            hc.empty_symmetric((2, -1))
        with pytest.raises(TypeError, match=r"^empty_symmetric: "):
            hc.empty_symmetric(2, object)
        with gpus.captured(), pytest.raises(hc.DistBackendError, match="making symmetric memory can't be replayed"):
            hc.empty_symmetric(2)


@pytest.mark.parametrize("function", ["empty_symmetric", "nccl_handle"])
def test_without_nccl_the_error_says_where_it_is(function: str) -> None:
    with (
        hc.init_process_group("cpu:mpi,cuda:mpi") as group,
        pytest.raises(
            hc.UnsupportedOperationError,
            match=rf"^{function}: backend 'mpi' does not have it, NCCL has: .*'cpu:mpi,cuda:nccl'",
        ),
    ):
        hc.empty_symmetric(2) if function == "empty_symmetric" else group.nccl_handle


# -- the handle --------------------------------------------------------------------------------------


def test_the_handle_is_that_of_the_groups_own_communicator() -> None:
    with hc.init_process_group(**GPU) as group, hc.new_group() as other:
        assert 0 < group.nccl_handle != other.nccl_handle > 0
        if gpus.is_real() or gpus.IS_BINDINGS:  # others ask NCCL
            from hpccomm.nccl import find

            count = ctypes.c_int()
            assert find.load().ncclCommCount(ctypes.c_void_p(group.nccl_handle), ctypes.byref(count)) == 0
            assert count.value == SIZE


def test_there_is_no_handle_before_and_after() -> None:
    with hc.init_process_group() as group:
        with pytest.raises(hc.DistError, match=r"^nccl_handle: the ranks of the group are not connected by NCCL yet"):
            _ = group.nccl_handle
        hc.barrier()
        hc.all_reduce(gpus.array(np.ones(1)))
        assert group.nccl_handle > 0
        group.dispatcher.backends["cuda"].abort()
        with pytest.raises(hc.DistBackendError, match="NCCL reports"):
            _ = group.nccl_handle
    with pytest.raises(hc.DistError, match="has been destroyed"):
        _ = group.nccl_handle
