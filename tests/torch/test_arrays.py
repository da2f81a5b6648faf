"""Tensors as arrays on the same memory, by the compiled extension and by DLPack, and how many functions that takes."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpccomm.core import progress
from hpccomm.core.work import CompletedWork
from hpccomm.native import fastpath
from hpccomm.torch import arrays
from hpccomm.torch.backend import op_of
from hpccomm.torch.work import PendingWork

from .. import dlpack

pytestmark = pytest.mark.serial

needs_extension = pytest.mark.skipif(fastpath is None, reason="without the compiled extension")
by_room_and_by_dlpack = pytest.mark.parametrize(
    "name", [pytest.param("view_of", marks=needs_extension), "view_by_dlpack"]
)

DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32"]
DTYPES += ["float64", "complex64", "complex128"]


def table() -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4)


LAYOUTS = {
    "in C order": table(),
    "transposed": table().transpose(0, 2),
    "a part": table()[:, 1:, ::2],
    "of one element": table()[1, 2, 3],
    "of one row": table()[:1, :, :],
    "repeated": torch.ones(3).expand(2, 3),
    "not at the beginning of its storage": table()[1],
    "without dimensions": torch.tensor(2.0),
}

NO_ARRAYS = {
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "float8": torch.ones(2).to(torch.float8_e5m2),
    "sparse": torch.ones(2).to_sparse(),
    "to be conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    "to be negated": torch.ones(2, dtype=torch.complex64).conj().imag,
    "of no memory": torch.ones(2, device="meta"),
    "no tensor": np.ones(2),
}


def place(tensor: Any) -> tuple[Any, ...]:
    """Return the address at which NumPy sees a tensor, by torch's own conversion."""
    array = tensor.detach().numpy()
    return array.ctypes.data, array.dtype, array.shape, array.strides


@by_room_and_by_dlpack
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_is_the_tensors_memory(name: str, layout: str) -> None:
    tensor = LAYOUTS[layout]
    view = getattr(arrays, name)(tensor)
    assert (view.ctypes.data, view.dtype, view.shape, view.strides) == place(tensor)
    assert view.flags.writeable
    flat = getattr(arrays, name)(tensor, True)
    expected = (tensor.numel(),) if tensor.is_contiguous() else tuple(tensor.shape)
    assert (flat.ctypes.data, flat.shape) == (tensor.data_ptr(), expected)
    assert flat.ravel().tolist() == tensor.reshape(-1).tolist()


@by_room_and_by_dlpack
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_has_the_tensors_dtype(name: str, dtype: str) -> None:
    tensor = torch.tensor([0, 1, 1]).to(getattr(torch, dtype))
    view = getattr(arrays, name)(tensor)
    assert view.dtype == dtype
    view[:2] = [1, 0]
    assert tensor.tolist() == [1, 0, 1]


@by_room_and_by_dlpack
@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_what_is_left_to_hpccomm(name: str, kind: str) -> None:
    if kind == "no tensor" and name == "view_by_dlpack":
        pytest.skip("DLPack is asked of tensors only")
    assert getattr(arrays, name)(NO_ARRAYS[kind]) is None
    assert arrays.as_array(NO_ARRAYS[kind]) is NO_ARRAYS[kind]


@needs_extension
def test_a_view_keeps_the_storage() -> None:
    tensor = torch.ones(3)
    storage, view = tensor.untyped_storage().data_ptr(), arrays.view_of(tensor)
    tensor.data = torch.zeros(3)
    del tensor
    assert view.base.data_ptr() == view.ctypes.data == storage


@needs_extension
def test_pytorchs_functions_are_as_the_extension_expects() -> None:
    functions, tensor = dlpack.functions_of(torch.Tensor), table()[1]
    seen, stream = dlpack.Tensor(), ctypes.c_void_p(1)
    assert functions.look_at(tensor, seen) == 0
    assert (seen.device_type, seen.ndim, seen.shape[:2], seen.strides[:2]) == (1, 2, [3, 4], [4, 1])
    assert (seen.code, seen.bits, seen.lanes, seen.data + seen.byte_offset) == (2, 32, 1, tensor.data_ptr())
    assert functions.current_stream(1, 0, stream) == 0
    assert not stream.value  # the host has none


@needs_extension
def test_parameters_are_seen_without_their_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert arrays.view_of(parameter).ctypes.data == parameter.data_ptr()


def test_every_reduction_has_its_name() -> None:
    for name, op in dist.ReduceOp.RedOpType.__members__.items():
        if name == "PREMUL_SUM":
            continue
        opts = torch._C._distributed_c10d.AllreduceOptions()
        opts.reduceOp = op
        assert getattr(op_of(opts), "name", op_of(opts)) == name


@needs_extension
@pytest.mark.parametrize(
    ("what", "most"),  # the compiled extension starts a non-blocking all_reduce; the others are started in Python
    [("all_reduce", 6), ("broadcast", 36), ("all_gather_into_tensor", 36), ("reduce_scatter_tensor", 36)],
)
def test_a_small_operation_enters_few_functions(what: str, most: int) -> None:
    tensor, output = torch.ones(dist.get_world_size()), torch.ones(dist.get_world_size())
    call = getattr(dist, what)
    arguments = (output, tensor) if what.endswith("tensor") else (tensor, 0) if what == "broadcast" else (tensor,)
    call(*arguments)
    entered: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "distributed_c10d" not in frame.f_code.co_filename:
            entered.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    gc.disable()
    sys.setprofile(note)
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
        gc.enable()
    ours = [each for each in entered if each.startswith(("hpccomm.", "torch.utils", "torch._tensor", "numpy"))]
    assert 0 < len(ours) <= most, entered


def test_the_future_of_what_has_ended_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    driven: list[Any] = []
    monkeypatch.setattr(progress, "drive", driven.append)
    future = PendingWork(CompletedWork(), [1]).get_future()
    assert future.done()
    assert future.wait() == [1]
    assert not driven
