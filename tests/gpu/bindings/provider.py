"""hpccomm's provider of CUDA and NCCL (cuda/cupy_runtime.py, nccl/*_nccl.py) where there is no GPU.

NCCL: CuPy's own compiled bindings, or nccl4py's, or ctypes, over a fake libnccl that hands its calls to the stand-in.
CUDA: functions with the names of cupy.cuda.runtime's in their place, which check each call against the signature that
CuPy's docstring gives, and that a stream is a stream and an event an event. Not run: CuPy's own kernels (copies of
strided arrays, multiplications, sums of sparse matrices, the kernels of intra_node.cu) and its memory pools; the
stand-in does that.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from . import library

LIBRARY = library.load()  # before CuPy is imported

import cupy  # noqa: E402
import numpy as np  # noqa: E402
from cupy.cuda import runtime as real  # noqa: E402

from hpccomm.cuda import copies, cupy_runtime, driver  # noqa: E402
from hpccomm.cuda.seam import Kernel  # noqa: E402
from hpccomm.nccl import libnccl  # noqa: E402

from .. import gpus, stand_in, stand_in_calls, stand_in_nccl  # noqa: E402
from ..stand_in import MACHINE  # noqa: E402

# -- NCCL --------------------------------------------------------------------------------------------

BELOW = stand_in.NCCL()
COMMUNICATORS: dict[int, stand_in.Communicator] = {}
HANDLES = itertools.count(0x1000, 16)
METHODS = {name: method for name, (method, _) in stand_in_calls.NCCL.items()}
IN_PROGRESS = libnccl.IN_PROGRESS
RAISED: list[stand_in.NCCLError] = []  # the stand-in's errors: CuPy's exception has only a number


def handle_of(comm: stand_in.Communicator) -> int:
    number = next(HANDLES)
    COMMUNICATORS[number] = comm
    return number


def put(address: int, value: int) -> None:
    """Write a pointer where C wants it."""
    ctypes.c_void_p.from_address(address).value = value


def called(name: str, arguments: list[int]) -> int:
    """Do the work of a function of libnccl; return its result code."""
    comm: stand_in.Communicator | None
    if name.endswith("Config") and name != "ncclCommInitRankConfig":
        *arguments, config = arguments
        name = name.removesuffix("Config")
        MACHINE.calls.append(f"configured {settings_of(config)}")
    if name in METHODS:
        *given, handle, stream = arguments
        comm = COMMUNICATORS[handle]
        getattr(comm, METHODS[name])(*given, stream)
    else:
        comm = getattr(Library, name)(*arguments)
    return IN_PROGRESS if comm is not None and comm.is_in_progress() else 0


def blocks(config: int) -> bool:
    """Return True if an ncclConfig_t asks for a communicator that blocks."""
    if config == 0:
        return True
    read = libnccl.Config.from_address(config)
    assert (read.size, read.magic) == (ctypes.sizeof(libnccl.Config), 0xCAFEBEEF)
    return bool(read.blocking != 0)


def settings_of(config: int) -> dict[str, Any]:
    """Return the fields that are set in an ncclCollConfig_t."""
    read, unset = libnccl.CollConfig.from_address(config), libnccl.CollConfig()
    assert (read.size, read.magic, read.version, read.ext) == (64, 0xCAFEBEEF, 23100, None)
    names = [name for name, _ in libnccl.CollConfig._fields_[4:]]
    return {name: getattr(read, name) for name in names if getattr(read, name) != getattr(unset, name)}


class Library:
    """The functions of libnccl that are not operations; each returns the communicator that may be in progress."""

    @staticmethod
    def ncclGetVersion(version: int) -> None:
        ctypes.c_int.from_address(version).value = MACHINE.version

    @staticmethod
    def ncclGetUniqueId(id_: int) -> None:
        ctypes.memmove(id_, BELOW.unique_id().encode().ljust(128, b"\0"), 128)

    @staticmethod
    def ncclCommInitRankConfig(comm: int, size: int, id_: int, rank: int, config: int) -> stand_in.Communicator:
        stand_in.fail()
        MACHINE.calls.append("connect" if blocks(config) else "connect, not blocking")
        made = stand_in.Communicator(blocks(config))
        put(comm, handle_of(made))
        made.begin(made.find_together(size, ctypes.string_at(id_, 128).rstrip(b"\0").decode(), rank))
        return made

    ncclCommInitRank = ncclCommInitRankConfig

    @staticmethod
    def ncclCommSplit(comm: int, color: int, key: int, result: int, config: int) -> None:
        """Answer ncclSuccess also while the parent is in progress, as NCCL does (src/init.cc, 2.30.7)."""
        parent, made = COMMUNICATORS[comm], stand_in.Communicator(blocks(config))

        def job() -> stand_in.Job:
            yield from parent.halve(color, key, made)
            put(result, 0 if color < 0 else handle_of(made))

        put(result, 0)
        parent.begin(job())

    @staticmethod
    def ncclCommCount(comm: int, count: int) -> None:
        ctypes.c_int.from_address(count).value = COMMUNICATORS[comm].comm.Get_size()

    @staticmethod
    def ncclMemAlloc(memory: int, nbytes: int) -> None:
        put(memory, BELOW.allocate(nbytes))

    @staticmethod
    def ncclMemFree(memory: int) -> None:
        BELOW.free(memory)

    @staticmethod
    def ncclCommWindowRegister(comm: int, memory: int, nbytes: int, window: int, flags: int) -> None:
        """Answer ncclSuccess also while the communicator is in progress, as NCCL does (src/dev_runtime.cc, 2.30.7)."""
        assert flags == libnccl.SYMMETRIC
        registers = COMMUNICATORS[comm]

        def job() -> stand_in.Job:
            made: list[int] = []
            yield from registers.register(memory, nbytes, made)
            put(window, made[0])

        put(window, 0)
        registers.begin(job())

    @staticmethod
    def ncclCommWindowDeregister(comm: int, window: int) -> None:
        COMMUNICATORS[comm].deregister_window(window)

    @staticmethod
    def ncclCommFinalize(comm: int) -> stand_in.Communicator:
        finalized = COMMUNICATORS[comm]
        finalized.begin(finalized.finalize())
        finalized.is_finalized = True
        return finalized

    @staticmethod
    def ncclCommDestroy(comm: int) -> None:
        MACHINE.calls.append("destroy")
        destroyed = COMMUNICATORS.pop(comm)
        assert destroyed.is_finalized, "destroyed without having been finalised"
        assert not destroyed.is_in_progress(), "destroyed while it is being finalised"
        destroyed.free()

    @staticmethod
    def ncclCommAbort(comm: int) -> None:
        COMMUNICATORS.pop(comm).abort()

    @staticmethod
    def ncclCommGetAsyncError(comm: int, error: int) -> None:
        assert comm in COMMUNICATORS, "asked after its end"
        told = COMMUNICATORS[comm].async_error()
        in_progress = COMMUNICATORS[comm].is_in_progress()
        ctypes.c_int.from_address(error).value = number_in(told) if told is not None else IN_PROGRESS * in_progress
        if told is not None:
            RAISED.append(stand_in.NCCLError(told))

    @staticmethod
    def ncclGroupStart(_: int) -> None:
        stand_in.group_start()

    @staticmethod
    def ncclGroupEnd(_: int) -> stand_in.Communicator | None:
        return stand_in.group_end()


def number_in(text: str) -> int:
    """Return the result code of "ncclRemoteError (6): ..."."""
    return int(text.partition("(")[2].partition(")")[0] or library.INTERNAL_ERROR)


def code_of(error: BaseException) -> int:
    if isinstance(error, stand_in.NCCLError):
        RAISED.append(error)
        return number_in(str(error))
    traceback.print_exception(error)  # of the test: a failed assertion
    return library.INTERNAL_ERROR


library.set_hook(LIBRARY, called, code_of)


def chosen() -> type[libnccl.NCCL]:
    """Return hpccomm's own half of the provider that GPU_TESTS_ON names."""
    if gpus.NCCL_BY == "ctypes":
        hide_cupys_module()
    modules = {"bindings": "cupy_nccl", "nccl4py": "nccl4py_nccl", "ctypes": "libnccl"}
    found: type[libnccl.NCCL] = importlib.import_module(f"hpccomm.nccl.{modules[gpus.NCCL_BY]}").NCCL
    return found


