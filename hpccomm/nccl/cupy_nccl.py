"""NCCL by CuPy: behind the seam of ``cuda/seam.py``, whose docstrings say what each function is for.

What ``cupy.cuda.nccl`` lacks is called in the same libnccl, which CuPy has loaded, by ctypes.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any

from ..cuda.cupy_runtime import INSTALL

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # CuPy warns of a missing library; here it is an error
    from cupy.cuda import nccl

if not nccl.available:
    raise ImportError(f"CuPy finds no NCCL library (libnccl.so.2): {INSTALL}")
import cupy_backends.cuda.libs.nccl as linked  # the module that is linked to libnccl

# nccl.h's ncclResult_t. CuPy's own table ends before the last ones: for them NcclError is a KeyError.
RESULTS = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
    8: "ncclTimeout",
}


class NCCL:
    """CuPy's functions, and those of libnccl."""

    def __init__(self) -> None:
        # Operations of several groups may be in flight at once, on streams of their own; with this NCCL (2.26 and
        # newer) launches them in the order of the calls, without which they might wait for each other for ever.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        nccl.get_version()  # the library may be loaded by the first call only
        # Symbols are looked up in what CuPy's module is linked to, also where another libnccl has been loaded.
        self.library = ctypes.CDLL(linked.__file__)
        self.has_all_to_all = hasattr(self.library, "ncclAlltoAll")
        self.group_start = nccl.groupStart
        self.group_end = nccl.groupEnd

    def version(self) -> int:
        return int(nccl.get_version())

    def unique_id(self) -> Any:
        return nccl.get_unique_id()

    def connect(self, size: int, unique_id: Any, rank: int) -> Communicator:
        return Communicator(self, nccl.NcclCommunicator(size, unique_id, rank))

    def explain(self, error: Exception) -> str | None:
        code = result_code(error)
        if code is None:
            return None
        last = self.last_error()
        return f"{RESULTS.get(code, 'ncclResult_t')} ({code}){': ' if last else ''}{last}"

    def last_error(self) -> str:
        """Return the text of the last error in this process (ncclGetLastError; its communicator argument is unused)."""
        function = getattr(self.library, "ncclGetLastError", None)  # since NCCL 2.13
        if function is None:
            return ""
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        text: bytes | None = function(None)
        return (text or b"").decode(errors="replace").strip()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of libnccl that CuPy lacks."""
        code = getattr(self.library, name)(*arguments)
        if code:
            nccl.check_status(code)


class Communicator:
    """A communicator whose methods are CuPy's own, so that the seam costs nothing."""

    def __init__(self, library: NCCL, comm: Any) -> None:
        self._library = library
        self._comm = comm
        # CuPy destroys a communicator that is dropped, which would wait for the other ranks in a finaliser. One
        # reference is never given back; destroy() and abort() free what belongs to NCCL.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
        self.all_reduce = comm.allReduce
        self.reduce = comm.reduce
        self.broadcast = comm.broadcast
        self.reduce_scatter = comm.reduceScatter
        self.all_gather = comm.allGather
        self.send = comm.send
        self.recv = comm.recv
        self.abort = comm.abort

    def all_to_all(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        self._library.call(
            "ncclAlltoAll",
            ctypes.c_void_p(send),
            ctypes.c_void_p(recv),
            ctypes.c_size_t(count),
            ctypes.c_int(datatype),
            ctypes.c_void_p(self._comm.comm),
            ctypes.c_void_p(stream),
        )

    def split(self, color: int, key: int) -> Communicator | None:
        comm = self._comm.commSplit(color, key)
        return None if comm is None else Communicator(self._library, comm)

    def async_error(self) -> str | None:
        try:
            self._comm.check_async_error()
        except (nccl.NcclError, KeyError) as error:
            return self._library.explain(error)
        return None

    def destroy(self) -> None:
        self._library.call("ncclCommFinalize", ctypes.c_void_p(self._comm.comm))
        self._comm.destroy()


def result_code(error: Exception) -> int | None:
    """Return NCCL's result code if `error` is NCCL's."""
    if isinstance(error, nccl.NcclError):
        return int(error.status)
    if isinstance(error, KeyError) and error.args and error.args[0] in RESULTS:
        return int(error.args[0])
    return None
