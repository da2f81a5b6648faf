"""OrderedBackend: reductions in rank order, bitwise the same on every MPI library, transport and layout of the ranks.

MPI only moves the arrays, and NumPy combines them, always as ``((x0 + x1) + x2) + ...``. Of a large array every rank
gets one segment from all others (all_to_all), combines them, and gives the result to all (all_gather): what is sent is
what a ring sends. A small array goes to everybody at once. Large arrays go in pieces, so that the room for what the
others sent does not grow with them.
"""

from __future__ import annotations

import functools
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.options import BackendOptions
from ..core.over_mpi import BackendOverMPI
from ..core.reduce_op import ReduceOp
from ..core.work import JoinedWork, Work
from .backend import THREAD_MULTIPLE, of_the_thread
from .communication_thread import CommunicationThread
from .datatypes import arithmetic_type, message, parts
from .layout import by_dtype, packed, unaliased, unpack_into
from .segments import columns, segments
from .shared_memory import UFUNCS
from .works import done

GATHERED_BYTES = 64 << 10  # from all ranks together; larger arrays are cut into segments
PIECE_BYTES = 4 << 20


class OrderedBackend(BackendOverMPI):
    """MPI, with reductions in rank order."""

    name = "ordered"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self._comm: MPI.Intracomm = options.comm  # type: ignore[assignment]  # MPI's backend has asked for it
        # MPI's thread, because there can't be two in one group; what it does besides is left to MPI as here
        self._thread = self.mpi._thread = CommunicationThread(
            self._comm, lambda comm: OrderedBackend(of_the_thread(options, comm))
        )

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(array, op):
            return super().all_reduce(array, op, async_op)
        flat = array.reshape(-1)
        if self._goes_to_all(array, async_op):
            return self._from_all(array, async_op, lambda rows: fold(rows, op, flat))
        if async_op:
            return self._thread.launch("all_reduce", array, op)
        for piece in segments(flat, PIECE_BYTES):
            counts, mine = self._segments(piece)
            fold(self._exchanged(piece, counts), op, mine)
            self._comm.Allgatherv(MPI.IN_PLACE, parts(piece, counts))
        return None

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        works = []
        for indices in by_dtype(arrays):
            same = [arrays[i] for i in indices]
            flat = np.concatenate(same, axis=None)
            work, unpack = self.all_reduce(flat, op, async_op), partial(unpack_into, flat, same)
            if work is None:
                unpack()
            else:
                work.finish_with(unpack, None)
                works.append(work)
        return JoinedWork(works) if works else None

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(array, op):
            return super().reduce(array, root, op, async_op)
        flat = array.reshape(-1)
        if self._goes_to_all(array, async_op):
            call = self._comm.Igather if async_op else self._comm.Gather
            if self.rank != root:
                return done(call(message(array), None, root), None, array)
            rows = self._room(array)
            return done(call(message(array), message(rows), root), lambda: fold(rows, op, flat), array, rows)
        if async_op:
            return self._thread.launch("reduce", array, root, op)
        for piece in segments(flat, PIECE_BYTES):
            counts, mine = self._segments(piece)
            total = np.empty_like(mine)
            fold(self._exchanged(piece, counts), op, total)
            self._comm.Gatherv(message(total), parts(piece, counts) if self.rank == root else None, root)
        return None

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(array, op):
            return super().reduce_scatter_single(output, array, op, async_op)
        if array.nbytes <= PIECE_BYTES or (async_op and not THREAD_MULTIPLE):
            call = self._comm.Ialltoall if async_op else self._comm.Alltoall
            rows = self._room(output)
            return done(
                call(message(array), message(rows)), lambda: fold(rows, op, output.reshape(-1)), array, rows, output
            )
        if async_op:
            return self._thread.launch("reduce_scatter_single", output, array, op)
        for piece, target in columns(unaliased(array, output), output, self.size, PIECE_BYTES):
            rows = self._room(target)
            self._comm.Alltoall(message(piece), message(rows))
            fold(rows, op, target)
        return None

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(output, op):
            return super().reduce_scatter(output, inputs, op, async_op)
        flat, counts = packed(inputs)
        rows = self._room(output)
        call = self._comm.Ialltoallv if async_op else self._comm.Alltoallv
        request = call(parts(flat, counts), parts(rows, [output.size] * self.size))
        return done(request, lambda: fold(rows, op, output.reshape(-1)), flat, rows, output)

    def scan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(array, op):
            return super().scan(array, op, async_op)
        return self._scan("scan", array, self.rank + 1, op, async_op)

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(array, op):
            return super().exscan(array, op, async_op)
        return self._scan("exscan", array, self.rank, op, async_op)

    def _scan(self, name: str, array: Any, ranks: int, op: ReduceOp, async_op: bool) -> Work | None:
        """Combine the arrays of the first `ranks` ranks, which is this one's number or one more."""
        flat = array.reshape(-1)
        if self._goes_to_all(array, async_op):
            return self._from_all(array, async_op, lambda rows: fold(rows[:ranks], op, flat))
        if async_op:
            return self._thread.launch(name, array, op)
        for piece in segments(flat, PIECE_BYTES):
            counts, mine = self._segments(piece)
            rows = self._exchanged(piece, counts)
            for before, row in pairwise(rows):
                fold([before, row], op, row)
            if name == "exscan":
                rows = np.roll(rows, 1, axis=0)
            target = piece if ranks else np.empty_like(piece)
            self._comm.Alltoallv(parts(rows, [mine.size] * self.size), parts(target, counts))
        return None

    def _goes_to_all(self, array: Any, async_op: bool) -> bool:
        return bool(array.nbytes * self.size <= GATHERED_BYTES or (async_op and not THREAD_MULTIPLE))

    def _from_all(self, array: Any, async_op: bool, finish: Any) -> Work | None:
        rows = self._room(array)
        call = self._comm.Iallgather if async_op else self._comm.Allgather
        return done(call(message(array), message(rows)), partial(finish, rows), array, rows)

    def _room(self, array: Any) -> Any:
        """Return memory for an array of each rank."""
        return np.empty((self.size, array.size), array.dtype)

    def _segments(self, piece: Any) -> tuple[list[int], Any]:
        """Return the sizes of all ranks' segments, and this rank's."""
        counts, starts = segment_sizes(piece.size, self.size)
        return counts, piece[starts[self.rank] :][: counts[self.rank]]

    def _exchanged(self, piece: Any, counts: list[int]) -> Any:
        """Return this rank's segment as each rank has it."""
        rows = np.empty((self.size, counts[self.rank]), piece.dtype)
        self._comm.Alltoallv(parts(piece, counts), parts(rows, [counts[self.rank]] * self.size))
        return rows


