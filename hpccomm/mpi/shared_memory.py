"""Arrays in the memory that the ranks of a node share, and the collectives that work on them where they are.

A node-shared array lies in a window made by MPI_Win_allocate_shared (MPI-4.1 §12.2.3): every rank of the node
has the whole window in its address space. A collective then needs no messages. Each rank takes a share of the work
and does it on everybody's arrays, between two barriers::

    rank 0's array   |= share 0 =|  share 1  |      rank 0 reduces share 0 of all arrays into share 0 of all arrays,
    rank 1's array   |= share 0 =|  share 1  |      rank 1 share 1, each in chunks that stay in its cache

This is the two-shot algorithm, whose steps (reduce your share, hand it out) are merged: while a chunk is in the
cache it is written to every array. No two ranks touch the same share between the barriers, so there is no race, and
each share is computed once, in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.overlap import address_of
from ..core.reduce_op import ReduceOp
from ..errors import here
from ..job.mpi_library import private, release
from ..process.tuning import Tuning
from .datatypes import ARITHMETIC, accumulation_dtype
from .layout import is_plain
from .works import as_backend_error

SHM_DIRECTORY = "/dev/shm"  # where MPICH and Open MPI keep the windows
PAGE_BYTES = 4096

UFUNCS = {
    "SUM": np.add,
    "AVG": np.add,  # divided afterwards
    "PREMUL_SUM": np.add,  # multiplied before
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
# What a rank tells the others of the call it makes: which collective, op, root, number of elements, dtype; and where
# its array is: the number of the window (-1: in none) and the offset in its part of it.
NOTE = struct.Struct("7q")
CALLS = ["all_reduce", "reduce", "reduce_scatter_single"]
OPS = list(UFUNCS)

# Windows that outlived their group, because the program still has arrays in them (Window.free).
_outliving: list[MPI.Win] = []


class Window:
    """One window: the same number of bytes from each rank of the node.

    `parts` are the ranks' memories as flat arrays of bytes. Every array in the window is a view of one of them, and
    NumPy makes that part its ``base``: so arrays are recognised, and so is a part that nobody uses any more.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        # not contiguous: each rank's memory has pages of its own, on the NUMA domain of that rank (MPI-4.1 §12.2.3)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        self._node = node
        # MPI_Win_allocate_shared and MPI_Win_free keep other threads from their work in MPI while they wait for other
        # ranks (MPICH 5.0 and Open MPI 5.0 do): so all ranks meet first, in a barrier, which does not.
        node.Barrier()
        self._win = MPI.Win.Allocate_shared(max(nbytes, 1), 1, info, node)
        info.Free()
        # Loads and stores need an epoch too, and Sync is only allowed inside one (MPI-4.1 §12.5.4).
        self._win.Lock_all(MPI.MODE_NOCHECK)
        memories: Any = (self._win.Shared_query(rank)[0] for rank in range(node.size))
        self.parts = [np.frombuffer(memory, np.uint8) for memory in memories]
        self.address = address_of(self.parts[node.rank])  # of this rank's part
        self.parts[node.rank][::PAGE_BYTES] = 0  # touched first by the rank that it belongs to
        node.Barrier()  # before another rank writes there

    def fence(self) -> None:
        """Wait for the other ranks, and make the stores of each visible to all."""
        # MPI-4.1 §12.8: in shared memory, synchronising the processes takes MPI_Win_sync on both sides of it.
        self._win.Sync()
        self._node.Barrier()
        self._win.Sync()

    def sync(self) -> None:
        """Order this rank's loads and stores in the window (half of a fence)."""
        self._win.Sync()

    def free(self) -> None:
        """Give the memory back, if on no rank the program still has an array in it. Collective over the node.

        Freeing unmaps the memory, and an array over unmapped memory kills the process that looks at it. A window
        in use is therefore left to the end of the process.
        """
        parts = [weakref.ref(part) for part in self.parts]
        self.parts = []
        in_use = any(part() is not None for part in parts)
        if self._node.allreduce(in_use, MPI.LOR):
            _outliving.append(self._win)
        else:
            self._win.Unlock_all()
            self._win.Free()


