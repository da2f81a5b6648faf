"""CUDA by CuPy, behind the seam of ``cuda/seam.py``, whose docstrings describe each method."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import math
import platform
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..core.arrays import bits_of_torch
from ..core.sparse import assign_sum
from . import copies, driver
from .copies import KERNELS, THREADS, Copies, Pair, prepared, table_of
from .seam import Kernel

CAPTURE_INVALIDATED = 901  # cudaErrorStreamCaptureInvalidated
UNIQUE = 8  # bytes of a UUID that CuPy must return for it to be unique
INSTALL = "pip install 'hpccomm[cuda13]' (or [cuda12], for an older driver)"

try:
    import cupy
    from cupy.cuda import runtime as cuda
except ImportError as error:
    raise ImportError(f"CuPy, which hpccomm needs for GPU arrays, can't be imported ({error}): {INSTALL}") from error

if int(cupy.__version__.split(".")[0]) < 14:
    raise ImportError(f"hpccomm needs CuPy 14 for GPU arrays, and this is {cupy.__version__}: {INSTALL}")


ERRORS = (  # errors of the runtime, the driver (modules, kernels), NVRTC, and the memory pool
    cuda.CUDARuntimeError,
    cupy.cuda.driver.CUDADriverError,
    cupy.cuda.compiler.CompileException,
    cupy.cuda.memory.OutOfMemoryError,
)


class Runtime:
    """CuPy's functions on raw pointers."""

    def __init__(self) -> None:
        self._additions: dict[tuple[int, Any], int] = {}  # the number of dimensions for which kernels are loaded

    def device_count(self) -> int:
        return int(cuda.getDeviceCount())

    def current_device(self) -> int:
        return int(cuda.getDevice())

    def use_device(self, device: int) -> None:
        cupy.cuda.Device(device).use()

    def identity(self, device: int) -> str:
        # CuPy reads the 16 bytes of the UUID as a C string: it may end at a NUL, or include bytes after the 16th.
        uuid: bytes = cuda.getDeviceProperties(device)["uuid"][:16]
        return uuid.hex() if len(uuid) >= UNIQUE else f"{platform.node()} {cuda.deviceGetPCIBusId(device)}"

    def create_stream(self, device: int) -> int:
        with cupy.cuda.Device(device):
            return int(cuda.streamCreateWithFlags(cuda.streamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        cupy.get_default_memory_pool().free_all_blocks(_stream(stream))  # no other stream can use them
        cuda.streamDestroy(stream)

    def current_stream(self, device: int) -> int:
        return cupy.cuda.get_current_stream(device).ptr  # type: ignore[no-any-return]

    def is_capturing(self, stream: int) -> bool:
        try:
            return bool(cuda.streamIsCapturing(stream))
        except cuda.CUDARuntimeError:
            raise
        except RuntimeError as error:  # CuPy raises it if an earlier error has invalidated the capture
            raise cuda.CUDARuntimeError(CAPTURE_INVALIDATED) from error

    def synchronize_stream(self, stream: int) -> None:
        cuda.streamSynchronize(stream)

    def create_event(self, device: int) -> int:
        with cupy.cuda.Device(device):
            return int(cuda.eventCreateWithFlags(cuda.eventDisableTiming))

    def destroy_event(self, event: int) -> None:
        cuda.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        cuda.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        cuda.streamWaitEvent(stream, event)

    def is_done(self, event: int) -> bool:
        status = driver.event_status(event)
        if status not in (0, driver.NOT_READY):
            raise cuda.CUDARuntimeError(status)
        return status == 0

    def addresses_for_c(self) -> tuple[int, int]:
        return driver.addresses_for_c()

    def functions_for_c(self) -> dict[str, int]:
        try:
            return {**driver.functions_for_c(), "current_stream": _address_of_current_stream()}
        except (OSError, AttributeError, ImportError, KeyError, ValueError):  # of another CuPy, or of AMD's
            return {}

    def copy_kernels(self, device: int) -> list[int]:
        with cupy.cuda.Device(device):
            known, most = _copies(device), copies.IN_A_TABLE[copies.FEW]
            return [known[copies.Kernel(unit, copies.FEW, n)].kernel.ptr for n in most for unit in copies.UNITS]

    def error(self, code: int) -> Exception:
        error: Exception = cuda.CUDARuntimeError(code)  # the driver's numbers are the runtime's
        return error

    def relax_captures(self) -> None:
        if status := driver.relax_captures():
            raise cuda.CUDARuntimeError(status)

    def synchronize_event(self, event: int) -> None:
        cuda.eventSynchronize(event)

    def as_array(self, array: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            bits, dtype = bits_of_torch(array)
            return cupy.from_dlpack(bits) if dtype is None else cupy.from_dlpack(bits).view(dtype)
        if hasattr(array, "__dlpack__"):
            return cupy.from_dlpack(array)
        pointer = array.__cuda_array_interface__["data"][0]
        if not pointer:  # an empty array
            return cupy.asarray(array)
        # cupy.asarray would copy an array that is not on the current GPU, and a result in the copy would be lost.
        with cupy.cuda.Device(cuda.pointerGetAttributes(pointer).device):
            return cupy.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        with cupy.cuda.Device(device), _stream(stream):  # CuPy's memory pool belongs to the stream
            # cupy.empty refuses some dtypes that cupy.ndarray accepts, such as float128 and float8_e4m3fn.
            return cupy.ndarray(shape, dtype, cupy.cuda.alloc(math.prod(shape) * np.dtype(dtype).itemsize))

    def view(self, memory: int, nbytes: int, shape: tuple[int, ...], dtype: Any, device: int, owner: Any) -> Any:
        unowned = cupy.cuda.UnownedMemory(memory, nbytes, owner, device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(unowned, 0))

    def copy(self, target: Any, source: Any, stream: int) -> None:
        if target.nbytes and target.flags.c_contiguous and source.flags.c_contiguous:
            cuda.memcpyAsync(target.data.ptr, source.data.ptr, target.nbytes, cuda.memcpyDefault, stream)
        elif target.shape == source.shape:
            for launch in self.copies([(target, source)]):
                launch(stream)
        elif target.flags.c_contiguous or source.flags.c_contiguous:
            shape = source.shape if target.flags.c_contiguous else target.shape
            self.copy(target.reshape(shape), source.reshape(shape), stream)
        else:
            between = self.empty(source.shape, source.dtype, source.data.device_id, stream)
            self.copy(between, source, stream)
            self.copy(target, between, stream)

    def copies(self, pairs: Iterable[Pair]) -> list[Callable[[int], None]]:
        return [partial(self._copy_many, each) for each in prepared(pairs)]

    def _copy_many(self, each: Copies, stream: int) -> None:
        with cupy.cuda.Device(each.device), _stream(stream):
            _copies(each.device)[each.kernel](each.blocks, (THREADS,), (each.table,))

    def load_copies(self, device: int, stream: int) -> None:
        for kernel in KERNELS:
            self._copy_many(Copies(kernel, device, (1, 1), table_of(kernel, [])), stream)

    def load_additions(self, dtype: Any, dimensions: int, device: int, stream: int) -> None:
        loaded = self._additions.get((device, dtype), 0)
        if loaded >= dimensions:
            return
        self._additions[device, dtype] = dimensions
        with cupy.cuda.Device(device), _stream(stream):
            for ndim in range(loaded + 1, dimensions + 1):
                strided = _strided(ndim, dtype)
                source = strided.copy()
                for target in (strided, strided.copy()):
                    cupy.add(target, source, out=target)

    def add(self, target: Any, source: Any, stream: int) -> None:
        with cupy.cuda.Device(target.data.device_id), _stream(stream):
            cupy.add(target, source, out=target)

    def multiply(self, target: Any, source: Any, factor: Any, stream: int) -> None:
        with cupy.cuda.Device(target.data.device_id), _stream(stream):
            cupy.multiply(source, target.dtype.type(factor), out=target)

    def sum_entries(self, matrix: Any, rows: Any, columns: Any, values: Any, device: int, stream: int) -> None:
        from cupyx.scipy import sparse

        with cupy.cuda.Device(device), _stream(stream) as used:
            assign_sum(matrix, sparse.coo_matrix((values, (rows, columns)), shape=matrix.shape))
            used.synchronize()

    def pinned(self, nbytes: int) -> Any:
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def to_host(self, host: Any, array: Any, stream: int) -> None:
        if array.nbytes:
            cuda.memcpyAsync(host.ctypes.data, array.data.ptr, array.nbytes, cuda.memcpyDeviceToHost, stream)

    def to_device(self, array: Any, host: Any, stream: int) -> None:
        if array.nbytes:
            cuda.memcpyAsync(array.data.ptr, host.ctypes.data, array.nbytes, cuda.memcpyHostToDevice, stream)

    def allocate(self, nbytes: int, device: int) -> int:
        with cupy.cuda.Device(device):
            return int(cuda.malloc(nbytes))

    def free(self, memory: int) -> None:
        cuda.free(memory)

    def ipc_handle(self, memory: int) -> bytes:
        return bytes(cuda.ipcGetMemHandle(memory))

    def open_ipc(self, handle: bytes, device: int) -> int:
        with cupy.cuda.Device(device):
            return int(cuda.ipcOpenMemHandle(handle))

    def close_ipc(self, memory: int) -> None:
        cuda.ipcCloseMemHandle(memory)

    def clear(self, memory: int, nbytes: int, stream: int) -> None:
        cuda.memsetAsync(memory, 0, nbytes, stream)

    def copy_bytes(self, target: int, source: int, nbytes: int, stream: int) -> None:
        cuda.memcpyAsync(target, source, nbytes, cuda.memcpyDeviceToDevice, stream)

    def compile_intra_node(self, ranks: int, rank: int, device: int) -> None:
        with cupy.cuda.Device(device):
            _intra_node(Kernel("one_shot", "float32", ranks, rank))

    def intra_node_kernel(
        self, kernel: Kernel, shape: tuple[int, int], out: int, memory: Any, vectors: int, stream: int
    ) -> None:
        blocks, threads = shape
        with _stream(stream):
            _intra_node(kernel)((blocks,), (threads,), (np.uint64(out), memory, np.uint64(vectors)))

    def explain(self, error: Exception) -> str | None:
        return str(error) if isinstance(error, ERRORS) else None


@functools.cache
def _copies(device: int) -> dict[copies.Kernel, Any]:
    source = importlib.resources.files(__package__).joinpath("copies.cu").read_text()
    names = {kernel: f"copy<{kernel.unit}, {kernel.axes}, {kernel.copies}>" for kernel in copies.KERNELS}
    module = cupy.RawModule(code=source, options=("--std=c++17",), name_expressions=list(names.values()))
    return {kernel: module.get_function(name) for kernel, name in names.items()}


KERNEL_TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}


@functools.cache
def _intra_node(kernel: Kernel) -> Any:
    return _intra_node_module(kernel.ranks, kernel.rank).get_function(_instance(kernel))


@functools.cache
def _intra_node_module(ranks: int, rank: int) -> Any:
    source = importlib.resources.files(__package__).joinpath("intra_node.cu").read_text()
    return cupy.RawModule(code=source, options=("--std=c++17",), name_expressions=instances(ranks, rank))


def instances(ranks: int, rank: int) -> list[str]:
    """Return the C++ names of the kernels that a rank may need."""
    return [_instance(Kernel(name, dtype, ranks, rank)) for name in ("one_shot", "two_shot") for dtype in KERNEL_TYPES]


def _instance(kernel: Kernel) -> str:
    return f"{kernel.name}<{KERNEL_TYPES[kernel.dtype]}, {kernel.ranks}, {kernel.rank}>"


def _address_of_current_stream() -> int:
    """Return the address of CuPy's C function for the current stream of this thread on a GPU."""
    from cupy_backends.cuda import stream

    capsule = stream.__pyx_capi__["get_stream_ptr"]
    pointer = ctypes.pythonapi["PyCapsule_GetPointer"]  # a new object: no other code sets its types
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    return int(pointer(capsule, b"intptr_t (int)"))  # the name of a capsule is its function's type, which is checked


@functools.lru_cache(maxsize=64)
def _stream(stream: int) -> Any:
    """Return CuPy's object for a stream; use it in a ``with`` while the stream's GPU is current."""
    return cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, stream)))


def _strided(dimensions: int, dtype: Any) -> Any:
    """Return an array of length 2 along each axis whose axes CuPy can't join; its elements share memory."""
    memory = cupy.zeros(2 * dimensions + 1, dtype)
    return cupy.lib.stride_tricks.as_strided(memory, (2,) * dimensions, (2 * memory.itemsize,) * dimensions)
