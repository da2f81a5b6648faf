"""What counts as an array, and where it lives."""

from __future__ import annotations

import array as stdlib_array
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc

pytestmark = pytest.mark.usefixtures("process_group")


class OnlyDLPack:
    """An array of a library that hpccomm does not know."""

    def __init__(self, memory: Any, device: int = 1) -> None:
        self.memory, self.device = memory, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class OnlyCUDA:
    __cuda_array_interface__: dict[str, Any] = {}
    dtype, size, shape = np.dtype(float), 1, (1,)


HOST: dict[str, Callable[[], Any]] = {
    "array.array": lambda: stdlib_array.array("d", [1.0, 2.0]),
    "memoryview": lambda: memoryview(stdlib_array.array("d", [1.0, 2.0])),
    "bytearray": lambda: bytearray(np.array([1.0, 2.0]).tobytes()),
    "ctypes": lambda: (ctypes.c_double * 2)(1.0, 2.0),
    "DLPack": lambda: OnlyDLPack(np.array([1.0, 2.0])),
    "matrix": lambda: np.array([[1.0, 2.0]]).view(Subclass),
}


class Subclass(np.ndarray):
    pass


def content(thing: Any) -> list[float]:
    memory = thing.memory if isinstance(thing, OnlyDLPack) else thing
    return np.frombuffer(bytes(memoryview(np.ascontiguousarray(memory)).cast("B"))).tolist()


@pytest.mark.parametrize("kind", HOST)
def test_host_arrays_of_other_kinds(process_group: hc.ProcessGroup, kind: str) -> None:
    thing = HOST[kind]()
    assert hc.device_of(thing) == "cpu"
    if kind != "bytearray":  # whose items are bytes
        hc.all_reduce(thing)
        assert content(thing) == [process_group.size, 2.0 * process_group.size]
        hc.all_reduce(thing, "max")
    work = hc.broadcast(thing, 0, async_op=True)
    assert work.result() is thing
    received = HOST[kind]()
    hc.sendrecv(thing, process_group.rank, received, process_group.rank)
    assert content(received) == content(thing)


def test_a_memory_map(process_group: hc.ProcessGroup) -> None:
    memory = mmap.mmap(-1, 16)
    memory[:] = bytes([process_group.rank] * 16)
    hc.broadcast(memory, process_group.size - 1)
    assert memory[:] == bytes([process_group.size - 1] * 16)


@pytest.mark.parametrize(
    ("device", "name"), [(1, "cpu"), (2, "cuda"), (3, "cpu"), (10, "rocm"), (11, "cpu"), (13, "cuda")]
)
def test_dlpack_devices(device: int, name: str) -> None:
    assert hc.device_of(OnlyDLPack(np.zeros(2), device)) == name


def test_devices_without_dlpack() -> None:
    assert hc.device_of(OnlyCUDA()) == "cuda"
    assert hc.device_of(np.zeros(1)) == "cpu"
    assert hc.device_of(b"1") == "cpu"
    with pytest.raises(TypeError, match="array is an OnlyDLPack; expected a NumPy or CuPy array"):
        hc.device_of(OnlyDLPack(np.zeros(2), 99))  # a device that hpccomm does not know


def test_a_read_only_gpu_array_is_not_written() -> None:
    array = OnlyCUDA()
    array.__cuda_array_interface__ = {"data": (0, True)}
    with pytest.raises(ValueError, match="all_reduce: array is read-only, and the result would be written to it"):
        hc.all_reduce(array)


def test_a_gpu_array_without_a_gpu_backend_says_so() -> None:
    if hc.is_nccl_available():
        pytest.skip("the NCCL backend is available here")
    with pytest.raises(hc.DistBackendError, match="the 'nccl' backend, which serves cuda arrays, can't be loaded"):
        hc.all_reduce(OnlyCUDA())


def test_torch_tensors(process_group: hc.ProcessGroup) -> None:
    torch = pytest.importorskip("torch")
    n = process_group.size
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16, torch.bool):
        tensor = torch.ones((2, 3), dtype=dtype)
        hc.all_reduce(tensor)
        assert tensor.tolist() == (torch.ones((2, 3)) * (1 if dtype == torch.bool else n)).to(dtype).tolist()
    weights = torch.ones(4, requires_grad=True)
    hc.all_reduce(weights)
    assert weights.tolist() == [n] * 4
    strided = torch.arange(6.0).reshape(2, 3).T
    gathered = torch.empty(n, 3, 2)
    hc.all_gather_single(gathered, strided)
    assert torch.equal(gathered, strided.expand(n, 3, 2))
    work = hc.all_reduce(tensor, "max", async_op=True)
    assert work.result() is tensor


def test_bfloat16_tensors_are_seen_as_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    from hpccomm.core.arrays import locate

    device, view = locate("test", "array", torch.ones(2, dtype=torch.bfloat16))
    assert (device, view.dtype) == ("cpu", np.dtype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_torch_tensor_can_be_resized_afterwards(dtype: str) -> None:
    if int(np.__version__.partition(".")[0]) < 2:
        pytest.skip("NumPy 1 views DLPack for reading only")
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, dtype=getattr(torch, dtype))
    hc.all_reduce(tensor)
    tensor.untyped_storage().resize_(64)
    assert tensor.untyped_storage().nbytes() == 64


def test_a_torch_tensor_whose_sign_is_turned_lazily_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="resolve_neg"):
        hc.all_reduce(torch.ones(2, dtype=torch.complex64).conj().imag)


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r"array is a Tensor .* bfloat16 needs ml_dtypes: pip install ml_dtypes"):
        hc.all_reduce(torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("where", ["__dlpack_device__", "__dlpack__"])
def test_an_array_that_numpy_can_not_view_is_named(where: str) -> None:
    """As torch's conjugate, sparse, quantised and meta tensors."""

    class Tensor:
        def __dlpack_device__(self) -> tuple[int, int]:
            if where == "__dlpack_device__":
                raise BufferError("no device\nand a second line")
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("no view\nand a second line")

    said = (
        r"all_reduce: array is a Tensor that NumPy can't view without a copy: no (device|view); make a contiguous array"
    )
    with pytest.raises(TypeError, match=said):
        hc.all_reduce(Tensor(), group=hc.ProcessGroup(0, 1))
