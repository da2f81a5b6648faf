"""all_reduce and broadcast of many arrays: packed into one array for each dtype, communicated and unpacked.

The arrays go in runs of neighbours, which stay in the cache from the packing to the unpacking. The persistent form
makes the packed arrays, and their persistent all_reduces, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from . import persistent
from .layout import by_dtype, unpack_into
from .segments import runs

if TYPE_CHECKING:
    from .backend import MPIBackend


class Coalesced:
    """The blocking forms, with the memory that all calls pack into."""

    def __init__(self, run_bytes: int) -> None:
        self._run_bytes = run_bytes  # the same as in the compiled extension, which other ranks may use
        self.scratch = np.empty(0, np.uint8)

    def memory(self, nbytes: int) -> Any:
        """Return `nbytes` bytes of the same memory each time; new memory would cost page faults."""
        if self.scratch.size < nbytes:
            self.scratch = np.empty(nbytes, np.uint8)
        return self.scratch[:nbytes]

    def in_runs(self, one: Callable[..., Any], arrays: list[Any], argument: Any, packs: bool, unpacks: bool) -> None:
        """Do an operation on many arrays in place; `one` does it on one array.

        `packs` and `unpacks`: whether the operation reads and writes this rank's arrays.
        """
        for (same,) in by_dtype(arrays):
            dtype = same[0].dtype
            if not dtype.itemsize:  # "V0": nothing to send
                continue
            for run, size in runs(same, self._run_bytes // dtype.itemsize):
                if len(run) == 1:
                    one(run[0], argument, False)
                    continue
                flat = self.memory(size * dtype.itemsize).view(dtype)
                if packs:
                    np.concatenate(run, axis=None, out=flat)
                one(flat, argument, False)
                if unpacks:
                    unpack_into(flat, run)


def set_up(backend: MPIBackend, arrays: list[Any], op: ReduceOp) -> PersistentWork:
    """Return a persistent all_reduce_coalesced: persistent all_reduces of packed runs of neighbours."""
    works: list[PersistentWork] = []
    for (same,) in by_dtype(arrays):
        for run, size in runs(same, persistent.LARGEST_IN_NODE // same[0].itemsize):
            one, packed = (run[0], None) if len(run) == 1 else (np.empty(size, same[0].dtype), run)
            works.append(persistent.set_up(backend, "all_reduce", (one, op), True, packed))
    return works[0] if len(works) == 1 else Several(works)


class Several(PersistentWork):
    """Several persistent operations as one."""

    def __init__(self, works: list[PersistentWork]) -> None:
        self._works = works
        self._begun: list[PersistentWork] = []  # and not yet complete, the last one first

    def begin(self) -> None:
        """Start all."""
        self._begun = self._works[::-1]
        for work in self._works:
            work.begin()

    def block(self) -> None:
        """Wait for all."""
        while self._begun:
            self._begun[-1].block()
            self._begun.pop()

    def poll(self) -> bool:
        """Poll each in turn."""
        while self._begun:
            if not self._begun[-1].poll():
                return False
            self._begun.pop()
        return True

    def release(self) -> None:
        """Free the requests."""
        for work in self._works:
            work.release()
        self._works, self._begun = [], []
