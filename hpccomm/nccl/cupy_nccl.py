"""NCCL by CuPy, behind the seam of ``cuda/seam.py``, whose docstrings describe each method.

Functions that ``cupy.cuda.nccl`` lacks are called by ctypes (libnccl.py), in the same libnccl.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any

from ..cuda.cupy_runtime import INSTALL
from ..cuda.time_limit import TimeLimit
from . import find, libnccl
from .libnccl import RESULTS

if find.VARIABLE in os.environ:
    find.load()  # before CuPy looks for libnccl
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # CuPy only warns of a missing library; here it is an error
    from cupy.cuda import nccl

if not nccl.available:
    raise ImportError(f"CuPy finds no NCCL library (libnccl.so.2): {INSTALL}")
import cupy_backends.cuda.libs.nccl as linked  # the module that is linked to libnccl


class NCCL(libnccl.NCCL):
    """CuPy's functions, and those of libnccl."""

    bindings = "cupy.cuda.nccl"

    def load(self) -> ctypes.CDLL:
        nccl.get_version()  # the first call may load the library
        # This finds symbols in the libnccl that CuPy's module is linked to, even if another one is loaded.
        return ctypes.CDLL(linked.__file__)

    def unique_id(self) -> bytes:
        return nccl.get_unique_id()  # type: ignore[no-any-return]

    def connect(self, size: int, unique_id: bytes, rank: int, time_limit: TimeLimit | None) -> libnccl.Communicator:
        if time_limit is not None:
            return super().connect(size, unique_id, rank, time_limit)
        return Communicator(self.library, nccl.NcclCommunicator(size, unique_id, rank))

    def result_code(self, error: Exception) -> int | None:
        if isinstance(error, nccl.NcclError):
            return int(error.status)
        if isinstance(error, KeyError) and error.args and error.args[0] in RESULTS:
            return int(error.args[0])
        return super().result_code(error)


class Communicator(libnccl.Communicator):
    """A blocking communicator; its operations are CuPy's own methods, so the seam costs nothing."""

    def __init__(self, library: libnccl.Library, comm: Any) -> None:
        super().__init__(library, ctypes.c_void_p(comm.comm), time_limit=None)
        # CuPy destroys a communicator that is garbage-collected, which would wait for the other ranks. So one reference
        # is never released; destroy() and abort() free NCCL's resources.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
        self.all_reduce = comm.allReduce
        self.reduce = comm.reduce
        self.broadcast = comm.broadcast
        self.reduce_scatter = comm.reduceScatter
        self.all_gather = comm.allGather
        self.send = comm.send
        self.recv = comm.recv
        self.group_start = nccl.groupStart
        self.group_end = nccl.groupEnd