class SharedArrays:
    """The node-shared arrays of one group: makes them, finds them, and runs collectives on them.

    The collectives return whether they have done it; if not, MPI has to, on every rank. They agree on that: each rank
    writes down what it was given, all meet in a barrier, and all read the same notes. (An empty `windows` needs
    no agreement: `empty_shared` is collective, so it is empty on all ranks or on none.)
    """

    def __init__(self, comm: MPI.Intracomm, tuning: Tuning) -> None:
        self._comm = comm
        self._tuning = tuning
        self._node: Any = None
        self._notebook: Any = None
        self._made: list[Window] = []
        self.windows: dict[int, Window] = {}  # by the id of this rank's part, which they keep alive

    # -- arrays ----------------------------------------------------------------------------------

    def empty_shared(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Make an array in a new window; every rank of the group calls it."""
        if self._node is None:
            self._node = private(self._comm.Split_type(MPI.COMM_TYPE_SHARED), self._comm)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        self._agree(shape, dtype, nbytes)
        try:
            if self._notebook is None:
                self._open()
            window = Window(self._node, nbytes)
        except MPI.Exception as error:
            raise as_backend_error("empty_shared", error, self._comm) from error
        self._made.append(window)
        part = window.parts[self._node.rank]
        self.windows[id(part)] = window
        return np.ndarray(shape, dtype, part)

    def _open(self) -> None:
        """Make the memory in which the ranks of this node write down what they call."""
        self._node_ranks = self._node.allgather(self._comm.rank)  # the group ranks on this node
        self._is_on_one_node = 1 < self._comm.size == self._node.size
        # two notes for each rank, used in turn: a fast rank may write the next while a slow one still reads the last
        self._notebook = Window(self._node, 2 * NOTE.size)
        books = [part.data for part in self._notebook.parts]
        self._notes = [[book[start : start + NOTE.size] for book in books] for start in (0, NOTE.size)]
        self._turn = 0

    def _agree(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> None:
        """Raise on every rank if the ranks want different arrays, or more memory than there is on a node."""
        needed = self._node.size * nbytes
        refusal = why_no_room(needed) if self._node.size > 1 else ""
        wishes = self._comm.allgather((shape, dtype, needed, refusal))
        for rank, wish in enumerate(wishes):
            if wish[:2] != wishes[0][:2]:
                raise ValueError(
                    f"empty_shared: rank {rank} of the group asks for shape {wish[0]} and dtype {wish[1]}, but rank 0 "
                    f"for {wishes[0][0]} and {wishes[0][1]}; all ranks must ask for the same{here()}"
                )
        for _, _, needed, refusal in wishes:
            if refusal:
                raise MemoryError(
                    f"empty_shared: the ranks of a node need {needed} bytes in {SHM_DIRECTORY}, {refusal}; ask for "
                    f"less, or enlarge it (docker run --shm-size=..., mount -o remount,size=...){here()}"
                )

    def fence(self, array: Any) -> None:
        """Wait for the ranks of the node, and make the stores of each visible to all."""
        window = self._window_of("fence", array)
        try:
            window.fence()
        except MPI.Exception as error:
            raise as_backend_error("fence", error, self._comm) from error

    def peer_view(self, array: Any, group_rank: int) -> Any:
        """Return the view of another rank's memory that corresponds to `array`."""
        window = self._window_of("peer_view", array)
        if group_rank not in self._node_ranks:
            raise ValueError(
                f"peer_view: rank {group_rank} of the group is on another node, whose memory can't be seen from here; "
                f"those on this node are {', '.join(map(str, self._node_ranks))}{here()}"
            )
        part = window.parts[self._node_ranks.index(group_rank)]
        return np.ndarray(array.shape, array.dtype, part, self._offset(window, array), array.strides)

    def close(self) -> None:
        """Free the windows; called once, by every rank, when the group is destroyed."""
        if self._node is None:
            return
        self.windows.clear()
        self._notes = []
        for window in (*self._made, self._notebook):
            if window is not None:  # there was no room
                window.free()
        release(self._node)

    def _window_of(self, operation: str, array: Any) -> Window:
        window = self.windows.get(id(getattr(array, "base", None)))
        if window is None:
            raise ValueError(
                f"{operation}: array is not this rank's node-shared array of this group; make it with empty_shared, "
                f"and pass the same group{here()}"
            )
        return window

    def _offset(self, window: Window, array: Any) -> int:
        """Return the distance in bytes from the start of this rank's part of the window to the start of `array`."""
        return address_of(array) - window.address

    # -- collectives -----------------------------------------------------------------------------

    def all_reduce(self, array: Any, op: ReduceOp) -> bool:
        """Reduce the ranks' `array` in place, unless MPI has to."""
        if not self._takes(array, op):
            return False
        met = self._meet("all_reduce", op.name, 0, array, array)
        if met is None:
            return False
        window, arrays = met
        with np.errstate(all="ignore"):  # as MPI, which does not warn of overflow
            if op.factor is not None:  # each rank has its own factor
                np.multiply(array, op.factor, out=array, casting="same_kind")
                window.fence()
            scratch = self._scratch(array.dtype) if accumulation_dtype(array.dtype) is not array.dtype else None
            for part in self._own_parts(array.size, array.itemsize):
                chunks = [each[part] for each in arrays]
                total = _reduced(chunks, op, chunks[0] if scratch is None else scratch)
                for chunk in chunks[scratch is None :]:
                    np.copyto(chunk, total, casting="unsafe")
        window.fence()
        return True

    def reduce(self, array: Any, root: int, op: ReduceOp) -> bool:
        """Reduce the ranks' `array` into that of rank `root`, unless MPI has to."""
        if not self._takes(array, op) or op.factor is not None:
            return False
        met = self._meet("reduce", op.name, root, array, array)
        if met is None:
            return False
        window, arrays = met
        scratch = self._scratch(array.dtype)
        with np.errstate(all="ignore"):
            for part in self._own_parts(array.size, array.itemsize):
                total = _reduced([each[part] for each in arrays], op, scratch)
                np.copyto(arrays[root][part], total, casting="unsafe")
        window.fence()
        return True

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp) -> bool:
        """Reduce this rank's part of the ranks' `array` into `output`, unless MPI has to."""
        if not self._takes(array, op) or op.factor is not None:
            return False
        usable = is_plain(output) and not np.may_share_memory(array, output)  # others read array while it is written
        met = self._meet("reduce_scatter_single", op.name, 0, array, array if usable else None)
        if met is None:
            return False
        window, arrays = met
        flat, mine = output.reshape(-1), self._comm.rank * output.size
        scratch = self._scratch(output.dtype) if accumulation_dtype(output.dtype) is not output.dtype else None
        with np.errstate(all="ignore"):
            for part in parts(0, output.size, self._tuning.shared_chunk_bytes // output.itemsize):
                chunks = [each[mine + part.start : mine + part.stop] for each in arrays]
                total = _reduced(chunks, op, flat[part] if scratch is None else scratch)
                if scratch is not None:
                    np.copyto(flat[part], total, casting="unsafe")
        window.fence()
        return True

    def _takes(self, array: Any, op: ReduceOp) -> bool:
        """Return whether a reduction may be done here: the same answer on all ranks."""
        if array.nbytes < self._tuning.shared_bytes or not self._is_on_one_node or op.mpi_op is not None:
            return False
        return array.dtype in ARITHMETIC or (accumulation_dtype(array.dtype) is not array.dtype and op.factor is None)

    def _meet(self, call: str, op: str, root: int, array: Any, usable: Any) -> tuple[Window, list[Any]] | None:
        """Wait for all ranks; return the window, whose fence is due afterwards, and everybody's `array`, flat.

        Return None if on some rank it can't be worked on where it is (`usable` is None, in ordinary memory, or has
        gaps); raise on every rank if they have not made the same call.
        """
        window = self.windows.get(id(usable.base)) if usable is not None and is_plain(usable) else None
        number, offset = -1, 0
        if window is not None:
            number, offset = self._made.index(window), self._offset(window, usable)
            window.sync()
        kind = ord(array.dtype.kind) << 8 | array.itemsize  # long and long long are alike, where both have 8 bytes
        mine = NOTE.pack(CALLS.index(call), OPS.index(op), root, array.size, kind, number, offset)
        notes = self._notes[self._turn]
        self._turn = 1 - self._turn
        notes[self._node.rank][:] = mine
        self._notebook.fence()
        read = [note.tobytes() for note in notes]
        offsets = (offset,) * len(read)
        if read.count(mine) < len(read):
            *calls, numbers, offsets = zip(*map(NOTE.unpack, read))
            if any(len(set(column)) > 1 for column in calls):
                self._raise_mismatch(call, f"{op.lower()} root={root} size={array.size} dtype={array.dtype}")
            if len(set(numbers)) > 1:
                return None
        if window is None:
            return None
        window.sync()
        return window, [np.ndarray(array.size, array.dtype, *place) for place in zip(window.parts, offsets)]

    def _raise_mismatch(self, call: str, arguments: str) -> None:
        calls = self._node.allgather(f"{call} {arguments}")
        rank = next(rank for rank, other in enumerate(calls) if other != calls[self._node.rank])
        raise ValueError(
            f"{call}: the ranks of the group do not make the same call: {calls[self._node.rank]!r} here, "
            f"{calls[rank]!r} on rank {rank} of the group{here()}"
        )

    def _own_parts(self, count: int, itemsize: int) -> Iterator[slice]:
        """Yield the chunks of the share of `count` elements that this rank works on."""
        return parts(*share(self._comm.rank, self._comm.size, count), self._tuning.shared_chunk_bytes // itemsize)

    def _scratch(self, dtype: np.dtype[Any]) -> Any:
        return np.empty(self._tuning.shared_chunk_bytes // dtype.itemsize, accumulation_dtype(dtype))


def share(rank: int, ranks: int, count: int) -> tuple[int, int]:
    """Return the share of `rank`, (start, stop), when `ranks` divide `count` elements."""
    length = -(-count // (ranks * 64)) * 64  # so that no two ranks write to one cache line
    return min(rank * length, count), min((rank + 1) * length, count)


def parts(start: int, stop: int, step: int) -> Iterator[slice]:
    """Yield the elements from `start` to `stop` in slices of `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _reduced(chunks: list[Any], op: ReduceOp, into: Any) -> Any:
    """Reduce chunks in their order, in the dtype of `into`, a scratch (of at least that size) or the first chunk."""
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
    """Return the reason against windows of `nbytes`, of all ranks of the node together; "" if there is none.

    The ranks have to know beforehand: Open MPI tells only the rank that can't make the file, and the others wait for
    ever. And where the file is larger than what is free, the first store beyond would end the process with SIGBUS.
    """
    free = free_bytes()
    if free is None:
        return ""
    if nbytes > free:
        return f"where {free} are free"
    try:
        with tempfile.TemporaryFile(dir=SHM_DIRECTORY) as file:
            file.truncate(max(nbytes, PAGE_BYTES))
            mmap.mmap(file.fileno(), max(nbytes, PAGE_BYTES)).close()
    except OSError as error:  # a limit of the process, a quota, a mount that may not be written to
        return f"where this process can't have them ({error.strerror})"
    return ""


def free_bytes() -> int | None:
    """Return the number of bytes free for windows on this node; None if it is not known."""
    try:
        status = os.statvfs(SHM_DIRECTORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
