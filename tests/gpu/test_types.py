"""The dtypes and reductions that NCCL has, and the errors for the others."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.nccl import types

from ..arrays import ALL_DTYPES, assert_same, dtype_name
from . import gpus

pytestmark = pytest.mark.usefixtures("process_group")

# nccl.h, ncclDataType_t
NUMBERS = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_moves_with_all_its_bytes(dtype: np.dtype[Any]) -> None:
    number, width = types.moved(dtype)
    name = next(name for name, value in NUMBERS.items() if value == number)
    itemsize = 2 if name == "bfloat16" else np.dtype(name).itemsize
    assert itemsize * width == dtype.itemsize
    if dtype.name in NUMBERS:
        assert name == dtype.name


def test_complex_is_two_numbers_and_bool_a_byte() -> None:
    assert types.reduced("", np.dtype(np.complex64), hc.ReduceOp.AVG) == (7, 2, 4)
    assert types.reduced("", np.dtype(np.complex128), hc.ReduceOp.SUM) == (8, 2, 0)
    for op, nccl_op in (("SUM", 2), ("PRODUCT", 3), ("MIN", 3), ("MAX", 2), ("BAND", 3), ("BOR", 2)):
        assert types.reduced("", np.dtype(bool), getattr(hc.ReduceOp, op)) == (1, 1, nccl_op)


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_some_dtypes_move_and_do_not_reduce(process_group: hc.ProcessGroup, dtype: Any) -> None:
    given = np.arange(4).astype(dtype)
    array = gpus.array(given)
    for operation in (
        lambda: hc.all_reduce(array),
        lambda: hc.reduce(array, 0),
        lambda: hc.all_reduce_coalesced([array]),
        lambda: hc.reduce_scatter_single(array, gpus.array(np.zeros(4 * process_group.size, dtype))),
        lambda: hc.reduce_scatter(array, [array] * process_group.size),
    ):
        with pytest.raises(TypeError, match=f"{np.dtype(dtype).name}.* convert to"):
            operation()
    assert_same(gpus.values(array), given)
    hc.broadcast(array, 0)
    assert_same(gpus.values(array), given)


@pytest.mark.once
@pytest.mark.parametrize(("dtype", "end"), [(ml_dtypes.float8_e4m3fn, 16), (ml_dtypes.float8_e5m2, 8)])
def test_eight_bits_are_not_reduced_because_a_sum_of_ones_would_end_early(dtype: Any, end: int) -> None:
    """NCCL can, from 2.24 and sm_90 on: it rounds to 8 bits after each addition (its src/device/reduce_kernel.h)."""
    total = dtype(0)
    for _ in range(64):  # ranks
        total = dtype(np.float16(total) + np.float16(1))
    assert total == end
    for op in (hc.ReduceOp.SUM, hc.ReduceOp.AVG, hc.ReduceOp.PREMUL_SUM(2.0)):
        with pytest.raises(TypeError, match="a format to store and to send, so convert to float16 or float32"):
            hc.all_reduce(gpus.array(np.ones(2, dtype)), op)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (np.int32, "band"),
        (np.int64, "bor"),
        (np.uint8, "bxor"),
        (bool, "bxor"),
        (np.complex64, "product"),
        (np.float32, MPI.Op.Create(lambda *_: None, True)),
    ],
)
def test_reductions_that_nccl_has_not(dtype: Any, op: Any) -> None:
    with pytest.raises(hc.UnsupportedOperationError, match=r"all_reduce: NCCL has no ReduceOp.* MPI has"):
        hc.all_reduce(gpus.array(np.ones(2, dtype)), op)


@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_operations_that_nccl_has_not(name: str) -> None:
    with pytest.raises(hc.UnsupportedOperationError, match=rf"{name}: NCCL does not have it; MPI has.*cuda:mpi"):
        getattr(hc, name)(gpus.array(np.ones(2)))


def test_refusals_of_the_core_hold_for_gpu_arrays(process_group: hc.ProcessGroup) -> None:
    with pytest.raises(TypeError, match="AVG is not defined for array's dtype int32"):
        hc.all_reduce(gpus.array(np.ones(2, np.int32)), "avg")
    with pytest.raises(ValueError, match="output and input are on cuda and cpu; one call, one device"):
        hc.all_gather_single(gpus.array(np.ones(process_group.size)), np.ones(1))
    with pytest.raises(ValueError, match="output has 3 elements"):
        hc.all_gather_single(gpus.array(np.ones(3)), gpus.array(np.ones(process_group.size + 3)))


@pytest.mark.parametrize("backend", ["cuda:nccl", "cpu:mpi,cuda:mpi"])
def test_arrays_that_cupy_can_not_view(backend: str) -> None:
    class Tensor:
        dtype, nbytes, size, shape = object(), 4, 4, (4,)
        __cuda_array_interface__ = {"data": (0, False), "typestr": "<f1", "shape": (4,), "version": 3}

    group = hc.new_group(backend=backend)
    with pytest.raises(TypeError, match=r"CuPy can't view a Tensor of dtype .* without a copy \(.+\); view it as"):
        hc.broadcast(Tensor(), 0, group=group)
    with pytest.raises(TypeError, match="is no dtype of NumPy's or CuPy's"):
        hc.all_reduce(Tensor(), group=group)
    group.destroy()
