"""Persistent all_reduce of small arrays among the ranks of one node: no messages, only memory that all of them see.

Each operation has two sets of slots and flags in a window that MPI shares among the ranks; in each set a rank has a
slot for its values, and a byte as its flag::

    start    copy the array into my slot, then write the number of this turn to my flag
    wait     look until all flags have the number; then reduce all slots, in rank order, into the array

Turns alternate between the sets. Two are enough: a rank that begins turn 3, in the slots of turn 1, has ended turn 2,
which every rank has begun, so every rank has ended turn 1. A byte is enough: the flag's last number is two turns old.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..core.arithmetic import UFUNCS, multiplied
from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from ..core.work import both
from ..job.mpi_library import release
from ..process.tuning import Tuning
from .datatypes import ARITHMETIC
from .shared_memory import Window, has_room_to_spare, on_all, split_by_node

LINE_BYTES = 64  # a cache line, to which slots and flags are aligned
FIRST_WINDOW_BYTES = 64 << 10  # each further window is twice as large
LARGEST_WINDOW_BYTES = 4 << 20  # a group has 64 KiB + 128 KiB ... + 4 MiB at most; then MPI takes over
LOOKS = 1000  # at the flags, before other processes get the core, and MPI makes progress

sched_yield = getattr(os, "sched_yield", partial(time.sleep, 1e-6))

# x86 keeps the order of a core's stores, and of its loads (Intel SDM, vol. 3A, 9.2.2). Elsewhere MPI_Win_sync is the
# fence between the values and the flag.
KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


class Turn(NamedTuple):
    """The steps of a turn in one of the two sets."""

    fill: Callable[[], None]  # this rank's slot
    flags: Any
    look: Any  # at the flags of all
    finish: Any


class SmallAllReduce(PersistentWork):
    """One operation in shared `memory`, which begins with the two rows of flags.

    `array` is reduced in place. With `packing_into` it only gets the result: the function that this returns for a slot
    packs the values into it.
    """

    def __init__(
        self, comm: MPI.Intracomm, window: Window, memory: Any, array: Any, op: ReduceOp, packing_into: Any = None
    ) -> None:
        self._comm = comm
        self._rank, ranks = comm.Get_rank(), comm.Get_size()
        self._turn = 0
        self._all = _flags_of_all(ranks)
        self._packing_into = packing_into
        flags, values = np.split(memory, [2 * _padded(ranks)])
        self._sets = [
            self._set(window, row[:ranks].data, _slots(half.reshape(ranks, -1), array), array, op)
            for row, half in zip(np.split(flags, 2), np.split(values, 2), strict=True)
        ]

    def _set(self, window: Window, flags: Any, slots: Any, array: Any, op: ReduceOp) -> Turn:
        """Return the steps of a turn in one of the two sets."""
        fill: Any
        finish: Any
        ranks, mine, ufunc = len(slots), slots[self._rank, ...], UFUNCS[op.name]  # the dots keep a 0-d array an array
        given = array if self._packing_into is None else mine
        if op.factor is not None:
            fill = partial(multiplied, given, op, mine)
        else:
            fill = None if given is mine else partial(mine.__setitem__, ..., array)
        if given is mine:
            fill = both(self._packing_into(mine), fill)
        if ranks == 2:  # a quarter of the time of the other
            finish = partial(ufunc, slots[0, ...], slots[1, ...], out=array)
        else:
            finish = partial(ufunc.reduce, slots, 0, array.dtype, array)
        if op is ReduceOp.AVG:
            finish = both(finish, partial(np.divide, array, ranks, out=array))
        if not KEEPS_ORDER:
            fill, finish = both(fill, window.sync), both(window.sync, finish)
        return Turn(fill, flags, flags.tobytes, finish)

    # Of a microsecond, one call from `start` to `begin`, or from `wait` to `block`, takes a twentieth.

    def start(self) -> None:
        """Start as PersistentWork does, without the door while the fast path is open."""
        if self.is_active or self._freed:
            self.refuse_to_start()
        door: Any = self.door
        fast = door.fast
        if not fast.is_open or door.hooks:  # the fast path steps aside: a hook listens, a block collects ...
            super().start()
            return
        fast.count += 1
        self.begin()
        self.is_active = True

    def begin(self) -> None:
        """Show this rank's values to the other ranks."""
        turn = (self._turn + 1) & 255
        fill, flags, self._look, self._finish = self._sets[turn & 1]
        self._expected = self._all[turn]
        fill()
        flags[self._rank] = self._turn = turn

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait as PersistentWork does: until all ranks have begun; then reduce."""
        if timeout is not None or self._timeout is not None or not self.is_active:
            return super().wait(timeout)
        look, expected, looks = self._look, self._expected, 0
        try:
            while look() != expected:
                looks += 1
                if looks > LOOKS:
                    self._comm.Iprobe()  # MPI makes progress, and tells of dead ranks
                    sched_yield()
        except MPI.Exception as error:
            self.fail(error)
        self._finish()  # an interrupted one is done again
        self.is_active = False
        if self.operation is not None:
            self._ended(None)
        return True

    def poll(self) -> bool:
        """Reduce if all ranks have begun; return whether they have."""
        if self._look() != self._expected:
            self._comm.Iprobe()
            return False
        self._finish()
        return True

    def block(self) -> None:
        """Wait as a part of another operation."""
        while not self.poll():
            sched_yield()

    def release(self) -> None:
        """Give the memory back."""
        self._sets = []
        self._look = self._finish = self._packing_into = None


class SmallAllReduces:
    """The operations of one group, and their windows."""

    def __init__(self, comm: MPI.Intracomm, tuning: Tuning) -> None:
        self._comm = comm
        self.ranks = comm.Get_size()
        self._tuning = tuning
        self._node: Any = None
        self._windows: list[Window] = []
        self._free = 0  # bytes left in the last window

    def takes(self, dtype: Any, op: ReduceOp) -> bool:
        """Return whether small arrays of `dtype` can be reduced here: half precisions, or on several nodes, can't."""
        return self.ranks > 1 and dtype in ARITHMETIC and op.name in UFUNCS and self._is_on_one_node()

    def set_up(
        self, array: Any, op: ReduceOp, packing_into: Any = None, most: int | None = None
    ) -> PersistentWork | None:
        """Return the operation, of at most `most` bytes of all ranks together; None if MPI has to do it."""
        ranks = self.ranks
        if not 0 < array.nbytes * ranks <= (most or self._tuning.persistent_bytes) or not self.takes(array.dtype, op):
            return None
        needed = 2 * _padded(ranks) + 2 * ranks * _padded(array.nbytes)
        if needed > self._free and not self._has_another_window(needed):
            return None
        memory = self._windows[-1].parts[0][-self._free :][:needed]
        self._free -= needed
        return SmallAllReduce(self._comm, self._windows[-1], memory, array, op, packing_into)

    def _has_another_window(self, needed: int) -> bool:
        """Make another window, if there is memory for it; the answer is the same on all ranks."""
        size = max(needed, FIRST_WINDOW_BYTES << len(self._windows))
        if not on_all(self._node, size <= LARGEST_WINDOW_BYTES and has_room_to_spare(size)):
            return False
        self._windows.append(Window(self._node, size if self._node.rank == 0 else 0))
        if self._node.rank == 0:
            self._windows[-1].parts[0][:] = 0
        self._node.Barrier()
        self._free = size
        return True

    def _is_on_one_node(self) -> bool:
        if self._node is None:
            self._node = split_by_node(self._comm)
        return bool(self._node.size == self._comm.size)

    def close(self) -> None:
        """Free the windows; called once, by every rank, when the group is destroyed."""
        for window in self._windows:
            window.free()
        if self._node is not None:
            release(self._node)


@functools.cache
def _flags_of_all(ranks: int) -> list[bytes]:
    """Return, for each number of a turn, the row of flags of ranks that have all begun it."""
    return [bytes([turn]) * ranks for turn in range(256)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


def _slots(rows: Any, array: Any) -> Any:
    """Return the memory of `rows`, one for each rank, as arrays like `array`."""
    return rows[:, : array.nbytes].view(array.dtype).reshape(len(rows), *array.shape)
