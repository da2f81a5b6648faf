"""all_reduce and broadcast of many arrays: packed into one array of their dtype, done there, and unpacked.

The arrays go in runs of neighbours, which stay in the cache from the packing to the unpacking. The persistent form
makes the packed arrays, and their persistent all_reduces, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from .fast_path import RUN_BYTES
from .layout import by_dtype, is_plain, nbytes_of, unpack_into
from .segments import runs
from .small_all_reduce import SmallAllReduces

# Persistent, of all ranks together: so many bytes at most go through shared memory (of twice that size), in such runs.
# Measured with 1000 arrays of 1 KB on two ranks.
SHARED_BYTES, SHARED_RUN_BYTES = 2 << 20, 256 << 10

# MPICH 5.0 packs element by element: bytes take NumPy's time, and wider elements a fraction of it.
UNITS = {8: MPI.INT64_T, 4: MPI.INT32_T}


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


def set_up(
    small: SmallAllReduces, set_up_one: Callable[..., PersistentWork], arrays: list[Any], op: ReduceOp
) -> PersistentWork:
    """Return a persistent all_reduce_coalesced; `set_up_one` makes a persistent all_reduce."""
    parts: list[Part] = []
    for indices in by_dtype(arrays):
        same = [arrays[i] for i in indices]
        if sum(map(nbytes_of, same)) * small.ranks <= SHARED_BYTES and small.takes(same[0].dtype, op):
            parts += _in_shared_memory(small, set_up_one, same, op)
        else:
            parts += _by_mpi(set_up_one, same, op)
    return CoalescedPersistentWork(parts)


def _in_shared_memory(
    small: SmallAllReduces, set_up_one: Callable[..., PersistentWork], arrays: list[Any], op: ReduceOp
) -> Iterator[Part]:
    cut = runs(arrays, SHARED_RUN_BYTES // small.ranks // arrays[0].itemsize)
    scratch = np.empty(max(size for _, size in cut), arrays[0].dtype)  # the result of one after the other
    for run, size in cut:
        packing = Packing(run, scratch[:size])
        work = small.set_up(packing.flat, op, packing.packing_into, SHARED_BYTES)
        if work is not None:
            yield Part(work, None, packing)
        else:
            packing.free()
            yield from _by_mpi(set_up_one, run, op)


def _by_mpi(set_up_one: Callable[..., PersistentWork], arrays: list[Any], op: ReduceOp) -> Iterator[Part]:
    dtype = arrays[0].dtype
    for run, size in runs(arrays, RUN_BYTES // dtype.itemsize):
        packing = Packing(run, np.empty(size, dtype)) if len(run) > 1 else None
        work = set_up_one("all_reduce", run[0] if packing is None else packing.flat, op)
        yield Part(work, None if packing is None else packing.packing_into(packing.flat), packing)


class Packing:
    """Arrays of one dtype, and the flat array that has their values side by side.

    NumPy packs with one assignment for each array, MPI with one call for all, given a datatype of their places
    (MPI-4.1 §5.1.5, §5.2). Where that is not allowed, or does not pay, NumPy packs.
    """

    def __init__(self, arrays: list[Any], flat: Any) -> None:
        self.flat = flat
        self.unpack: Callable[[], Any] = partial(unpack_into, flat, arrays)
        self._arrays = arrays
        self._datatype: MPI.Datatype | None = None
        if flat.size and all(map(is_plain, arrays)):
            self._make_datatype([array for array in arrays if array.size])

    def packing_into(self, target: Any) -> Callable[[], Any]:
        """Return the function that packs the arrays into a flat array."""
        if self._datatype is None:
            return partial(np.concatenate, self._arrays, axis=None, out=target)
        return partial(self._datatype.Pack, self._scattered, target.view(np.uint8), 0, MPI.COMM_SELF)

    def _make_datatype(self, arrays: list[Any]) -> None:
        addresses, lengths = list(map(MPI.Get_address, arrays)), list(map(nbytes_of, arrays))
        places = sorted(zip(addresses, lengths, strict=True))
        (start, _), (last, last_length) = places[0], places[-1]
        if any(address + length > following for (address, length), (following, _) in pairwise(places)):
            return  # MPI may not receive into entries that overlap (MPI-4.1 §5.1.11)
        unit = gcd(max(UNITS), *addresses, *lengths)
        if unit not in UNITS:
            return
        counts = [length // unit for length in lengths]
        datatype = UNITS[unit].Create_hindexed(counts, [address - start for address in addresses]).Commit()
        if datatype.Pack_size(1, MPI.COMM_SELF) != self.flat.nbytes:  # this MPI packs more than the values
            datatype.Free()
            return
        self._datatype = datatype
        self._scattered = MPI.memory.fromaddress(start, last + last_length - start)
        self.unpack = partial(datatype.Unpack, self.flat.view(np.uint8), 0, self._scattered, MPI.COMM_SELF)

    def free(self) -> None:
        """Free the datatype."""
        if self._datatype is not None:
            self._datatype.Free()


class Part(NamedTuple):
    """One all_reduce. `pack` goes before it, unless it packs itself; without `packing` it reduces one array."""

    work: PersistentWork
    pack: Callable[[], Any] | None
    packing: Packing | None

    def finish(self) -> None:
        """Unpack."""
        if self.packing is not None:
            self.packing.unpack()


class CoalescedPersistentWork(PersistentWork):
    """The all_reduces that many arrays take."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._begun: list[Part] = []  # and not yet ended, the last one first

    def begin(self) -> None:
        """Pack, and start."""
        self._begun = self._parts[::-1]
        for part in self._parts:
            if part.pack is not None:
                part.pack()
            part.work.begin()

    def block(self) -> None:
        """Wait, and unpack."""
        for part in reversed(self._begun):
            part.work.block()
            part.finish()

    def poll(self) -> bool:
        """Look at each in turn; unpack those that are done."""
        while self._begun:
            if not self._begun[-1].work.poll():
                return False
            self._begun.pop().finish()
        return True

    def release(self) -> None:
        """Free the datatypes and the requests."""
        for part in self._parts:
            part.work.release()
            if part.packing is not None:
                part.packing.free()
        self._parts, self._begun = [], []
