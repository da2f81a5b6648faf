"""all_reduce of large arrays in ordinary memory, within a node, by copies directly between processes.

MPI moves data between two processes in two copies: into shared memory, and out again. Linux's system calls
process_vm_readv and process_vm_writev need only one. The algorithm is that of ``shared_memory.py``: each rank reduces
its share of all arrays.

The kernel may refuse: in a container, or if no process may access another's memory (ptrace_scope). The ranks find that
out together, once, and then leave all of it to MPI.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.arithmetic import UFUNCS
from ..core.overlap import address_of
from ..core.reduce_op import ReduceOp
from ..errors import DistBackendError, on_rank
from ..process.tuning import Tuning
from .shared_memory import OPS, kind, mismatch, on_all, parts, share

CHUNK_BYTES = 256 << 10  # three chunks stay in a core's cache; with smaller ones the system calls cost too much
TOKEN_BYTES = 16


class SingleCopy:
    """The large all_reduces of one group, if all its ranks are on one node and the kernel permits it."""

    def __init__(self, comm: MPI.Intracomm, tuning: Tuning) -> None:
        self._comm = comm
        self._rank, self._ranks = comm.Get_rank(), comm.Get_size()
        # up to segment_bytes another rank's fast path may call MPI
        self._smallest = max(tuning.single_copy_bytes, tuning.segment_bytes + 1)
        self._is_allowed: bool | None = None  # not known before the first large array

    def all_reduce(self, array: Any, op: ReduceOp) -> bool:
        """Reduce the ranks' contiguous `array` in place; return False, on every rank, if MPI has to."""
        if array.nbytes < self._smallest or self._ranks == 1 or op.mpi_op is not None:
            return False
        if self._is_allowed is None:
            self._open()
        if not self._is_allowed:
            return False
        addresses = self._meet(array, op)
        if 0 in addresses:
            return False
        refusal: OSError | None = None
        try:
            with np.errstate(all="ignore"):  # no warnings of overflow, as in MPI
                self._reduce_share(array.reshape(-1).view(np.ndarray), addresses, UFUNCS[op.name])
        except OSError as error:
            refusal = error  # raised later: the other ranks are waiting
        if not on_all(self._comm, refusal is None):  # this also waits for all ranks
            raise DistBackendError(
                f"all_reduce: copying between the memories of the ranks failed ({refusal or 'on another rank'}), and "
                f"the arrays are half reduced; HPCCOMM_TUNING with a large single_copy_bytes does without{on_rank()}"
            ) from refusal
        return True

    def _reduce_share(self, flat: Any, addresses: list[int], ufunc: Any) -> None:
        """Reduce this rank's share of the arrays at `addresses`, and write it to all of them."""
        me, itemsize = self._rank, flat.itemsize
        places = list(zip(range(self._ranks), self._pids, addresses, strict=True))
        first, other = self._scratch.view(flat.dtype)
        first_address, other_address = map(address_of, self._scratch)
        start, stop = share(me, self._ranks, flat.size)
        for part in parts(start, stop, CHUNK_BYTES // itemsize):
            total = own = flat[part]
            offset, nbytes = part.start * itemsize, own.nbytes
            for rank, pid, address in places:
                if rank == me:
                    chunk = own
                elif rank == 0:
                    chunk = first[: own.size]
                    self._read(pid, first_address, address + offset, nbytes)
                else:
                    chunk = other[: own.size]
                    self._read(pid, other_address, address + offset, nbytes)
                # into this rank's own array as soon as its values have been added
                total = ufunc(total, chunk, out=own if rank >= me else total) if rank else chunk
            for rank, pid, address in places:
                if rank != me:
                    self._write(pid, addresses[me] + offset, address + offset, nbytes)

    def _meet(self, array: Any, op: ReduceOp) -> list[int]:
        """Wait for all ranks, and return the addresses of their arrays; 0 for an array that the kernel can't access.

        Raise on every rank if their calls differ.
        """
        address = address_of(array)
        # The kernel can't access some memory, such as a device driver's, for any process, not even this one. So each
        # rank tries its own array: it reads both ends, and writes them back.
        ends = address, address + array.nbytes - 1
        if not all(self._system_calls.reach(os.getpid(), end, 1) for end in ends):
            address = 0
        notes = np.empty((self._ranks, 4), np.int64)
        self._comm.Allgather(np.array([address, array.size, kind(array.dtype), OPS.index(op.name)], np.int64), notes)
        if (notes[:, 1:] != notes[0, 1:]).any():
            raise mismatch(self._comm, f"all_reduce {op.name.lower()} size={array.size} dtype={array.dtype}")
        addresses: list[int] = notes[:, 0].tolist()
        return addresses

    def _open(self) -> None:
        """Find out whether every rank can read and write every other rank's memory."""
        self._pids = processes_of(self._comm)
        self._is_allowed = bool(self._pids)
        self._system_calls = SystemCalls()
        self._read, self._write = self._system_calls.read, self._system_calls.write
        self._scratch = np.empty((2, CHUNK_BYTES if self._is_allowed else 0), np.uint8)


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
        # PyDLL keeps the GIL: a chunk takes less than 0.1 ms, and getting the GIL back may take 5.
        call = getattr(ctypes.PyDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return _not_here
    call.argtypes = [ctypes.c_int] + [ctypes.c_void_p, ctypes.c_ulong] * 2 + [ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call


def _not_here(*arguments: Any) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1