def hide_cupys_module() -> None:
    """Let there be no ``cupy.cuda.nccl``."""
    vars(cupy.cuda).pop("nccl", None)
    for name in ("cupy.cuda.nccl", "cupy_backends.cuda.libs.nccl"):
        sys.modules[name] = None  # type: ignore[assignment]


class NCCL(chosen()):  # type: ignore[misc]
    """The same, with properties of the library that a test may set."""

    def __init__(self) -> None:
        super().__init__()
        assert self.library.last_error() == "the hook has raised"
        # The stand-in's message, without the code that CuPy's exception has.
        self.library.last_error = lambda: str(RAISED[-1]).partition("): ")[2] if RAISED else ""  # type: ignore[method-assign]

    @property
    def has_all_to_all(self) -> bool:
        return MACHINE.has_all_to_all

    @has_all_to_all.setter
    def has_all_to_all(self, is_there: bool) -> None:
        assert is_there, "the fake library has ncclAlltoAll"

    def functions_for_c(self) -> dict[str, int]:
        return stand_in_nccl.of_this_version(super().functions_for_c())


# -- CUDA --------------------------------------------------------------------------------------------

CUDA = stand_in.Runtime()
HOST_ARRAYS: dict[int, Any] = {}  # the arrays of copies, by the address that memcpyAsync gets
NAMES = ("stream", "event")


