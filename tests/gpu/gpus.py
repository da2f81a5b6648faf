"""The GPU that the tests have: a real one, or the stand-in; and functions for its arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

from ..arrays import contiguous

# GPU_TESTS_ON: hpccomm's own provider of CUDA and NCCL, above the stand-in, by these bindings of NCCL.
BINDINGS = {"bindings": "CuPy's own bindings", "nccl4py": "nccl4py", "ctypes": "ctypes, with CuPy's bindings hidden"}
NCCL_BY = os.environ.get("GPU_TESTS_ON", "")
IS_BINDINGS = NCCL_BY in BINDINGS
PATIENCE = 180  # seconds for a program that a test starts: CuPy may compile its first kernels, and NCCL connect
PROVIDER = "tests.gpu.bindings.provider" if IS_BINDINGS else "tests.gpu.stand_in"


@cache
def is_real() -> bool:
    """Whether there is a GPU that CuPy and NCCL can use."""
    try:
        from cupy.cuda import nccl

        return bool(nccl.available and cupy.cuda.runtime.getDeviceCount() > 0)
    except Exception:  # no driver, no library
        return False


def mode() -> str:
    """Describe the machine on which the tests of tests/gpu run."""
    if not is_real() and IS_BINDINGS:
        by = BINDINGS[NCCL_BY]
        return f"hpccomm's provider of CuPy, and of NCCL by {by}, over the stand-in (no GPU here)"
    if not is_real():
        return "the stand-in (no GPU here): the backends' own code, on host memory, with NCCL's calls sent through MPI"
    version = cupy.cuda.nccl.get_version()
    return f"{cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}, NCCL {version}"


def is_shared() -> bool:
    """Whether ranks share a GPU."""
    from mpi4py import MPI

    return is_real() and MPI.COMM_WORLD.Get_size() > int(cupy.cuda.runtime.getDeviceCount())


def own() -> int:
    """Return the number of this rank's GPU."""
    from mpi4py import MPI

    if is_real():
        return int(MPI.COMM_WORLD.Get_rank() % cupy.cuda.runtime.getDeviceCount())
    from . import stand_in

    return stand_in.OWN


def use_own() -> None:
    """Make this rank's GPU, if it is a real one, the current one: arrays are made there."""
    if is_real():
        cupy.cuda.Device(own()).use()


def connectable(ranks: int) -> int:
    """Return how many of `ranks` ranks, started by a test, NCCL connects: as many as there are GPUs, or all."""
    if not is_real() or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ranks
    return min(ranks, int(cupy.cuda.runtime.getDeviceCount()))


def extent(array: Any) -> tuple[int, int]:
    """Return the lowest address of an array, and the one behind its highest."""
    if not array.size:
        return 0, 0
    reaches = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    low = array.data.ptr + sum(reach for reach in reaches if reach < 0)
    return low, array.data.ptr + sum(reach for reach in reaches if reach > 0) + array.itemsize


def array(values: Any, layout: Callable[[Any], Any] = contiguous, device: int | None = None) -> Any:
    """Return a GPU array with these values, written on the current stream."""
    laid_out = layout(np.asarray(values))
    if is_real():
        return _real_array(laid_out)
    from . import stand_in

    machine = stand_in.MACHINE
    made = machine.array(laid_out, machine.device if device is None else device, current_stream())
    machine.runs(current_stream(), "the program's writing", writes=(extent(made),))
    return made


def _real_array(laid_out: Any) -> Any:
    root = laid_out
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root)
    memory = cupy.empty(max(high - low, 1), np.uint8)
    flat = np.ndarray((high - low,), np.uint8, root.ravel(order="K").view(np.uint8) if root.size else b"")
    memory[: high - low].set(flat)
    return cupy.ndarray(
        laid_out.shape, laid_out.dtype, memory.data + (laid_out.ctypes.data - low), strides=laid_out.strides
    )


def values(array: Any) -> Any:
    """Return the values of a GPU array, read on the current stream, which the host waits for."""
    low, high = extent(array)
    if is_real():
        stream = cupy.cuda.get_current_stream()
        memory = np.empty(high - low, np.uint8)
        if memory.size:
            cupy.cuda.runtime.memcpyAsync(
                memory.ctypes.data, low, high - low, cupy.cuda.runtime.memcpyDeviceToHost, stream.ptr
            )
        stream.synchronize()
        offset = array.data.ptr - low if array.size else 0
        return np.ndarray(array.shape, array.dtype, memory, offset, array.strides).copy()
    from . import stand_in

    stand_in.MACHINE.runs(current_stream(), "the program's reading", ((low, high),))
    stand_in.MACHINE.host_waits(stand_in.MACHINE.streams[current_stream()])
    return stand_in.as_numpy(array).copy()


def write(array: Any, values: Any) -> None:
    """Give an array other values, on the current stream, some time after the call.

    As bytes: a kernel of CuPy's on the numbers would end the CUDA context where they are not aligned.
    """
    values = np.array(np.broadcast_to(values, array.shape), array.dtype, order="C")
    values = values.reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)
    in_bytes = cupy.ndarray(values.shape, np.uint8, array.data, strides=(*array.strides, 1))
    if is_real():
        delay()
        in_bytes[...] = cupy.asarray(values)
        return
    from . import stand_in

    stand_in.MACHINE.runs(current_stream(), "the program's writing", writes=(extent(array),))
    stand_in.as_numpy(in_bytes)[...] = values


def current_stream() -> int:
    """Return the stream on which the program works."""
    from hpccomm.cuda import seam

    return seam.runtime().current_stream(own())


@contextmanager
def another_stream() -> Iterator[int]:
    """Make a new stream the current one."""
    if is_real():
        with cupy.cuda.Stream(non_blocking=True) as stream:
            yield stream.ptr
        return
    from . import stand_in

    before = current_stream()
    stand_in.MACHINE.current.stream = stand_in.Runtime().create_stream(stand_in.MACHINE.device)
    stand_in.MACHINE.programs.add(stand_in.MACHINE.current.stream)
    try:
        yield stand_in.MACHINE.current.stream
    finally:
        stand_in.MACHINE.current.stream = before


@contextmanager
def captured() -> Iterator[Any]:
    """Capture in a CUDA graph the block's work on a new stream, which is the current one; `launch()` does it."""
    graph = SimpleNamespace()
    with another_stream() as stream:
        if is_real():
            current = cupy.cuda.get_current_stream()
            current.begin_capture()
            try:
                yield graph
            finally:
                graph.launch = current.end_capture().launch
            return
        from . import stand_in

        capture = stand_in.Graph(stand_in.MACHINE, stream)
        graph.launch = lambda: capture.launch(current_stream())
        try:
            yield graph
        finally:
            capture.end()


@cache
def _spin() -> Any:
    return cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }',
        "spin",
    )


def delay() -> None:
    """Keep a real GPU's current stream busy for some 20 ms, so that work that does not wait for it is early."""
    if is_real():
        _spin()((1,), (1,), (30_000_000,))
