"""NCCL by nccl4py, NVIDIA's own bindings, behind the seam of ``cuda/seam.py``, whose docstrings describe each method.

It uses ``nccl.bindings``, whose calls cost as little as CuPy's; ``nccl.core`` would inspect each array again.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

from nccl.bindings import nccl

from . import find, libnccl

if not hasattr(nccl, "Comm"):
    raise ImportError("this nccl4py is older than 0.6: pip install --upgrade nccl4py")

NAMES = {"all_to_all": "allto_all"}  # names that differ from the seam's


class NCCL(libnccl.NCCL):
    """libnccl's functions; operations of blocking communicators are nccl4py's."""

    bindings = "nccl4py"

    def load(self) -> ctypes.CDLL:
        find.load()  # before nccl4py looks for libnccl
        return ctypes.CDLL(nccl.get_library_path())

    def blocking(self, comm: ctypes.c_void_p) -> libnccl.Communicator:
        return Communicator(self.library, comm)

    def result_code(self, error: Exception) -> int | None:
        return int(error.status) if isinstance(error, nccl.NCCLError) else super().result_code(error)


class Communicator(libnccl.Communicator):
    """A blocking communicator; its operations are nccl4py's functions."""

    def __init__(self, library: libnccl.Library, comm: ctypes.c_void_p) -> None:
        super().__init__(library, comm, time_limit=None)
        self._handle = nccl.Comm(comm.value or 0)
        for name in libnccl.OPERATIONS:
            setattr(self, name, partial(_operate, getattr(nccl, NAMES.get(name, name)), self._handle))
        self.group_start = nccl.group_start
        self.group_end = nccl.group_end


def _operate(function: Any, handle: Any, *arguments: int) -> None:
    *others, stream = arguments
    function(*others, handle, stream)
