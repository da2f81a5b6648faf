"""Memory of the stand-in's GPU, to which the host has no access, as to that of a GPU.

The same pages are mapped twice: at the addresses that arrays have, where reading or writing them ends the process with
SIGSEGV, and at others, where the stand-in works. Addresses are not used again.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref

import numpy as np

BYTES = 64 << 30  # of addresses: pages are there once they are used
ALIGNMENT = mmap.PAGESIZE  # CUDA's is 256 bytes; whole pages can be given back


class NotOfTheGPU(Exception):
    """A kernel, or a copy, is given an address that is not in the GPU's memory."""


class Mapping:
    """Pages that are mapped twice."""

    def __init__(self, file: int, nbytes: int) -> None:
        self.pages = mmap.mmap(file, nbytes)
        self._hidden = mmap.mmap(file, nbytes, prot=0)
        self.nbytes = nbytes
        self.start = _address(self._hidden)
        self.shift = _address(self.pages) - self.start

    def has(self, address: int, nbytes: int) -> bool:
        """Say whether all of a range is in it."""
        return self.start <= address and address + nbytes <= self.start + self.nbytes


class DeviceMemory:
    """The addresses of one process's GPU: its own memory, and the mapped memory of other processes."""

    def __init__(self) -> None:
        file = os.memfd_create("gpu")
        os.truncate(file, BYTES)
        self._own = Mapping(file, BYTES)
        os.close(file)
        self._next = 0
        self._lock = threading.Lock()
        self.mapped: dict[int, Mapping] = {}  # by their first address

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return new memory, as bytes that the stand-in may use; it is freed when they are dropped."""
        taken = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            offset, self._next = self._next, self._next + taken
        memory = np.frombuffer(self._own.pages, np.uint8, nbytes, offset)
        weakref.finalize(memory, self._own.pages.madvise, mmap.MADV_REMOVE, offset, taken).atexit = False
        return memory

    def address_of(self, memory: np.ndarray) -> int:
        """Return the address on the GPU of memory from `allocate`."""
        return int(memory.ctypes.data) - self._own.shift

    def map(self, file: int, nbytes: int) -> int:
        """Map a file that other processes have mapped too; return its address on this process's GPU."""
        mapping = Mapping(file, nbytes)
        self.mapped[mapping.start] = mapping
        return mapping.start

    def on_host(self, address: int, nbytes: int) -> int:
        """Return the stand-in's address of memory that is at an address on the GPU."""
        if self._own.has(address, nbytes):
            return address + self._own.shift
        for mapping in list(self.mapped.values()):
            if mapping.has(address, nbytes):
                return address + mapping.shift
        raise NotOfTheGPU(f"cudaErrorIllegalAddress: there is no memory of the GPU from {address:#x}, {nbytes} bytes")


class HostMemory:
    """The same, where NumPy's arrays stand for those of the GPU, which the host reads."""

    def __init__(self) -> None:
        self.mapped: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return new memory."""
        return np.empty(nbytes, np.uint8)

    def address_of(self, memory: np.ndarray) -> int:
        """Return its address."""
        return int(memory.ctypes.data)

    def map(self, file: int, nbytes: int) -> int:
        """Map a file."""
        pages = mmap.mmap(file, nbytes)
        self.mapped[_address(pages)] = pages
        return _address(pages)

    def on_host(self, address: int, nbytes: int) -> int:
        """Return the same address."""
        return address


def _address(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, np.uint8).ctypes.data)
