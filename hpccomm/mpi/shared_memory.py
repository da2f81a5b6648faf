"""Arrays in memory that the ranks of a node share, and collectives that work on them in place.

A node-shared array lies in a window made by MPI_Win_allocate_shared (MPI-4.1 §12.2.3), which every rank of the node
has in its address space. So a collective needs no messages: each rank reduces its share of all arrays, between two
barriers::

    rank 0's array   |= share 0 =|  share 1  |      rank 0 reduces share 0 of all arrays into share 0 of all arrays,
    rank 1's array   |= share 0 =|  share 1  |      rank 1 share 1, each in chunks that stay in its cache

This is the two-shot algorithm with its two steps merged: a chunk is written to every array while it is in the cache.
Only one rank accesses a share, so there is no race, and all ranks get the same bits: those of a sum in rank order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..core.arithmetic import UFUNCS, multiplied
from ..core.overlap import address_of, extent
from ..core.reduce_op import ReduceOp
from ..core.timeouts import pause
from ..errors import on_rank
from ..job.mpi_library import private, release
from ..native import fastpath
from ..process.tuning import Tuning
from .datatypes import ARITHMETIC, accumulation_dtype
from .layout import is_plain

T = TypeVar("T")
NAME_BYTES = 16
LONGEST_PAUSE = 0.01  # seconds, of two threads that wait for each other
SHM_DIRECTORY = "/dev/shm"  # MPICH and Open MPI keep the windows there
ENLARGE = "ask for less, or enlarge it (docker run --shm-size=..., mount -o remount,size=...)"
PAGE_BYTES = 4096
FINALIZE_FREES = MPI.get_vendor()[0] == "Open MPI"  # remaining windows, each waiting for all its ranks

# MPICH has 2048 context ids, one for each window and some for each group, and crashes (SIGSEGV) when they are used up.
MOST_WINDOWS = sys.maxsize if FINALIZE_FREES else 1500  # of a process
MOST_NODE_WINDOWS = min(256, MOST_WINDOWS)  # further ids are left to groups, which then do without memory of the node

# A rank's note of its call for the others: collective, op, root, number of elements, dtype; and the place of its array:
# the number of the window (-1: none) and the offset in this rank's part of it.
NOTE = struct.Struct("7q")
CALLS = ["all_reduce", "reduce", "reduce_scatter_single"]
OPS = list(UFUNCS)

Place = tuple[bytes, int, int]  # of a node-shared array: the name of its window, the rank in the node, the offset there

# Windows with node-shared arrays, by a name that is the same on all ranks of the node
_named: weakref.WeakValueDictionary[bytes, Window] = weakref.WeakValueDictionary()

_making = Lock()  # for in_one_thread

# Windows that outlived their group, because the program still has arrays in them (Window.free).
_outliving: list[MPI.Win] = []

# Without the compiled extension: Open MPI's MPI_Finalize frees windows in the order of its table. A new window would
# take a freed one's place, which may differ between ranks. So a window of this rank alone fills that place.
_table: list[MPI.Win] = []
_stand_ins: list[MPI.Win] = []
IN_ORDER = FINALIZE_FREES and fastpath is None


class Window:
    """One window: memory of each rank of the node.

    `parts` are the ranks' memories as flat arrays of bytes. NumPy makes a part the ``base`` of every array in it: the
    base identifies such arrays, and shows when no array uses a part any more.
    """

    alive = 0  # in this process
    shapes: tuple[tuple[int, ...], ...] = ()  # of the arrays of empty_shared, by the rank in the node
    dtype: Any = None  # of the same arrays

    def __init__(self, node: MPI.Intracomm, nbytes: int, is_contiguous: bool = False) -> None:
        # If not contiguous, each rank's memory has its own pages, in that rank's NUMA domain (MPI-4.1 §12.2.3).
        info = MPI.Info.Create({"alloc_shared_noncontig": "false" if is_contiguous else "true"})
        self._node = node
        # MPI_Win_allocate_shared and MPI_Win_free keep this process's other threads out of MPI while they wait for
        # other ranks (MPICH 5.0, Open MPI 5.0). A reduction does not, so all ranks meet in one first.
        name = np.frombuffer(os.urandom(8), np.uint64).copy()
        node.Allreduce(MPI.IN_PLACE, name, MPI.MAX)
        self._name = int(name[0])
        # For every new window Open MPI's osc/ucx opens and closes UCX, which two threads must not do at once.
        self._win = in_one_thread(node, partial(_allocated, nbytes, info, node))
        Window.alive += 1
        info.Free()
        # Loads and stores need an epoch too, and Sync is allowed only inside one (MPI-4.1 §12.5.4).
        self._win.Lock_all(MPI.MODE_NOCHECK)
        if FINALIZE_FREES and fastpath is not None:
            fastpath.keep_window(MPI._handleof(self._win), self._name)
        memories: Any = (self._win.Shared_query(rank)[0] for rank in range(node.size))
        self.parts = [np.frombuffer(memory, np.uint8) for memory in memories]
        self.rank = node.rank
        self.address = address_of(self.parts[self.rank])  # of this rank's part
        self.parts[node.rank][::PAGE_BYTES] = 0  # first touched by the rank that owns it
        node.Barrier()  # before another rank writes there

    def fence(self) -> None:
        """Wait for the other ranks, and make the stores of each visible to all."""
        # MPI-4.1 §12.8: processes that synchronise over shared memory call MPI_Win_sync before and afterwards.
        self._win.Sync()
        self._node.Barrier()
        self._win.Sync()

    def sync(self) -> None:
        """Order this rank's loads and stores in the window (half of a fence)."""
        self._win.Sync()

    def free(self) -> None:
        """Free the memory, unless the program still has an array in it on some rank. Collective over the node.

        An array over unmapped memory would kill the process that reads it, so such a window stays until the process
        ends.
        """
        parts = [weakref.ref(part) for part in self.parts]
        self.parts = []
        in_use = any(part() is not None for part in parts)
        if not on_all(self._node, not in_use):
            _outliving.append(self._win)
        else:
            if FINALIZE_FREES and fastpath is not None:
                fastpath.drop_window(self._name)
            self._win.Unlock_all()
            if IN_ORDER:
                in_one_thread(self._node, partial(_free_in_place, self._win))
            else:
                self._win.Free()
            Window.alive -= 1


