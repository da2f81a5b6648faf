"""all_reduce and broadcast of many arrays: packed into one array of their dtype, done there, and unpacked.

The arrays go in runs of neighbours, which stay in the cache from the packing to the unpacking. The persistent form
makes the packed arrays, and their persistent all_reduces, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from ..native import room
from . import persistent
from .layout import by_dtype, unpack_into
from .reductions import plan
from .segments import runs

if TYPE_CHECKING:
    from .backend import MPIBackend


class Coalesced:
    """The blocking forms, with the memory that all calls pack into."""

    def __init__(self, run_bytes: int) -> None:
        self._run_bytes = run_bytes  # the same in the compiled room: other ranks may be there
        self.scratch = np.empty(0, np.uint8)

    def memory(self, nbytes: int) -> Any:
        """Return `nbytes` bytes, the same ones each time; memory that is new each time costs page faults."""
        if self.scratch.size < nbytes:
            self.scratch = np.empty(nbytes, np.uint8)
        return self.scratch[:nbytes]

    def all_reduce(self, one: Callable[..., Any], arrays: list[Any], op: ReduceOp) -> None:
        """Reduce arrays of one dtype in place; `one` reduces one array."""
        dtype = arrays[0].dtype
        for run, size in runs(arrays, self._run_bytes // dtype.itemsize):
            if len(run) == 1:
                one(run[0], op, False)
                continue
            flat = np.concatenate(run, axis=None, out=self.memory(size * dtype.itemsize).view(dtype))
            one(flat, op, False)
            unpack_into(flat, run)

    def broadcast(self, one: Callable[..., Any], arrays: list[Any], root: int, is_root: bool) -> None:
        """Copy arrays of one dtype from the root to all; `one` broadcasts one array."""
        dtype = arrays[0].dtype
        for run, size in runs(arrays, self._run_bytes // dtype.itemsize):
            if len(run) == 1:
                one(run[0], root, False)
                continue
            flat = self.memory(size * dtype.itemsize).view(dtype)
            if is_root:
                np.concatenate(run, axis=None, out=flat)
            one(flat, root, False)
            if not is_root:
                unpack_into(flat, run)


def set_up(backend: MPIBackend, arrays: list[Any], op: ReduceOp) -> PersistentWork:
    """Return a persistent all_reduce_coalesced: persistent all_reduces of what runs of neighbours are packed into."""
    works: list[PersistentWork] = []
    for indices in by_dtype(arrays):
        same = [arrays[i] for i in indices]
        for run, size in runs(same, persistent.LARGEST_IN_NODE // same[0].itemsize):
            if len(run) == 1:
                works.append(persistent.set_up(backend, "all_reduce", (run[0], op), True))
                continue
            flat = np.empty(size, same[0].dtype)
            is_direct = not plan(op, flat.dtype).changes and all(array.flags.carray for array in run)
            if op is ReduceOp.AVG:
                is_direct = is_direct and flat.dtype.char in "fd"
            work = persistent.set_up(backend, "all_reduce", (flat, op), True, run if is_direct else None)
            works.append(work if is_direct and has_arrays(work) else Packed(work, flat, run))
    return works[0] if len(works) == 1 else Several(works)


def has_arrays(work: PersistentWork) -> bool:
    """Return whether it is in memory of the node, and packs the arrays itself."""
    return room is not None and isinstance(work, room.Halves)


class Packed(PersistentWork):
    """A persistent all_reduce of a flat array: arrays are packed into it before each start, and unpacked after it."""

    def __init__(self, work: PersistentWork, flat: Any, arrays: list[Any]) -> None:
        self._work = work
        self._pack: Callable[[], Any] = partial(np.concatenate, arrays, axis=None, out=flat)
        self._unpack: Callable[[], None] = partial(unpack_into, flat, arrays)

    def begin(self) -> None:
        """Pack, and start."""
        self._pack()
        self._work.begin()

    def block(self) -> None:
        """Wait, and unpack."""
        self._work.block()
        self._unpack()

    def poll(self) -> bool:
        """Look, and unpack when it is done."""
        if not self._work.poll():
            return False
        self._unpack()
        return True

    def release(self) -> None:
        """Free the requests, and let go of the arrays."""
        self._work.release()
        del self._work, self._pack, self._unpack


class Several(PersistentWork):
    """Several persistent operations as one."""

    def __init__(self, works: list[PersistentWork]) -> None:
        self._works = works
        self._begun: list[PersistentWork] = []  # and not yet ended, the last one first

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
        """Look at each in turn."""
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
