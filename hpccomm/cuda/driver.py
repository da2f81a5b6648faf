"""libcuda by ctypes, which lets go of the GIL: CuPy holds it in cudaEventQuery.

That may wait for a lock of CUDA while another thread is in cudaDeviceSynchronize (finishedGPUExecutionInternal in
PyTorch's ProcessGroupNCCL.cpp); then no thread of Python would go on, nor the watchdog. Nor does an error of the
driver's functions, NOT_READY among them, become the runtime's last one.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_void_p

NOT_READY = 600  # CUDA_ERROR_NOT_READY
CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def library() -> ctypes.CDLL:
    """Return libcuda with the types of what is called here; OSError where there is no driver."""
    found = ctypes.CDLL("libcuda.so.1")
    found.cuEventQuery.argtypes = (c_void_p,)
    found.cuThreadExchangeStreamCaptureMode.argtypes = (POINTER(c_int),)
    return found


def event_status(event: int) -> int:
    """Return 0 once an event has passed, NOT_READY before, or an error, whose number is the runtime's as well."""
    return library().cuEventQuery(event)  # type: ignore[no-any-return]


def addresses_for_c() -> tuple[int, int]:
    """Return the addresses of cuEventQuery and cuThreadExchangeStreamCaptureMode."""
    functions = library().cuEventQuery, library().cuThreadExchangeStreamCaptureMode
    query, mode = (ctypes.cast(each, c_void_p).value or 0 for each in functions)
    return query, mode


def relax_captures() -> int:
    """Let this thread call CUDA whatever other threads capture, without ending their captures; return an error."""
    return library().cuThreadExchangeStreamCaptureMode(c_int(CAPTURE_MODE_RELAXED))  # type: ignore[no-any-return]
