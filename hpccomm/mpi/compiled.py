"""The Python half of the compiled fast path (`native/_fastpath.pyx`): tables, set-up, errors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..core.dispatcher import REAP_ABOVE, REAP_BYTES
from ..core.operation_list import MESSAGES
from ..core.overlap import address_of
from ..core.reduce_op import ReduceOp
from ..core.work import COMPLETED, IN_FLIGHT, Work
from ..core.work_info import work_info
from ..errors import DistBackendError, on_rank
from ..job import failures, mpi_library
from ..job.tags import LARGEST, PAIRWISE, SPARSE_LARGE
from ..native import _fastpath as fastpath
from ..process.tuning import Tuning
from .datatypes import DIRECT, OPS, TYPED, message
from .fast_path import RUN_BYTES, MPIFastPath
from .works import MPIWork, as_backend_error, wait_for_all, wrong_length

if TYPE_CHECKING:
    from ..core.dispatcher import Dispatcher
    from .shared_memory import Mapping, Window

LARGEST_SLOT = 512 << 10  # bytes
OWN_SLOT = 8 << 10  # of a rank alone in its group
ALIGNMENT = 64
LARGEST_WINDOW = 32 << 20
ONE_PHASE = 16 << 10  # bytes of all ranks together
BEFORE = 8  # a group's first operations that go to MPI before memory is made; a reduction makes it at once
LOOKS = 2000  # polls of a flag before the core is yielded to other processes and MPI makes progress
LOOKS_OF_MANY = 20  # the same if there are more ranks than cores
YIELDS = 16  # of the core before this rank sleeps, in that case
NEVER = -1  # it does not sleep

LETTERS = {"sum": "s", "product": "p", "min": "n", "max": "x"}


def aligned_zeros(nbytes: int) -> Any:
    """Return zeroed memory for this rank alone, aligned for flags."""
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    return memory[-address_of(memory) % ALIGNMENT :][:nbytes]


class CompiledWork(fastpath.Pending, Work):
    """An asynchronous operation of the compiled fast path."""

    progress = MPIWork.progress
    translate_error = MPIWork.translate_error

    def get_duration(self) -> float:
        """See Work.get_duration."""
        if self.operation is None and self.duration is None and self.is_completed() and self.took >= 0:
            return 1e-9 * self.took
        return Work.get_duration(self)


def patience(comm: MPI.Intracomm) -> tuple[int, int]:
    """Return the polls before a waiting rank yields its core, and the yields before it sleeps; collective."""
    from .shared_memory import on_all

    have_cores = on_all(comm, not mpi_library.ranks_outnumber_cores)
    return (LOOKS, NEVER) if have_cores else (LOOKS_OF_MANY, YIELDS)


class CompiledFastPath(fastpath.FastPath, MPIFastPath):
    """The compiled fast path of one group: set-up and errors."""

    dispatcher: Dispatcher
    is_open = True
    _memory: Window | Mapping | None = None

    def __init__(self, comm: MPI.Intracomm, windows: dict[int, Any], tuning: Tuning, thread_bytes: int) -> None:
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        self.shared_bytes = tuning.shared_bytes
        largest = tuning.segment_bytes, min(tuning.segment_bytes, thread_bytes - 1)
        fastpath.FastPath.__init__(self, MPI._handleof(comm), self._rank, self._size, windows, *largest, RUN_BYTES)
        fastpath.prepare_end(MPI._handleof(MPI.COMM_SELF))
        fastpath.set_crowded(mpi_library.ranks_outnumber_cores)
        if tuning.node_bytes:
            limits = tuning.node_bytes, max(tuning.node_bytes, tuning.node_reduction_bytes)
            moved, reduced = limits if self._size > 1 else (OWN_SLOT, OWN_SLOT)  # alone: few operations use it
            self.use_node(moved, reduced, BEFORE)
            self.tries = tuning._replace(segment_bytes=Tuning().segment_bytes) == Tuning()

    def open_node(self) -> None:
        """Make the memory that the ranks share, if they are on one node and there is room; collective."""
        with failures.translating("making the memory of the node", self._comm):
            self._open_node()

    def _open_node(self) -> None:
        if self._size == 1:
            self._own = aligned_zeros(fastpath.node_memory(0, 1, False, OWN_SLOT))
            self.map_node(address_of(self._own), OWN_SLOT, ONE_PHASE, LOOKS, NEVER)
            return
        from . import node_tree
        from .shared_memory import PAGE_BYTES, Mapping

        slot = min(LARGEST_SLOT, LARGEST_WINDOW // (2 * self._size + 1)) // PAGE_BYTES * PAGE_BYTES
        looks, yields = patience(self._comm)
        nbytes = [fastpath.node_memory(rank, self._size, yields >= 0, slot) for rank in range(self._size)]
        self._memory = Mapping.make(self._comm, nbytes) if self.is_in_thread else self._new_window(nbytes)
        if self._memory is None:
            self.map_node(0, 0, 0, 0, NEVER)
            return
        tree = None
        if self._size > node_tree.FLAT and yields == NEVER:
            tree = node_tree.parents(self._comm.allgather(node_tree.place(mpi_library.cores())))
        self.map_node(address_of(self._memory.parts[0]), slot, ONE_PHASE, looks, yields, tree)
        self.node_part = slot

    def _new_window(self, nbytes: list[int]) -> Window | None:
        from .shared_memory import MOST_NODE_WINDOWS, Window, has_room_to_spare, is_on_one_node, on_all

        is_possible = is_on_one_node(self._comm) and Window.alive < MOST_NODE_WINDOWS
        if not on_all(self._comm, is_possible and has_room_to_spare(sum(nbytes))):
            return None
        window = Window(self._comm, nbytes[self._rank], is_contiguous=True)
        if self._rank == 0:
            window.parts[0][: nbytes[0] - 3 * nbytes[1] // 2] = 0  # flags and cells
        self._comm.Barrier()
        return window

    def close_node(self) -> None:
        """Free the memory; called once, by every rank, when the group is destroyed."""
        if self._memory is not None:
            self.map_node(0, 0, 0, 0, NEVER)
            self.node_part = 0
            self._memory.free()
            self._memory = None

    def move_large(self, sends: list[tuple[int, Any]], receives: list[tuple[int, Any]]) -> None:
        """Send and receive the arrays of a sparse exchange that are too large for memory of the node."""
        requests = [self._comm.Irecv(message(array), source, SPARSE_LARGE) for source, array in receives]
        requests += [self._comm.Isend(message(array), dst, SPARSE_LARGE) for dst, array in sends]
        wait_for_all(requests)

    def failed(self, name: str, code: int) -> Exception:
        """Count a failed operation, and return the error that the program should see; `code` is MPI's, or negative."""
        self.note_failure()
        if code < 0:
            return self._failed(name, self.differing(name))
        error = MPI.Exception(code)
        seen = self._failed(name, error)
        seen.__cause__ = error
        return seen

    def _failed(self, name: str, error: Exception) -> Exception:
        """Count a failed operation, as the other ranks do, and return the error that the program should see."""
        if name in MESSAGES:
            self.messages += 1
        else:
            self.count += 1
        return self.dispatcher.identify_fast(as_backend_error(name, error, self._comm), name)

    def short(self, name: str, nbytes: int, expected: int) -> Exception:
        """Return the error that the program should see for a message shorter than its array."""
        return self.dispatcher.identify_fast(wrong_length(name, nbytes, expected), name)


