"""cuda/cupy_runtime.py on CuPy itself, as far as that goes without a driver."""

from __future__ import annotations

import types
import warnings
from typing import Any

import cupy
import numpy as np
import pytest

from hpccomm.cuda import cupy_runtime
from hpccomm.cuda.packing import joined_dimensions

pytestmark = pytest.mark.once


@pytest.fixture
def runtime() -> cupy_runtime.Runtime:
    return cupy_runtime.Runtime()


def test_a_stream_of_somebody_else_is_taken_without_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="from_external"):  # CuPy's older way
        cupy.cuda.ExternalStream(1, 0)
    stream = cupy_runtime._stream(0x1234)
    assert stream.ptr == 0x1234
    assert stream.device_id == -1  # the current one
    assert cupy_runtime._stream(0x1234) is stream


UUID = bytes(range(1, 17))


@pytest.mark.parametrize(
    ("uuid", "identity"),
    [
        (UUID, UUID.hex()),
        (UUID + b"more", UUID.hex()),  # CuPy has read on to the next NUL
        (UUID[:9], UUID[:9].hex()),  # or has found one within
        (UUID[:2], "here 0000:07:00.0"),
        (b"", "here 0000:07:00.0"),
    ],
)
def test_a_gpu_is_known_by_its_uuid_or_its_place(
    runtime: cupy_runtime.Runtime, uuid: bytes, identity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.SimpleNamespace(
        getDeviceProperties=lambda device: {"uuid": uuid}, deviceGetPCIBusId=lambda device: "0000:07:00.0"
    )
    monkeypatch.setattr(cupy_runtime, "cuda", fake)
    monkeypatch.setattr("platform.node", lambda: "here")
    assert runtime.identity(0) == identity


@pytest.mark.parametrize("dimensions", [1, 2, 5, 17])
def test_kernels_of_any_dimensions_are_loaded_with_little_memory(
    monkeypatch: pytest.MonkeyPatch, dimensions: int
) -> None:
    monkeypatch.setattr(cupy_runtime, "cupy", np)
    array = cupy_runtime._strided(dimensions, "c16")
    assert array.ndim == joined_dimensions(array) == dimensions
    assert not array.flags.c_contiguous
    low, high = np.lib.array_utils.byte_bounds(array)
    assert high - low < 1000
    assert not array.any()


@pytest.mark.parametrize(
    ("array", "dimensions"),
    [
        (np.zeros(()), 1),
        (np.zeros((2, 3, 4)), 1),
        (np.zeros((2, 1, 3, 8))[..., ::2], 1),
        (np.zeros((2, 3, 4, 5, 6))[:, :2], 2),
        (np.zeros((2,) * 12)[:, ::-1], 3),
        (np.zeros((2,) * 12).T, 12),
        (np.zeros((1, 2, 1, 3, 1)).T, 2),
    ],
)
def test_dimensions_are_joined_as_in_cupys_kernels(array: Any, dimensions: int) -> None:
    assert joined_dimensions(array) == dimensions


class TestForeignArrays:
    """An array on GPU 2, of another library, while GPU 0 is the current one."""

    @pytest.fixture
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        seen: list[str] = []
        current = [0]

        class Device:
            def __init__(self, device: int) -> None:
                self.device = device

            def __enter__(self) -> None:
                self.before, current[0] = current[0], self.device

            def __exit__(self, *_: object) -> None:
                current[0] = self.before

        fake = types.SimpleNamespace(
            cuda=types.SimpleNamespace(Device=Device),
            asarray=lambda array: seen.append(f"asarray on {current[0]}"),
            from_dlpack=lambda array: seen.append("from_dlpack"),
        )
        monkeypatch.setattr(cupy_runtime, "cupy", fake)
        pointers = types.SimpleNamespace(pointerGetAttributes=lambda pointer: types.SimpleNamespace(device=2))
        monkeypatch.setattr(cupy_runtime, "cuda", pointers)
        return seen

    def test_dlpack_comes_first_because_it_never_copies(self, runtime: cupy_runtime.Runtime, seen: list[str]) -> None:
        class Both:
            __cuda_array_interface__ = {"data": (1, False)}

            def __dlpack__(self) -> None: ...

        runtime.as_array(Both())
        assert seen == ["from_dlpack"]

    @pytest.mark.parametrize(("pointer", "expected"), [(4096, "asarray on 2"), (0, "asarray on 0")])
    def test_without_dlpack_its_gpu_is_the_current_one(
        self, runtime: cupy_runtime.Runtime, seen: list[str], pointer: int, expected: str
    ) -> None:
        runtime.as_array(types.SimpleNamespace(__cuda_array_interface__={"data": (pointer, False)}))
        assert seen == [expected]


@pytest.mark.parametrize(
    "error",
    [
        cupy.cuda.runtime.CUDARuntimeError(2),
        cupy.cuda.compiler.CompileException("no such function", "source", "name", ()),
        cupy.cuda.memory.OutOfMemoryError(1, 2, 3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_cuda_are_known_as_such(runtime: cupy_runtime.Runtime, error: Exception) -> None:
    assert runtime.explain(error)


def test_an_invalidated_capture_is_an_error_of_cuda_too(
    runtime: cupy_runtime.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(stream: int) -> bool:
        raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")

    kind = cupy.cuda.runtime.CUDARuntimeError
    monkeypatch.setattr(cupy_runtime, "cuda", types.SimpleNamespace(streamIsCapturing=raises, CUDARuntimeError=kind))
    with pytest.raises(kind, match="cudaErrorStreamCaptureInvalidated") as caught:
        runtime.is_capturing(1)
    assert runtime.explain(caught.value)


def test_the_drivers_errors_are_too(runtime: cupy_runtime.Runtime) -> None:
    assert cupy.cuda.driver.CUDADriverError in cupy_runtime.ERRORS
    assert runtime.explain(KeyError("mine")) is None
    assert runtime.explain(ValueError()) is None


def test_every_call_fits_cupys_signatures(seam_calls: list[tuple[str, int, Any]]) -> None:
    """By the signatures in the first lines of CuPy's docstrings: counts of arguments, and names that are missing."""
    assert len(seam_calls) > 20
    for name, given, function in seam_calls:
        assert function is not None, f"CuPy has no {name}"
        first = (function.__doc__ or "").strip().splitlines()[0]
        inside = first[first.index("(") + 1 : first.rindex(")")]
        parameters = [part.strip() for part in inside.split(",") if part.strip() not in ("", "self")]
        required = [part for part in parameters if "=" not in part]
        assert len(required) <= given <= len(parameters), f"{name}({inside}) is called with {given} arguments"


@pytest.fixture
def seam_calls() -> list[tuple[str, int, Any]]:
    """The calls of cupy.cuda.runtime, and of cupy.cuda.nccl where there is a libnccl: name, arguments, function."""
    import ast
    import inspect
    from pathlib import Path

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, of a missing libnccl
        from cupy.cuda import nccl
    modules = [("cuda/cupy_runtime.py", "cuda", cupy.cuda.runtime)]
    if nccl.available:
        modules.append(("nccl/cupy_nccl.py", "nccl", nccl))
    folder = Path(inspect.getfile(cupy_runtime)).parent.parent
    calls = []
    for path, prefix, module in modules:
        for node in ast.walk(ast.parse((folder / path).read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == prefix
                and not node.func.attr[0].isupper()  # exceptions and classes
            ):
                calls.append((node.func.attr, len(node.args), getattr(module, node.func.attr, None)))
    return calls
