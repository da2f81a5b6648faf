"""The stand-in as C functions: they hand the calls of compiled code to the stand-in's Python methods.

An exception can't pass through C: a function returns an error code then, and `raised` returns the exception.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

NOT_READY, CUDA_FAILED, NCCL_FAILED = 600, 700, 3
ANY = ctypes.c_int64
CUDA = {  # the method of the seam, and how many arguments it has in C
    "cuCtxGetCurrent": ("current_device", 1), "cuEventRecord": ("record", 2), "cuStreamWaitEvent": ("wait", 3),
    "cuEventQuery": ("is_done", 1), "cuStreamIsCapturing": ("is_capturing", 2), "cuStreamGetId": ("", 2),
    "cuLaunchKernel": ("copies", 11),
}  # fmt: skip
NCCL = {
    "ncclAllReduce": ("all_reduce", 7), "ncclReduceScatter": ("reduce_scatter", 7), "ncclReduce": ("reduce", 8),
    "ncclBroadcast": ("broadcast", 7), "ncclAllGather": ("all_gather", 6),
    "ncclAlltoAll": ("all_to_all", 6), "ncclSend": ("send", 6), "ncclRecv": ("recv", 6),
}  # fmt: skip
_raised: list[Exception] = []
_kept: list[Any] = []  # those that C has


def raised() -> Exception:
    """Return the last exception."""
    return _raised.pop()


def c_function(function: Callable[..., int], arguments: int, failed: int) -> int:
    """Return the address of a C function of so many arguments; it returns `failed` if the Python function raises."""

    def called(*given: int) -> int:
        try:
            return function(*given)
        except Exception as error:
            _raised.append(error)
            return failed

    _kept.append(ctypes.CFUNCTYPE(ANY, *[ANY] * arguments)(called))
    return ctypes.cast(_kept[-1], ctypes.c_void_p).value or 0


def cuda(runtime: Any) -> dict[str, int]:
    """Return the functions of CUDA, and that of CuPy for the current stream, over a `Runtime` of the seam."""

    def put(address: int, kind: Any, value: int) -> int:
        kind.from_address(address).value = value
        return 0

    def does(method: str, *given: int) -> int:
        getattr(runtime, method)(*given)
        return 0

    functions = {
        "cuCtxGetCurrent": lambda context: put(context, ctypes.c_int64, runtime.current_device() + 1),
        "cuEventRecord": lambda event, stream: does("record", event, stream),
        "cuStreamWaitEvent": lambda stream, event, _: does("wait", stream, event),
        "cuEventQuery": lambda event: 0 if runtime.is_done(event) else NOT_READY,
        "cuStreamIsCapturing": lambda stream, answer: put(answer, ctypes.c_int, runtime.is_capturing(stream)),
        "cuStreamGetId": lambda stream, answer: put(answer, ctypes.c_uint64, stream),
        "cuLaunchKernel": lambda unit, x, y, z, *others: copied(runtime, unit, y, others[4], others[5]),
    }
    found = {name: c_function(functions[name], CUDA[name][1], CUDA_FAILED) for name in CUDA}
    return {**found, "current_stream": c_function(lambda device: runtime.current_stream(device), 1, -1)}


ROW = np.dtype([("target", "u8"), ("source", "u8"), ("to", "i8", 4), ("of", "i8", 4), ("shape", "u4", 4)])
UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
MANY = 32  # copies in the larger table; a kernel of it is called MANY * unit


def copied(runtime: Any, kernel: int, rows: int, stream: int, arguments: int) -> int:
    """Do the copies of a table of copies.cu, whose address is the first of a kernel's arguments."""
    table = ctypes.c_void_p.from_address(arguments).value or 0
    assert (rows == 1) == (kernel < MANY), "another kernel's table"
    unit = kernel if rows == 1 else kernel // MANY

    def array(row: Any, address: int, strides: Any) -> Any:
        assert not address % unit, "a misaligned address"
        assert not any(strides % unit), "a misaligned stride"
        memory = cupy.cuda.UnownedMemory(address, 1, None, device_id=runtime.current_device())
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(row["shape"].tolist(), UNITS[unit], pointer, strides=strides.tolist())

    for row in np.frombuffer(ctypes.string_at(table, rows * ROW.itemsize), ROW):
        pair = array(row, int(row["target"]), row["to"]), array(row, int(row["source"]), row["of"])
        for launch in runtime.copies([pair]):
            launch(stream)
    return 0


def nccl(communicator_of: Callable[[int], Any], start: Callable[[], Any], end: Callable[[], Any]) -> dict[str, int]:
    """Return the functions of NCCL; `communicator_of` returns the stand-in's communicator of a handle."""

    def operation(method: str) -> Callable[..., int]:
        def called(*given: int) -> int:
            *others, comm, stream = given
            getattr(communicator_of(comm), method)(*others, stream)
            return 0

        return called

    def group(function: Callable[[], Any]) -> Callable[[], int]:
        def called() -> int:
            function()
            return 0

        return called

    found = {name: c_function(operation(method), count, NCCL_FAILED) for name, (method, count) in NCCL.items()}
    found |= {
        name: c_function(group(each), 0, NCCL_FAILED)
        for name, each in (("ncclGroupStart", start), ("ncclGroupEnd", end))
    }
    return {**found, "ncclCommGetAsyncError": c_function(lambda comm, state: NCCL_FAILED, 2, NCCL_FAILED)}