class Mapping:
    """Memory that the ranks of a node share without a window: a file in memory, unlinked when all ranks have mapped it.

    The communication thread uses it, because the program's thread may be making or freeing a window, and only one
    thread can do so at a time. `parts` has one array of bytes, the memory of all ranks, zero at first.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.parts = [np.frombuffer(memory, np.uint8)]

    def free(self) -> None:
        """Free the memory."""
        self.parts = []

    @classmethod
    def make(cls, comm: MPI.Intracomm, nbytes: list[int]) -> Mapping | None:
        """Return memory with `nbytes[r]` bytes for each rank r; None, on all ranks, if one can't map it. Collective."""
        memory, is_first = None, comm.rank == 0
        name = comm.bcast(os.path.join(SHM_DIRECTORY, f"hpccomm-thread-{os.urandom(NAME_BYTES).hex()}"))
        if is_first and has_room_to_spare(sum(nbytes)):
            memory = _mapped(name, os.O_CREAT | os.O_EXCL, nbytes, 0)
        try:
            if on_all(comm, not is_first or memory is not None) and not is_first:
                memory = _mapped(name, 0, nbytes, comm.rank)  # on another node there is no such file
            has_all = on_all(comm, memory is not None)
        finally:  # also if a rank has died
            if is_first:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        return cls(memory) if has_all and memory is not None else None


def _mapped(name: str, how: int, nbytes: list[int], rank: int) -> mmap.mmap | None:
    """Map a file, with pages allocated for this rank's part; return None if that is not possible."""
    try:
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC | how, 0o600)
    except OSError:
        return None
    try:
        if how:
            os.truncate(file, sum(nbytes))
        os.posix_fallocate(file, sum(nbytes[:rank]), nbytes[rank])  # otherwise a store could raise SIGBUS
        return mmap.mmap(file, sum(nbytes))
    except OSError:
        return None
    finally:
        os.close(file)


def _allocated(nbytes: int, info: MPI.Info, comm: MPI.Intracomm) -> MPI.Win:
    window = MPI.Win.Allocate_shared(max(nbytes, 1), 1, info, comm)
    if IN_ORDER:
        _table.append(window)
    return window


def _free_in_place(window: MPI.Win) -> None:
    """Free a window; fill its place in the table while there are windows behind it."""
    place = _table.index(window)
    window.Free()
    _table[place] = MPI.Win.Allocate_shared(1, comm=MPI.COMM_SELF)
    _stand_ins.append(_table[place])
    while _table and _table[-1] in _stand_ins:
        _stand_ins.remove(_table[-1])
        _table.pop().Free()


