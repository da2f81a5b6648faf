"""Counts beyond 2^31 on MPI libraries older than MPI-4 (Open MPI 5.0), whose counts are C ints.

Single messages and broadcasts send one element of a large derived type (datatypes.py), reductions go in segments
(segments.py). What is left are operations with a count or displacement per rank. Where every rank knows the total
they use MPI's call while it fits. Where one rank can't know (gather, scatter, uneven all_to_all) they are always
messages between pairs, which is what Open MPI does inside those calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.overlap import all_unaliased
from ..core.reduce_op import ReduceOp
from ..core.work import Work, both
from ..job import tags
from . import datatypes, reductions
from .backend import MPIBackend
from .datatypes import message
from .layout import Finish, recv_buffer, send_buffer, unaliased
from .works import MPIWorks, all_done


class LargeCountMPIBackend(MPIBackend):
    """MPIBackend for libraries whose counts are C ints."""

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        if _fits(output):
            return super().all_gather_single(output, array, async_op)
        buffer, finish = recv_buffer(output)
        sent = unaliased(array, output)  # once for all ranks
        return self._pairwise([sent] * self.size, buffer.reshape(self.size, -1), finish, async_op)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        if _fits(*outputs):
            return super().all_gather(outputs, array, async_op)
        return self._pairwise(all_unaliased([array], outputs) * self.size, outputs, None, async_op)

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        sends = [array if rank == root else None for rank in range(self.size)]
        return self._pairwise(sends, outputs or [None] * self.size, None, async_op)

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        receives = [output if rank == root else None for rank in range(self.size)]
        return self._pairwise(inputs or [None] * self.size, receives, None, async_op)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if _fits(array):
            return super().reduce_scatter_single(output, array, op, async_op)
        return self.reduce_scatter(output, list(send_buffer(array).reshape(self.size, -1)), op, async_op)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        if _fits(*inputs):
            return super().reduce_scatter(output, inputs, op, async_op)
        buffer, finish = reductions.reduction_output(output, op, self.size)
        datatype, mpi_op = reductions.mpi_type_and_op(buffer.dtype, op)
        call = self._comm.Ireduce if async_op else self._comm.Reduce

        operands = [unaliased(reductions.reduction_input(array, op), buffer) for array in inputs]

        def reductions_to_each() -> Any:
            for root, sent in enumerate(operands):
                into = self._segments(buffer) if root == self.rank else (None for _ in self._segments(sent))
                for part, target in zip(self._segments(sent), into, strict=True):
                    yield call((part, datatype), None if target is None else (target, datatype), mpi_op, root)

        return all_done(list(reductions_to_each()), finish, operands, buffer)

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        if output_counts is None and input_counts is None and _fits(array):
            return super().all_to_all_single(output, array, None, None, async_op)
        equal = [array.size // self.size] * self.size
        output_counts, input_counts = output_counts or equal, input_counts or equal
        buffer, finish = recv_buffer(output)
        sends = np.split(send_buffer(array).reshape(-1), np.cumsum(input_counts)[:-1])
        receives = np.split(buffer.reshape(-1), np.cumsum(output_counts)[:-1])
        return self._pairwise(sends, receives, finish, async_op)

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        return self._pairwise(inputs, outputs, None, async_op)

    def _pairwise(self, sends: Sequence[Any], receives: Sequence[Any], finish: Finish, async_op: bool) -> Work | None:
        """Send ``sends[r]`` to each rank r and receive ``receives[r]`` from it, where they are not None.

        What is sent lies outside of what is received, where data of a peer that is early may be before they are sent.
        """
        buffers: dict[int, Any] = {}
        for rank, output in enumerate(receives):
            if output is not None:
                buffers[rank], unpack = recv_buffer(output)
                finish = both(unpack, finish)
        peers = [rank for rank, array in enumerate(sends) if array is not None]
        sent = [*map(send_buffer, all_unaliased([sends[rank] for rank in peers], [*buffers.values()]))]
        requests = [self._comm.Irecv(message(buffer), rank, tags.PAIRWISE) for rank, buffer in buffers.items()]
        requests += [self._comm.Isend(message(array), rank, tags.PAIRWISE) for rank, array in zip(peers, sent)]
        if async_op:
            return MPIWorks(requests, finish, (buffers, sent))
        MPI.Request.Waitall(requests)
        if finish is not None:
            finish()
        return None


def _fits(*arrays: Any) -> bool:
    """Return whether a C int can count the elements (bytes, for dtypes that travel as bytes) of all arrays."""
    return sum(array.nbytes for array in arrays) <= datatypes.LARGEST_COUNT or (
        arrays[0].dtype in datatypes.TYPED and sum(array.size for array in arrays) <= datatypes.LARGEST_COUNT
    )
