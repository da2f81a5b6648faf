"""Copies directly between processes of a node: Linux's system calls process_vm_readv and process_vm_writev.

The kernel may refuse: in a container, or if no process may access another's memory (ptrace_scope).
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.overlap import address_of
from .shared_memory import on_all

TOKEN_BYTES = 16


class SystemCalls:
    """The two system calls."""

    def __init__(self) -> None:
        self.read, self.write = Transfer("process_vm_readv"), Transfer("process_vm_writev")

    def reach(self, pid: int, address: int, nbytes: int, expected: bytes | None = None) -> bool:
        """Read a process's memory and write it back; return whether that succeeded and read the `expected` bytes."""
        found = np.empty(nbytes, np.uint8)
        try:
            self.read(pid, address_of(found), address, nbytes)
            if expected is not None and found.tobytes() != expected:
                return False
            self.write(pid, address_of(found), address, nbytes)
        except OSError:
            return False
        return True

    def can_read(self, pid: int, address: int, nbytes: int) -> bool:
        """Return whether a process's memory can be read."""
        try:
            self.read(pid, address_of(np.empty(nbytes, np.uint8)), address, nbytes)
        except OSError:
            return False
        return True


def processes_of(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks' process ids, if each rank can read and write every other rank's memory; otherwise []."""
    calls = SystemCalls()
    # in another container the same pid may be another process, hence the token
    token = np.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), np.uint8)
    mine = MPI.Get_processor_name(), os.getpid(), address_of(token), token.tobytes()
    all_ranks = comm.allgather(mine)
    is_allowed = all(
        node == mine[0] and calls.reach(pid, address, TOKEN_BYTES, expected)
        for node, pid, address, expected in all_ranks
    )
    return [pid for _, pid, _, _ in all_ranks] if on_all(comm, is_allowed) else []


class Vector(ctypes.Structure):
    """Linux's struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Transfer:
    """One of the two system calls, by name: it copies between an address here and one in another process.

    Its arguments are made once, which halves the time of a call to 2 us.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._here, self._there = Vector(), Vector()
        self._arguments = ctypes.addressof(self._here), 1, ctypes.addressof(self._there), 1, 0
        self._call = system_call(name)

    def __call__(self, pid: int, mine: int, theirs: int, nbytes: int) -> None:
        """Copy `nbytes`; raise OSError if the kernel refuses."""
        here, there = self._here, self._there
        while nbytes:
            here.address, there.address = mine, theirs
            here.nbytes = there.nbytes = nbytes
            moved = self._call(pid, *self._arguments)
            if moved <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"{self._name}: {os.strerror(code)}")
            mine, theirs, nbytes = mine + moved, theirs + moved, nbytes - moved


def system_call(name: str) -> Any:
    """Return the C library's function `name`; if it has none, a function that fails."""
    try:
        # PyDLL keeps the GIL: getting it back may take 5 ms.
        call = getattr(ctypes.PyDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return _not_here
    call.argtypes = [ctypes.c_int] + [ctypes.c_void_p, ctypes.c_ulong] * 2 + [ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call


def _not_here(*arguments: Any) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1
