"""Whether a process can access another one's memory: Linux's system calls process_vm_readv and process_vm_writev.

The kernel may refuse: in a container, or if no process may access another's memory (ptrace_scope). `native/pieces.h`
copies by these calls.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.overlap import address_of
from .shared_memory import on_all

TOKEN_BYTES = 16


class Vector(ctypes.Structure):
    """Linux's struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def can_access(pid: int, address: int, nbytes: int, writes: bool = True, expected: bytes | None = None) -> bool:
    """Read a process's memory and, if `writes`, write it back; return whether both succeed.

    Write nothing and return False unless it has the `expected` bytes, if given.
    """
    found = np.empty(nbytes, np.uint8)
    here, there = Vector(address_of(found), nbytes), Vector(address, nbytes)
    arguments = pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0
    if system_call("process_vm_readv")(*arguments) != nbytes or expected not in (None, found.tobytes()):
        return False
    return not writes or bool(system_call("process_vm_writev")(*arguments) == nbytes)


def processes_of(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks' process ids, if each rank can read and write every other rank's memory; otherwise []."""
    # in another container the same pid may be another process, hence the token
    token = np.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), np.uint8)
    mine = MPI.Get_processor_name(), os.getpid(), address_of(token), token.tobytes()
    all_ranks = comm.allgather(mine)
    is_allowed = all(
        node == mine[0] and can_access(pid, address, TOKEN_BYTES, expected=expected)
        for node, pid, address, expected in all_ranks
    )
    return [pid for _, pid, _, _ in all_ranks] if on_all(comm, is_allowed) else []


@functools.cache
def system_call(name: str) -> Any:
    """Return the C library's function `name`; if it has none, a function that fails."""
    try:
        # PyDLL keeps the GIL: getting it back may take 5 ms.
        call = getattr(ctypes.PyDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return lambda *_: -1
    call.argtypes = [ctypes.c_int] + [ctypes.c_void_p, ctypes.c_ulong] * 2 + [ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call
