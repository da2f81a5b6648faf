"""libcuda by ctypes, which releases the GIL: CuPy holds the GIL in cudaEventQuery.

cudaEventQuery may wait for a CUDA lock while another thread is in cudaDeviceSynchronize (finishedGPUExecutionInternal
in PyTorch's ProcessGroupNCCL.cpp); then every Python thread would stop, also the watchdog. In addition, a driver
function's error, such as NOT_READY, does not become the runtime's last error.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_void_p

FOR_C = (
    "cuCtxGetCurrent", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery", "cuStreamIsCapturing", "cuStreamGetId",
    "cuLaunchKernel",
)  # fmt: skip
NOT_READY = 600  # CUDA_ERROR_NOT_READY
CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def library() -> ctypes.CDLL:
    """Return libcuda with the argument types of the functions used here; OSError if there is no driver."""
    found = ctypes.CDLL("libcuda.so.1")
    found.cuEventQuery.argtypes = (c_void_p,)
    found.cuThreadExchangeStreamCaptureMode.argtypes = (POINTER(c_int),)
    return found


def event_status(event: int) -> int:
    """Return 0 if an event has passed, NOT_READY if not, or an error code, which is the same in the runtime."""
    return library().cuEventQuery(event)  # type: ignore[no-any-return]


def addresses_for_c() -> tuple[int, int]:
    """Return the addresses of cuEventQuery and cuThreadExchangeStreamCaptureMode."""
    functions = library().cuEventQuery, library().cuThreadExchangeStreamCaptureMode
    query, mode = (ctypes.cast(each, c_void_p).value or 0 for each in functions)
    return query, mode


def functions_for_c() -> dict[str, int]:
    """Return the addresses of the functions of `native/gpu_path.pxi`."""
    return {name: ctypes.cast(library()[name], c_void_p).value or 0 for name in FOR_C}


def relax_captures() -> int:
    """Let this thread call CUDA while other threads capture, without ending their captures; return an error code."""
    return library().cuThreadExchangeStreamCaptureMode(c_int(CAPTURE_MODE_RELAXED))  # type: ignore[no-any-return]