def parameters_of(function: Any) -> list[str]:
    """Return the parameters in the first line of a docstring of CuPy's: ``memcpyAsync(intptr_t dst, ...)``."""
    first = function.__doc__.strip().splitlines()[0]
    inside = first[first.index("(") + 1 : first.rindex(")")]
    return [part.strip() for part in inside.split(",") if part.strip()]


class Functions:
    """In place of cupy.cuda.runtime."""

    def __getattr__(self, name: str) -> Any:
        original = getattr(real, name)
        if isinstance(original, type) or not callable(original):
            return original  # an exception, a number
        function, parameters = getattr(Below, name), parameters_of(original)
        required = [each for each in parameters if "=" not in each]

        def checked(*arguments: Any) -> Any:
            assert len(required) <= len(arguments) <= len(parameters), f"{name}({', '.join(parameters)}): {arguments}"
            for parameter, argument in zip(parameters, arguments, strict=False):
                check(name, parameter, argument)
            return function(*arguments)

        setattr(self, name, checked)
        return checked


def check(name: str, parameter: str, argument: Any) -> None:
    """Fail where an argument is not of the type that C wants, or not that kind of handle."""
    kind, _, word = parameter.partition("=")[0].rpartition(" ")
    if kind == "bytes":
        assert type(argument) is bytes, f"{name}: {parameter} is {argument!r}"
        return
    number = argument.__index__()
    assert number >= 0 or kind not in ("size_t", "unsigned int", "unsigned"), f"{name}: {parameter} is {number}"
    known = {"stream": MACHINE.streams, "event": MACHINE.events}.get(word)
    assert known is None or number in known, f"{name}: {parameter} is {number}, which is none"


@contextlib.contextmanager
def as_cupys(code: int) -> Iterator[None]:
    """Raise CuPy's exception where the stand-in raises its own."""
    try:
        yield
    except stand_in.CUDAError as error:
        raised = real.CUDARuntimeError(code)
        raised.args = error.args
        raise raised from error


def stand_ins(name: str) -> Any:
    """Return a function that calls the stand-in's method of that name, as it is then: tests replace them."""
    return staticmethod(lambda *arguments: getattr(CUDA, name)(*arguments))


class Driver:
    """In place of cuda/driver.py."""

    NOT_READY = driver.NOT_READY

    @staticmethod
    def event_status(event: int) -> int:
        check("cuEventQuery", "intptr_t event", event)
        with as_cupys(700):
            return 0 if CUDA.is_done(event) else driver.NOT_READY

    @staticmethod
    def addresses_for_c() -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def relax_captures() -> int:
        CUDA.relax_captures()
        return 0