def different_call(name: str, rank: int) -> DistBackendError:
    """Return the error of a call that differs on rank `rank` of the group; -1 - rank: of the collective before it."""
    calls, where = ("calls", "") if rank >= 0 else ("called", ", in the collective before this one")
    return DistBackendError(
        f"rank {max(rank, -1 - rank)} of the group {calls} another operation, or with another op, dtype, size or root"
        f"{where}; the arrays are undefined; run with HPCCOMM_DEBUG=DETAIL to compare the calls{on_rank()}",
        name,
    )


def _source_at() -> int:
    """Return the offset in bytes of the source in an MPI_Status, which depends on the library."""
    status = MPI.Status()
    memory: Any = MPI.memory.fromaddress(MPI._addressof(status), MPI._sizeof(status))
    integers = np.frombuffer(memory, np.intc)
    found = []
    for source in (1234567, 7654321):
        status.Set_source(source)
        found.append(set(np.flatnonzero(integers == source).tolist()))
    (place,) = found[0] & found[1]
    return 4 * int(place)


def _reductions() -> list[tuple[list[Any], str, dict[int, tuple[Any, ...]]]]:
    """Return for each op its keys, its letter in fold.h, and (datatype, op, kind, itemsize) for each dtype's number."""
    named: dict[Any, tuple[list[Any], str, dict[int, tuple[Any, ...]]]] = {}
    for (key, dtype), (datatype, op) in DIRECT.items():
        name = key if isinstance(key, str) else key.name.lower()
        keys, _, table = named.setdefault(name, ([], LETTERS.get(name, "-"), {}))
        if key not in keys:
            keys.append(key)
        for number in _numbers(dtype):
            table[number] = MPI._handleof(datatype), MPI._handleof(op), dtype.kind, dtype.itemsize
    return list(named.values())


@functools.cache
def _numbers(dtype: np.dtype[Any]) -> list[int]:
    """Return NumPy's numbers of the dtypes equal to `dtype`: long and long long have two."""
    return [each.num for each in map(np.dtype, np.typecodes["All"]) if each == dtype]


fastpath.set_up(
    MPI.__file__,
    {
        "in_place": int(MPI.IN_PLACE),
        "byte": MPI._handleof(MPI.BYTE),
        "any_source": MPI.ANY_SOURCE,
        "any_tag": MPI.ANY_TAG,
        "pairwise_tag": PAIRWISE,
        "largest_tag": LARGEST,
        "source_at": _source_at(),
        "status_bytes": MPI._sizeof(MPI.Status()),
        "handle_bytes": MPI._sizeof(MPI.REQUEST_NULL),
        "datatypes": {number: MPI._handleof(each) for dtype, each in TYPED.items() for number in _numbers(dtype)},
        "reductions": _reductions(),
        "sum": ReduceOp.SUM,
        "average": ReduceOp.AVG,
        "work_class": CompiledWork,
        "mpi_ops": [(mpi_op, op) for op, mpi_op in OPS.items() if op is not ReduceOp.AVG],
    },
    MPI.Exception,
    wrong_length,
    different_call,
)
fastpath.set_up_works(IN_FLIGHT, COMPLETED, work_info, Work, REAP_ABOVE, REAP_BYTES)