def order_matters(array: Any, op: ReduceOp) -> bool:
    """Say whether the order decides about the last bits: not of integers, except in an operation of the program's."""
    return array.dtype.kind in "fc" or op.mpi_op is not None


def fold(rows: Any, op: ReduceOp, out: Any) -> None:
    """Combine flat arrays from the first to the last, into `out`, which may be one of the first two."""
    if op.mpi_op is not None:
        fold_by_mpi(rows, op.mpi_op, arithmetic_type(out.dtype, op), out)
        return
    if len(rows) < 2:
        if len(rows):
            out[...] = rows[0]
        return
    ufunc = UFUNCS[op.name]
    with np.errstate(all="ignore"):  # as MPI, which does not warn of overflow
        ufunc(rows[0], rows[1], out=out)
        for row in rows[2:]:
            ufunc(out, row, out=out)


def fold_by_mpi(rows: Any, op: MPI.Op, datatype: MPI.Datatype, out: Any) -> None:
    """Do the same by MPI_Reduce_local, which combines into its second array."""
    for before, row in pairwise(rows):
        op.Reduce_local((before, datatype), (row, datatype))
    if len(rows):
        out[...] = rows[-1]


@functools.lru_cache
def segment_sizes(size: int, ranks: int) -> tuple[list[int], list[int]]:
    """Return how many of `size` elements are each rank's, as equally as possible, and where they begin."""
    ends = [size * (rank + 1) // ranks for rank in range(ranks)]
    starts = [0, *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)], starts
