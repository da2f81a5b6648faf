"""Persistent all_reduces of many arrays: packed into one array for each dtype, reduced there, and unpacked.

The packed arrays and their all_reduces are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from .layout import by_dtype, is_plain, nbytes_of, unpacked

# MPICH 5.0 packs element by element: bytes take NumPy's time, and wider elements a fraction of it.
UNITS = {8: MPI.INT64_T, 4: MPI.INT32_T}


class CoalescedPersistentWork(PersistentWork):
    """One packed all_reduce for each dtype."""

    def __init__(self, parts: list[tuple[Packing, PersistentWork]]) -> None:
        self._parts = parts
        self._begun: list[tuple[Packing, PersistentWork]] = []  # and not yet ended

    def begin(self) -> None:
        """Pack, and start."""
        self._begun = list(self._parts)
        for packing, work in self._parts:
            packing.pack()
            work.begin()

    def block(self) -> None:
        """Wait, and unpack."""
        for packing, work in self._begun:
            work.block()
            packing.unpack()

    def poll(self) -> bool:
        """Look at each in turn; unpack those that are done."""
        while self._begun:
            packing, work = self._begun[0]
            if not work.poll():
                return False
            packing.unpack()
            del self._begun[0]
        return True

    def release(self) -> None:
        """Free the datatypes and the requests."""
        for packing, work in self._parts:
            packing.free()
            work.release()


def set_up(set_up_one: Callable[..., PersistentWork], arrays: list[Any], op: ReduceOp) -> PersistentWork:
    """Return a persistent all_reduce_coalesced; `set_up_one` makes a persistent all_reduce."""
    parts = []
    for indices in by_dtype(arrays):
        packing = Packing([arrays[i] for i in indices])
        work = set_up_one("all_reduce", packing.flat, op)
        work.op_type = "all_reduce_coalesced"  # in its errors
        parts.append((packing, work))
    return CoalescedPersistentWork(parts)


class Packing:
    """Arrays of one dtype, and the flat array that their values are packed into and unpacked from.

    MPI packs and unpacks in one call what takes NumPy one assignment for each array, once it has a datatype that says
    where the arrays lie (MPI-4.1 §5.1.5, §5.2). NumPy does it where that is not allowed, or does not pay.
    """

    def __init__(self, arrays: list[Any]) -> None:
        self.flat, _, unpack = unpacked(arrays)
        self.unpack: Callable[[], Any] = unpack
        self.pack: Callable[[], Any] = partial(np.concatenate, arrays, axis=None, out=self.flat)
        self._datatype: MPI.Datatype | None = None
        if self.flat.size and all(map(is_plain, arrays)):
            self._let_mpi_pack([array for array in arrays if array.size])

    def _let_mpi_pack(self, arrays: list[Any]) -> None:
        addresses, lengths = list(map(MPI.Get_address, arrays)), list(map(nbytes_of, arrays))
        places = sorted(zip(addresses, lengths, strict=True))
        (start, _), (last, last_length) = places[0], places[-1]
        if any(address + length > following for (address, length), (following, _) in pairwise(places)):
            return  # overlapping entries may not be received into (MPI-4.1 §5.1.11)
        unit = gcd(max(UNITS), *addresses, *lengths)
        if unit not in UNITS:
            return
        counts = [length // unit for length in lengths]
        datatype = UNITS[unit].Create_hindexed(counts, [address - start for address in addresses]).Commit()
        if datatype.Pack_size(1, MPI.COMM_SELF) != self.flat.nbytes:  # an MPI that puts more than the values there
            datatype.Free()
            return
        self._datatype = datatype
        scattered, flat = MPI.memory.fromaddress(start, last + last_length - start), self.flat.view(np.uint8)
        self.pack = partial(datatype.Pack, scattered, flat, 0, MPI.COMM_SELF)
        self.unpack = partial(datatype.Unpack, flat, 0, scattered, MPI.COMM_SELF)

    def free(self) -> None:
        """Free the datatype."""
        if self._datatype is not None:
            self._datatype.Free()