class Below:
    """The functions of cupy.cuda.runtime, on the stand-in's machine."""

    getDeviceCount = stand_ins("device_count")
    getDevice = stand_ins("current_device")
    streamDestroy = stand_ins("destroy_stream")
    streamIsCapturing = stand_ins("is_capturing")
    streamSynchronize = stand_ins("synchronize_stream")
    eventDestroy = stand_ins("destroy_event")
    eventRecord = stand_ins("record")
    free = stand_ins("free")
    ipcCloseMemHandle = stand_ins("close_ipc")

    @staticmethod
    def getDeviceProperties(device: int) -> dict[str, bytes]:
        with as_cupys(101):
            return {"uuid": hashlib.md5(CUDA.identity(device).encode()).digest().replace(b"\0", b"\1")}

    @staticmethod
    def deviceGetPCIBusId(device: int) -> str:
        return f"0000:{device:02x}:00.0"

    @staticmethod
    def streamCreateWithFlags(flags: int) -> int:
        assert flags == 1, "streams that do not wait for the legacy default stream"
        return CUDA.create_stream(MACHINE.device)

    @staticmethod
    def eventCreateWithFlags(flags: int) -> int:
        assert flags == 2, "events without timing"
        return CUDA.create_event(MACHINE.device)

    @staticmethod
    def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
        CUDA.wait(stream, event)

    @staticmethod
    def eventSynchronize(event: int) -> None:
        with as_cupys(700):
            CUDA.synchronize_event(event)

    @staticmethod
    def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        if kind == real.memcpyHostToDevice:
            on_gpu = SimpleNamespace(data=SimpleNamespace(ptr=target), nbytes=nbytes)
            CUDA.to_device(on_gpu, HOST_ARRAYS[source], stream)
        elif kind == real.memcpyDeviceToHost:
            on_gpu = SimpleNamespace(data=SimpleNamespace(ptr=source), nbytes=nbytes)
            CUDA.to_host(HOST_ARRAYS[target], on_gpu, stream)
        else:
            CUDA.copy_bytes(target, source, nbytes, stream)

    @staticmethod
    def memsetAsync(memory: int, value: int, nbytes: int, stream: int) -> None:
        assert value == 0
        CUDA.clear(memory, nbytes, stream)

    @staticmethod
    def malloc(nbytes: int) -> int:
        return CUDA.allocate(nbytes, MACHINE.device)

    @staticmethod
    def ipcGetMemHandle(memory: int) -> bytes:
        return CUDA.ipc_handle(memory).ljust(64, b"\0")

    @staticmethod
    def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:
        assert len(handle) == 64
        with as_cupys(217):
            return CUDA.open_ipc(handle.rstrip(b"\0"), MACHINE.device)


class Device:
    """In place of cupy.cuda.Device."""

    def __init__(self, device: int | None = None) -> None:
        self.id = MACHINE.device if device is None else int(device)

    def use(self) -> None:
        with as_cupys(101):
            CUDA.use_device(self.id)

    def __enter__(self) -> Device:
        self._before = MACHINE.device
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        MACHINE.device = self._before


class Entered:
    """In place of cupy.cuda.Stream: one of CuPy's own objects, which a driver would have to be there to enter."""

    def __init__(self, stream: cupy.cuda.Stream) -> None:
        self._stream = stream

    @staticmethod
    def from_external(given: Any) -> Entered:
        return Entered(cupy.cuda.Stream.from_external(given))

    @property
    def ptr(self) -> int:
        return int(self._stream.ptr)

    def synchronize(self) -> None:
        CUDA.synchronize_stream(self.ptr)

    def __enter__(self) -> Entered:
        assert self._stream.device_id in (-1, MACHINE.device), "the stream is not on the current device"
        self._before = CUDA.current_stream(0)
        MACHINE.current.stream = self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        MACHINE.current.stream = self._before


class CurrentStream:
    """The result of cupy.cuda.get_current_stream."""

    def __init__(self, device: int = -1) -> None:
        self.ptr = CUDA.current_stream(device)

    def synchronize(self) -> None:
        CUDA.synchronize_stream(self.ptr)


def pinned(nbytes: int) -> Any:
    """In place of cupy.cuda.alloc_pinned_memory, which rounds up."""
    return CUDA.pinned(1 << max(9, (nbytes - 1).bit_length()))


def alloc(nbytes: int) -> Any:
    return MACHINE.allocated((nbytes,), np.uint8, MACHINE.device, CUDA.current_stream(0)).data


def kernel(which: Kernel) -> Callable[..., None]:
    """In place of a compiled kernel: the stand-in's, with the arguments' types looked at."""

    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert [type(each) for each in arguments] == [np.uint64, np.ndarray, np.uint64]
        out, memory, vectors = arguments
        assert memory.size == 1, "CuPy gives arrays of one element by value, and refuses others"
        CUDA.intra_node_kernel(which, (grid[0], block[0]), int(out), memory, int(vectors), CUDA.current_stream(0))

    with as_cupys(218):
        CUDA.compile_intra_node(which.ranks, which.rank, MACHINE.device)
    return launch


UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def copies_kernels(device: int) -> dict[copies.Kernel, Callable[..., None]]:
    return {kernel: copies_kernel(*kernel, device) for kernel in copies.KERNELS}


def copies_kernel(unit: int, axes: int, most: int, device: int) -> Callable[..., None]:
    """In place of a compiled kernel of copies.cu: the stand-in's copies, as the table says."""
    row_type = np.dtype(
        [("target", "u8"), ("source", "u8"), ("to", "i8", axes), ("of", "i8", axes), ("shape", "u4", axes)]
    )

    def array(address: int, shape: Any, strides: Any) -> Any:
        assert not address % unit, "a misaligned address"
        assert not any(strides % unit), "a misaligned stride"
        memory = cupy.cuda.UnownedMemory(address, 1, None, device_id=device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(shape.tolist(), UNITS[unit], pointer, strides=strides.tolist())

    def launch(grid: tuple[int, int], block: tuple[int], arguments: tuple[Any]) -> None:
        (table,) = arguments
        assert table.size == 1, "CuPy gives arrays of one element by value, and refuses others"
        assert table.nbytes == most * row_type.itemsize <= 4096, "arguments of a kernel"
        for row in table.view(row_type)[: grid[1]]:
            if row["target"]:  # not one that is there to load the kernel
                target, source = (
                    array(int(row[at]), row["shape"], row[by]) for at, by in (("target", "to"), ("source", "of"))
                )
                for one in CUDA.copies([(target, source)]):
                    one(CUDA.current_stream(0))

    return launch


class Runtime(cupy_runtime.Runtime):
    """cupy_runtime.Runtime, without CuPy's kernels."""

    def copy_kernels(self, device: int) -> list[int]:
        return CUDA.copy_kernels(device)

    def functions_for_c(self) -> dict[str, int]:
        return stand_in_calls.cuda(self)

    def error(self, code: int) -> Exception:
        return stand_in_calls.raised()

    def load_copies(self, device: int, stream: int) -> None:
        super().load_copies(device, stream)
        CUDA.load_copies(device, stream)

    def load_additions(self, dtype: Any, dimensions: int, device: int, stream: int) -> None:
        CUDA.load_additions(dtype, dimensions, device, stream)

    def to_host(self, host: Any, array: Any, stream: int) -> None:
        HOST_ARRAYS[host.ctypes.data] = host
        super().to_host(host, array, stream)
        HOST_ARRAYS.pop(host.ctypes.data)

    def to_device(self, array: Any, host: Any, stream: int) -> None:
        HOST_ARRAYS[host.ctypes.data] = host
        super().to_device(array, host, stream)
        HOST_ARRAYS.pop(host.ctypes.data)

    def as_array(self, array: Any) -> Any:
        return CUDA.as_array(array)

    def sum_entries(self, *arguments: Any) -> None:
        CUDA.sum_entries(*arguments)

    def explain(self, error: Exception) -> str | None:
        return super().explain(error) or CUDA.explain(error)  # a test may have the stand-in raise


def add(target: Any, source: Any, out: Any) -> None:
    assert out is target
    CUDA.add(out, source, CUDA.current_stream(0))


def multiply(source: Any, factor: Any, out: Any) -> None:
    CUDA.multiply(out, source, factor, CUDA.current_stream(0))


cupy_runtime.cuda = Functions()
cupy_runtime.driver = Driver
cupy_runtime._intra_node = kernel
cupy_runtime._copies = copies_kernels
cupy_runtime.cupy = SimpleNamespace(
    asarray=cupy.asarray,
    from_dlpack=cupy.from_dlpack,
    ndarray=cupy.ndarray,
    add=add,
    multiply=multiply,
    get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda stream: None),
    cuda=SimpleNamespace(
        Device=Device,
        Stream=Entered,
        get_current_stream=CurrentStream,
        alloc=alloc,
        alloc_pinned_memory=pinned,
        UnownedMemory=cupy.cuda.UnownedMemory,
        MemoryPointer=cupy.cuda.MemoryPointer,
    ),
)
