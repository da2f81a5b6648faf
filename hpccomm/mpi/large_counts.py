"""Counts beyond 2^31 on MPI libraries older than MPI-4 (Open MPI 5.0), whose counts are C ints.

Messages and broadcasts send one element of a large derived type (datatypes.py), and reductions go in segments
(segments.py). This file has the operations with a count or displacement for each rank. If every rank knows the total,
MPI does them as long as the total fits. If a rank can't know it (uneven all_to_all_single), they are always messages
between pairs of ranks, as lists are with every library.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

from ..core.overlap import all_unaliased
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from . import datatypes, reductions
from .backend import MPIBackend
from .layout import recv_buffer, send_buffer, unaliased
from .works import all_done


class LargeCountMPIBackend(MPIBackend):
    """MPIBackend for libraries whose counts are C ints."""

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        if _fits(output):
            return super().all_gather_single(output, array, async_op)
        buffer, finish = recv_buffer(output)
        sent = unaliased(array, output)  # one copy for all ranks
        return self._pairwise([sent] * self.size, buffer.reshape(self.size, -1), finish, async_op)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        if _fits(*outputs):
            return super().all_gather(outputs, array, async_op)
        return self._pairwise(all_unaliased([array], outputs) * self.size, outputs, None, async_op)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if _fits(array):
            return super().reduce_scatter_single(output, array, op, async_op)
        return self.reduce_scatter(output, list(send_buffer(array).reshape(self.size, -1)), op, async_op)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        if _fits(*inputs):
            return super().reduce_scatter(output, inputs, op, async_op)
        how = reductions.plan(op, output.dtype)
        buffer, finish = reductions.reduction_output(output, op, self.size)
        call = self.comm.Ireduce if async_op else self.comm.Reduce
        operands = [unaliased(reductions.reduction_input(array, op), buffer) for array in inputs]
        requests = []
        for root, sent in enumerate(operands):
            into = self._segments(buffer) if root == self.rank else repeat(None)
            for piece, target in zip(self._segments(sent), into):
                received = None if target is None else (target, how.datatype)
                requests.append(call((piece, how.datatype), received, how.op, root))
        return all_done(requests, finish, operands, buffer)

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


def _fits(*arrays: Any) -> bool:
    """Return whether a C int can count the elements of all arrays (for dtypes that are sent as bytes, their bytes)."""
    return sum(array.nbytes for array in arrays) <= datatypes.LARGEST_COUNT or (
        arrays[0].dtype in datatypes.TYPED and sum(array.size for array in arrays) <= datatypes.LARGEST_COUNT
    )