def place_of(array: Any) -> Place | None:
    """Return the place of a part of this rank's node-shared arrays, for other ranks; None for other memory."""
    start, end = extent(array, address_of(array))
    for name, window in _named.items():
        rank = window.rank
        if window.parts and window.address <= start and end <= window.address + window.parts[rank].nbytes:
            return name, rank, address_of(array) - window.address
    return None


def names() -> frozenset[bytes]:
    """Return the names of the windows that this process has mapped."""
    return frozenset(name for name, window in _named.items() if window.parts)


def mapped(place: Place) -> int:
    """Return the address in this process of a place in a node-shared array."""
    name, rank, offset = place
    return address_of(_named[name].parts[rank]) + offset


class SharedArrays:
    """The node-shared arrays of one group: makes them, finds them, and runs collectives on them.

    A collective returns False, on every rank, if MPI has to do it. The ranks agree on that: each writes a note of its
    call, all meet in a barrier, and all read the same notes. (They skip this while `windows` is empty. It is empty on
    all ranks or on none, because `empty_shared` is collective.)
    """

    def __init__(self, comm: MPI.Intracomm, tuning: Tuning, windows: dict[int, Window]) -> None:
        self._comm = comm
        self._tuning = tuning
        self._node: Any = None
        self._notebook: Any = None
        self._made: list[Window] = []
        self.windows = windows  # by the id of this rank's part, which each window keeps alive

    # -- arrays ----------------------------------------------------------------------------------

    def empty_shared(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Make an array in a new window; every rank of the group calls it."""
        if self._node is None:
            self._node = split_by_node(self._comm)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        shapes = self._agree(shape, dtype, nbytes)
        if self._notebook is None:
            self._open()
        window = Window(self._node, nbytes)
        window.shapes, window.dtype = shapes, dtype
        self._made.append(window)
        part = window.parts[self._node.rank]
        self.windows[id(part)] = window
        _named[self._node.bcast(os.urandom(NAME_BYTES))] = window
        return np.ndarray(shape, dtype, part)

    def _open(self) -> None:
        """Make the memory for the notes of this node's ranks."""
        self._node_ranks = self._node.allgather(self._comm.rank)  # group ranks on this node
        self._is_on_one_node = 1 < self._comm.size == self._node.size
        # two notes for each rank, used in turn: a fast rank may write the next while a slow one still reads the last
        self._notebook = Window(self._node, 2 * NOTE.size)
        books = [part.data for part in self._notebook.parts]
        self._notes = [[book[start : start + NOTE.size] for book in books] for start in (0, NOTE.size)]
        self._turn = 0

    def _agree(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes on this node; raise on every rank if dtypes differ or a node lacks memory."""
        shapes, sizes = zip(*self._node.allgather((shape, nbytes)))
        needed = sum(sizes)
        refusal = why_no_room(needed) if self._node.size > 1 else why_no_memory(needed)
        wishes = self._comm.allgather((dtype, needed, refusal))
        for rank, (other, _, _) in enumerate(wishes):
            if other != wishes[0][0]:
                raise ValueError(
                    f"empty_shared: rank {rank} of the group asks for dtype {other}, but rank 0 for {wishes[0][0]}; "
                    f"all ranks must ask for the same{on_rank()}"
                )
        for _, needed, refusal in wishes:
            if refusal:
                raise MemoryError(f"empty_shared: the ranks of a node need {needed} bytes{refusal}{on_rank()}")
        return shapes

    def fence(self, array: Any) -> None:
        """Wait for the ranks of the node, and make the stores of each visible to all."""
        self._window_of("fence", array).fence()

    def peer_view(self, array: Any, group_rank: int) -> Any:
        """Return the view of another rank's array that corresponds to `array`."""
        window = self._window_of("peer_view", array)
        if group_rank not in self._node_ranks:
            raise ValueError(
                f"peer_view: rank {group_rank} of the group is on another node, whose memory can't be seen from here; "
                f"those on this node are {', '.join(map(str, self._node_ranks))}{on_rank()}"
            )
        peer = self._node_ranks.index(group_rank)
        part, shape, own = window.parts[peer], window.shapes[peer], window.shapes[window.rank]
        if shape == own:
            return np.ndarray(array.shape, array.dtype, part, address_of(array) - window.address, array.strides)
        if (array.shape, array.dtype) != (own, window.dtype) or not is_plain(array):
            raise ValueError(
                f"peer_view: the array has shape {own} here and {shape} on rank {group_rank} of the group, so a view "
                f"of it has no counterpart there; give the array that empty_shared has returned{on_rank()}"
            )
        return np.ndarray(shape, array.dtype, part)

    def close(self) -> None:
        """Free the windows; called once, by every rank, when the group is destroyed."""
        self.windows.clear()
        self._notes = []
        for window in self._made:
            window.free()
        if self._notebook is not None:
            self._notebook.free()
        if self._node is not None:
            release(self._node)

    def _window_of(self, operation: str, array: Any) -> Window:
        window = self.windows.get(id(getattr(array, "base", None)))
        if window is None:
            raise ValueError(
                f"{operation}: array is not this rank's node-shared array of this group; make it with empty_shared, "
                f"and pass the same group{on_rank()}"
            )
        return window

    # -- collectives -----------------------------------------------------------------------------

    def reduces(self, name: str, array: Any, op: ReduceOp, root: int = 0, output: Any = None) -> bool:
        """Do an all_reduce, a reduce or a reduce_scatter_single; return False if MPI has to."""
        if not self._takes(array, op) or (op.factor is not None and name != "all_reduce"):
            return False
        # other ranks read `array` while `output` is written
        is_usable = output is None or (is_plain(output) and not np.may_share_memory(array, output))
        met = self._meet(name, op.name, root, array, array if is_usable else None)
        if met is None:
            return False
        window, arrays = met
        rank, dtype = self._comm.rank, array.dtype
        targets, (start, stop) = arrays, share(rank, self._comm.size, array.size)  # this rank's part of the work
        if name == "reduce":
            targets = [arrays[root]]
        elif output is not None:
            arrays = [each[rank * output.size : (rank + 1) * output.size] for each in arrays]
            targets, start, stop = [output.reshape(-1)], 0, output.size
        step = self._tuning.shared_chunk_bytes // dtype.itemsize
        wide = accumulation_dtype(dtype)
        scratch = np.empty(step, wide) if wide is not dtype or name == "reduce" else None
        with np.errstate(all="ignore"):  # no warnings of overflow, as in MPI
            if op.factor is not None:  # each rank has its own factor
                multiplied(array, op, array)
                window.fence()
            for first in range(start, stop, step):
                part = slice(first, min(first + step, stop))
                chunks = [each[part] for each in arrays]
                into = chunks if targets is arrays else [each[part] for each in targets]
                total = _reduced(chunks, op, into[0] if scratch is None else scratch)
                for chunk in into[scratch is None :]:
                    np.copyto(chunk, total, casting="unsafe")
        window.fence()
        return True

    def _takes(self, array: Any, op: ReduceOp) -> bool:
        """Return whether a reduction may be done here; the answer is the same on all ranks."""
        if array.nbytes < self._tuning.shared_bytes or not self._is_on_one_node or op.mpi_op is not None:
            return False
        return array.dtype in ARITHMETIC or (accumulation_dtype(array.dtype) is not array.dtype and op.factor is None)

    def _meet(self, call: str, op: str, root: int, array: Any, usable: Any) -> tuple[Window, list[Any]] | None:
        """Wait for all ranks; return the window, which the caller must fence afterwards, and every rank's flat `array`.

        Return None if MPI has to do it: on some rank `usable` is None, in ordinary memory, or has gaps. Raise on every
        rank if their calls differ.
        """
        window = self.windows.get(id(usable.base)) if usable is not None and is_plain(usable) else None
        number, offset = -1, 0
        if window is not None:
            number, offset = self._made.index(window), address_of(usable) - window.address
            window.sync()
        mine = NOTE.pack(CALLS.index(call), OPS.index(op), root, array.size, kind(array.dtype), number, offset)
        notes = self._notes[self._turn]
        self._turn = 1 - self._turn
        notes[self._node.rank][:] = mine
        self._notebook.fence()
        read = [note.tobytes() for note in notes]
        offsets = (offset,) * len(read)
        if read.count(mine) < len(read):
            *calls, numbers, offsets = zip(*map(NOTE.unpack, read))
            if any(len(set(column)) > 1 for column in calls):
                raise mismatch(self._node, f"{call} {op.lower()} root={root} size={array.size} dtype={array.dtype}")
            if len(set(numbers)) > 1:
                return None
        if window is None:
            return None
        window.sync()
        return window, [np.ndarray(array.size, array.dtype, *place) for place in zip(window.parts, offsets)]


def on_all(comm: MPI.Intracomm, mine: bool) -> bool:
    """Return whether `mine` is true on all ranks; collective.

    `comm.allreduce` can't be used: its first call duplicates `comm` while it blocks Python's other threads.
    """
    answer = np.array(mine, np.intc)
    comm.Allreduce(MPI.IN_PLACE, answer, MPI.MIN)
    return bool(answer)


def in_one_thread(comm: MPI.Intracomm, make: Callable[[], T]) -> T:
    """Return the result of `make`, a collective call on `comm`, made while no rank has another thread in here.

    A rank that waited for the lock, or while holding it, could block another rank's thread. So all ranks first meet,
    then all try to take the lock, and all try again if one can't.
    """
    on_all(comm, True)
    while True:
        is_alone = _making.acquire(blocking=False)
        try:
            if on_all(comm, is_alone):
                return make()
        finally:
            if is_alone:
                _making.release()
        pause(os.urandom(1)[0] / 255 * LONGEST_PAUSE)


def kind(dtype: np.dtype[Any]) -> int:
    """Return a number for a dtype: the same for long and long long if both have 8 bytes."""
    return ord(dtype.kind) << 8 | dtype.itemsize


def mismatch(comm: MPI.Intracomm, call: str) -> ValueError:
    """Return the error of ranks whose `call`, "name arguments", is not the same; collective over `comm`."""
    calls = comm.allgather(call)
    rank = next(rank for rank, other in enumerate(calls) if other != call)
    return ValueError(
        f"{call.split()[0]}: the ranks of the group do not make the same call: {call!r} here, {calls[rank]!r} on rank "
        f"{rank} of the group{on_rank()}"
    )


def share(rank: int, ranks: int, count: int) -> tuple[int, int]:
    """Return the share of `rank` of `count` elements, (start, stop)."""
    length = -(-count // (ranks * 64)) * 64  # so that no two ranks write to one cache line
    return min(rank * length, count), min((rank + 1) * length, count)


def _reduced(chunks: list[Any], op: ReduceOp, into: Any) -> Any:
    """Return the chunks reduced in their order, in `into`: the first chunk, or a scratch of a wider dtype."""
    first, *others = chunks
    total = into[: first.size]
    if into is not first:
        np.copyto(total, first)
    ufunc = UFUNCS[op.name]
    for chunk in others:
        ufunc(total, chunk, out=total)
    if op is ReduceOp.AVG:
        np.divide(total, len(chunks), out=total)
    return total


def why_no_room(nbytes: int) -> str:
    """Return the reason against windows of `nbytes`, of all ranks of the node together, and the remedy; or "".

    It is checked beforehand: Open MPI raises only on the rank that can't make the file, and the others wait forever;
    and the first store beyond the free memory would end the process with SIGBUS.
    """
    if Window.alive >= MOST_WINDOWS:
        return f", but this process has {Window.alive} windows already; destroy groups, or free what *_init has made"
    free = free_bytes()
    if free is None:
        return ""
    if nbytes > free:
        return f" in {SHM_DIRECTORY}, where {free} are free; {ENLARGE}"
    try:
        file = os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR)
        try:
            os.truncate(file, max(nbytes, PAGE_BYTES))
            mmap.mmap(file, max(nbytes, PAGE_BYTES)).close()
        finally:
            os.close(file)
    except OSError as error:  # a limit of the process, a quota, a read-only mount
        return f" in {SHM_DIRECTORY}, where this process can't have them ({error.strerror}); {ENLARGE}"
    return ""


def why_no_memory(nbytes: int) -> str:
    """Return the reason against a window of `nbytes` of the only rank of a node, or ""."""
    try:
        mmap.mmap(-1, max(nbytes, PAGE_BYTES)).close()
    except (OSError, OverflowError, ValueError) as error:
        return f", which this process can't have ({error})"
    return ""


def split_by_node(comm: MPI.Intracomm) -> Any:
    """Return the communicator of the ranks of this node; collective over `comm`."""
    return private(in_one_thread(comm, partial(comm.Split_type, MPI.COMM_TYPE_SHARED)), comm)


def is_on_one_node(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks of `comm` share memory; collective. If MPI fails, the ranks' answers may differ."""
    try:
        node = split_by_node(comm)
    except MPI.Exception:  # MPICH has no context id left
        return False
    size = node.size
    release(node)
    return bool(size == comm.size)


def has_room_to_spare(nbytes: int) -> bool:
    """Return whether there is memory for a window that only makes operations faster, and as much left for others."""
    free = free_bytes()
    return (free is None or 2 * nbytes <= free) and not why_no_room(nbytes)


def free_bytes() -> int | None:
    """Return the number of bytes free for windows on this node; None if it is not known."""
    try:
        status = os.statvfs(SHM_DIRECTORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
