"""Persistent collectives in memory of a node, in two halves (`native/halves.pxi`): a group's memory for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..core.persistent_work import PersistentWork
from ..core.work import Once, both, repeatable
from ..native import _fastpath as fastpath
from .compiled import aligned_zeros
from .layout import Finish
from .persistent import LARGEST_IN_NODE
from .shared_memory import MOST_NODE_WINDOWS, Window, has_room_to_spare, on_all

if TYPE_CHECKING:
    from .compiled import CompiledFastPath

FIRST_WINDOW_BYTES = 64 << 10  # each further window is twice as large
MOST_BYTES = 64 << 20  # of a group; then MPI takes over


class NodePersistentWork(fastpath.Halves, PersistentWork):
    """A persistent collective in memory of the node."""


class NodePersistent:
    """The set-up of such operations. All ranks make the same calls in the same order, and get the same answers."""

    def __init__(self, fast_path: CompiledFastPath) -> None:
        self._fast_path = fast_path
        self._comm, self._ranks = fast_path._comm, fast_path._size
        self._windows: list[Window] = []
        self._free = 0  # bytes left in the last window
        self._made = 0  # bytes of all windows
        self._given: list[tuple[Any, Callable[[], Any]]] = []  # memory, and the operation that uses it

    def set_up(
        self, name: str, given: Any, taken: Any, op: Any, root: int, averages: bool, fill: Finish, finish: Finish,
        arrays: list[Any] | None,
    ) -> PersistentWork | None:  # fmt: skip
        """Return the operation on buffers prepared for MPI, as Halves describes them; None if MPI has to do it."""
        is_small = given.nbytes <= LARGEST_IN_NODE or self._ranks == 1
        if given.nbytes == 0 or not is_small or not self._fast_path.opens_node(given, op):
            return None
        memory = self._memory(fastpath.halves_bytes(self._ranks, given.nbytes))
        if memory is None:
            return None
        if isinstance(finish := repeatable(finish), Once):
            fill = both(fill, finish.arm)
        work = NodePersistentWork()
        work.set_up(self._fast_path, name, given, taken, fill, finish, op, root, arrays, averages, memory)
        if self._ranks > 1:
            self._given.append((memory, weakref.ref(work)))
        return work

    def _memory(self, needed: int) -> Any:
        """Return zeroed memory: new, or of an operation that all ranks have freed; None if there is none."""
        if self._ranks == 1:
            return aligned_zeros(needed)
        if needed <= self._free:
            return self._next(needed)
        is_free = np.array([needed <= memory.nbytes and _is_freed(work()) for memory, work in self._given], np.intc)
        self._comm.Allreduce(MPI.IN_PLACE, is_free, MPI.MIN)
        found = min(np.flatnonzero(is_free), key=lambda i: self._given[i][0].nbytes, default=None)
        if found is not None:
            memory, _ = self._given.pop(found)
            self._clear(memory)
            return memory
        return self._next(needed) if self._has_another_window(needed) else None

    def _next(self, needed: int) -> Any:
        memory = self._windows[-1].parts[0][-self._free :][:needed]
        self._free -= needed
        return memory

    def _clear(self, memory: Any) -> None:
        if self._comm.rank == 0:
            memory[:] = 0
        self._comm.Barrier()

    def _has_another_window(self, needed: int) -> bool:
        size = max(needed, FIRST_WINDOW_BYTES << len(self._windows))
        is_possible = size + self._made <= MOST_BYTES and Window.alive < MOST_NODE_WINDOWS
        if not on_all(self._comm, is_possible and has_room_to_spare(size)):
            return False
        self._windows.append(Window(self._comm, size if self._comm.rank == 0 else 0))
        self._clear(self._windows[-1].parts[0])
        self._free = size
        self._made += size
        return True

    def close(self) -> None:
        """Free the windows; called once, by every rank, when the group is destroyed."""
        self._given.clear()
        for window in self._windows:
            window.free()


def _is_freed(work: NodePersistentWork | None) -> bool:
    return work is None or work._freed


fastpath.set_up_halves(PersistentWork)
