"""OrderedBackend: reductions in rank order, bitwise the same on every MPI library, transport and layout of the ranks.

MPI only moves the arrays, and NumPy combines them, always as ``((x0 + x1) + x2) + ...``. A small array goes to all
ranks at once. Of a large one every rank gets one segment from all others (all_to_all), combines them, and sends the
result to all (all_gather): as many bytes as a ring sends. It goes in pieces, so that the buffers stay small.

A backend rather than an option of each call: no other group pays for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from ..core.arithmetic import UFUNCS
from ..core.backend import finished
from ..core.options import BackendOptions
from ..core.reduce_op import ReduceOp
from ..core.work import JoinedWork, Work
from .backend import THREAD_MULTIPLE, of_the_thread
from .communication_thread import CommunicationThread
from .datatypes import DIRECT, TYPED, arithmetic_type, message, parts
from .fast_path import MPIFastPath
from .layout import by_dtype, packed, unaliased, unpack_into
from .over_mpi import BackendOverMPI
from .segments import columns, segments
from .works import done

GATHERED_BYTES = 512 << 10  # from all ranks together; larger arrays are cut into segments
PIECE_BYTES = 1 << 20


class OrderedBackend(BackendOverMPI):
    """MPI, with reductions in rank order."""

    name = "ordered"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self._comm = options.comm
        # it takes the place of MPI's thread: a group can't have two
        self._thread = self.mpi._thread = CommunicationThread(
            self._comm, partial(of_the_thread, OrderedBackend, options)
        )
        self.fast_path.all_reduce = fast_all_reduce(self.mpi.fast_path, self._comm)  # type: ignore[method-assign]

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if not order_matters(array, op):
            return super().all_reduce(array, op, async_op)
        flat = array.reshape(-1)
        if self._goes_to_all(array, async_op):
            return self._from_all(array, async_op, lambda rows: fold(rows, op, flat))
        if async_op:
            return self._thread.launch("all_reduce", array, op)
        if self.mpi._single_copy.all_reduce(flat, op):  # in rank order too
            return None
        for piece in segments(flat, PIECE_BYTES):
            counts, rows = self._exchanged(piece)
            fold(rows, op, rows[self.rank])
            self._comm.Allgatherv(MPI.IN_PLACE, parts(piece, counts))
        return None

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        works = []
        for indices in by_dtype(arrays):
            same = [arrays[i] for i in indices]
            flat = np.concatenate(same, axis=None)
            works.append(finished(self.all_reduce(flat, op, async_op), partial(unpack_into, flat, same)))
        in_flight = [work for work in works if work is not None]
        return JoinedWork(in_flight) if in_flight else None

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
            counts, rows = self._exchanged(piece)
            total = rows[self.rank] = rows[self.rank].copy()
            fold(rows, op, total)
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
        for piece, target in columns(
            unaliased(array, output).reshape(self.size, -1), output, np.empty(PIECE_BYTES, np.uint8)
        ):
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
        return self._scan("scan", array, self.rank + 1, op, async_op)

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._scan("exscan", array, self.rank, op, async_op)

    def _scan(self, name: str, array: Any, ranks: int, op: ReduceOp, async_op: bool) -> Work | None:
        """Combine the arrays of the first `ranks` ranks: this rank's number, or one more."""
        if not order_matters(array, op):
            return getattr(super(), name)(array, op, async_op)  # type: ignore[no-any-return]
        flat = array.reshape(-1)
        if self._goes_to_all(array, async_op):
            return self._from_all(array, async_op, lambda rows: fold(rows[:ranks], op, flat))
        if async_op:
            return self._thread.launch(name, array, op)
        for piece in segments(flat, PIECE_BYTES):
            counts, rows = self._exchanged(piece)
            prefixes = np.stack(rows)
            for before, row in pairwise(prefixes):
                fold([before, row], op, row)
            if name == "exscan":
                prefixes = np.roll(prefixes, 1, axis=0)
            target = piece if ranks else np.empty_like(piece)
            self._comm.Alltoallv(parts(prefixes, [counts[self.rank]] * self.size), parts(target, counts))
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

    def _exchanged(self, piece: Any) -> tuple[list[int], list[Any]]:
        """Return the sizes of all ranks' segments of `piece`; and this rank's segment of every rank's `piece`.

        A rank's own is a view, and is not sent.
        """
        me, ranks, datatype = self.rank, self.size, TYPED[piece.dtype]
        counts, starts = segment_sizes(piece.size, ranks)
        size = counts[me]
        room = np.empty((ranks, size), piece.dtype)
        sent, received = [*counts], [size] * ranks
        sent[me] = received[me] = 0
        places = range(0, ranks * size, size) if size else [0] * ranks
        self._comm.Alltoallv((piece, (sent, starts), datatype), (room, (received, [*places]), datatype))
        rows = list(room)
        rows[me] = piece[starts[me] :][:size]
        return counts, rows


def order_matters(array: Any, op: ReduceOp) -> bool:
    """Return whether the result depends on the order: that of floats does, and of custom operations."""
    return array.dtype.kind in "fc" or op.mpi_op is not None


def fold(rows: Sequence[Any], op: ReduceOp, out: Any) -> None:
    """Combine flat arrays, in their order, into `out`, which may be one of them; the others are overwritten."""
    if not len(rows):
        return
    total = rows[0]
    if op.mpi_op is not None:
        datatype = arithmetic_type(out.dtype, op)
        for row in rows[1:]:
            op.mpi_op.Reduce_local((total, datatype), (row, datatype))
            total = row
    elif len(rows) > 1:
        ufunc = UFUNCS[op.name]
        with np.errstate(all="ignore"):  # as MPI, which does not warn of overflow
            for row in rows[1:-1]:
                total = ufunc(total, row, out=row)
            ufunc(total, rows[-1], out=out)
        return
    if total is not out:
        out[...] = total


# MPI's datatype and NumPy's function for the fast path; see DIRECT.
FOLDED = {
    (op, dtype): (datatype, UFUNCS[op.upper() if isinstance(op, str) else op.name])
    for (op, dtype), (datatype, _) in DIRECT.items()
    if dtype.kind in "fc"
}


def fast_all_reduce(fast: MPIFastPath, comm: MPI.Intracomm) -> Callable[[Any, Any], bool]:
    """Return the fast path's all_reduce: that of `OrderedBackend` for a small array."""
    ranks = comm.Get_size()

    def all_reduce(array: Any, op: Any) -> bool:
        if type(array) is not ndarray or array.nbytes * ranks > GATHERED_BYTES or not array.flags.carray:
            return False
        if fast.door.hooks:  # a recorder
            return False
        try:
            folded = FOLDED.get((op, array.dtype))
            if folded is None:
                return False
            datatype, ufunc = folded
            rows = np.empty((ranks, *array.shape), array.dtype)
            comm.Allgather((array, datatype), (rows, datatype))
        except TypeError:  # an op that can't be looked up
            return False
        except MPI.Exception as error:
            raise fast._failed("all_reduce", error) from error
        fast.count += 1
        with np.errstate(all="ignore"):
            total = rows[0, ...]  # the dots keep a 0-d array an array
            for row in rows[1:]:
                total = ufunc(total, row, out=array)
        return True

    return all_reduce


@functools.lru_cache
def segment_sizes(size: int, ranks: int) -> tuple[list[int], list[int]]:
    """Return the sizes and first indices of the ranks' segments of `size` elements, as equal as possible."""
    ends = [size * (rank + 1) // ranks for rank in range(ranks)]
    starts = [0, *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)], starts
