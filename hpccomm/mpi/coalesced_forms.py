"""The operations on many arrays at once, in one message of the operation on one."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.backend import Backend
from ..core.overlap import all_unaliased
from ..core.reduce_op import ReduceOp
from ..core.work import Work, both
from .fast_path import KEPT_BYTES, MPIFastPath
from .layout import Finish, by_dtype, nbytes_of, packed_any, unpack_columns, unpack_into, unpacked, unpacked_any
from .works import joined

if TYPE_CHECKING:
    from .coalesced import Coalesced
    from .communication_thread import CommunicationThread


class CoalescedForms(Backend):
    """The coalesced forms of MPIBackend, which has the operations on one array."""

    fast_path: MPIFastPath
    _run_bytes: int  # of arrays that are packed together
    _thread_bytes: int  # from which on an asynchronous operation is a blocking one in the thread

    @property
    def _thread(self) -> CommunicationThread:
        raise NotImplementedError

    @cached_property
    def _coalesced(self) -> Coalesced:
        from .coalesced import Coalesced

        return Coalesced(self._run_bytes)

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        if async_op and self._is_large(arrays):
            return self._thread.launch("all_reduce_coalesced", arrays, op)
        works: list[Work | None] = []
        finish: Finish = None
        for indices in by_dtype(arrays):
            same = arrays if len(indices) == len(arrays) else [arrays[i] for i in indices]
            if async_op:
                flat = np.concatenate(same, axis=None)
                works.append(self.all_reduce(flat, op, True))
                finish = both(finish, partial(unpack_into, flat, same))
            else:
                self._coalesced.all_reduce(self.all_reduce, same, op)
        return joined(works, finish)

    def _is_large(self, arrays: list[Any]) -> bool:
        return bool(sum(array.nbytes for array in arrays) >= self._thread_bytes)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        if async_op and self._is_large(arrays):
            return self._thread.launch("broadcast_coalesced", arrays, root)
        if not async_op:
            for indices in by_dtype(arrays):
                self._coalesced.broadcast(self.broadcast, [arrays[i] for i in indices], root, root == self.rank)
            return None
        flat, finish = (packed_any(arrays), None) if root == self.rank else unpacked_any(arrays)
        return joined([self.broadcast(flat, root, async_op)], finish)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        outputs = [output for of_rank in output_lists for output in of_rank]
        if async_op:
            flat, finish = unpacked_any(outputs)
            return joined([self.all_gather(_cut(flat, output_lists), packed_any(arrays), True)], finish)
        from .segments import runs_of_lists

        runs = list(runs_of_lists(output_lists, self.fast_path.node_part or KEPT_BYTES // self.size))
        if len(runs) > 1:
            arrays = all_unaliased(arrays, outputs)
        for run in runs:
            targets = [of_rank[run] for of_rank in output_lists]
            if len(targets[0]) == 1:
                self.all_gather([target for (target,) in targets], arrays[run][0], False)
                continue
            received, sent = [each for of_rank in targets for each in of_rank], arrays[run]
            nbytes = sum(map(nbytes_of, received))
            memory = self._coalesced.memory(nbytes + sum(map(nbytes_of, sent)))
            flat, finish = unpacked_any(received, memory[:nbytes])
            self.all_gather(_cut(flat, targets), packed_any(sent, memory[nbytes:]), False)
            finish()
        return None

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        if async_op and self._is_large(outputs):
            return self._thread.launch("all_gather_single_coalesced", outputs, arrays)
        works: list[Work | None] = []
        finish: Finish = None
        for into, run in self._runs(outputs, arrays, async_op):
            mine = packed_any(run)
            gathered = np.empty((self.size, mine.size), mine.dtype)
            works.append(self.all_gather_single(gathered, mine, async_op))
            finish = both(finish, partial(unpack_columns, gathered, into))  # the inputs of all runs come first
        return joined(works, finish)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        if async_op and self._is_large(arrays):
            return self._thread.launch("reduce_scatter_single_coalesced", outputs, arrays, op)
        works: list[Work | None] = []
        finish: Finish = None
        for indices in by_dtype(arrays):
            same, into = [arrays[i] for i in indices], [outputs[i] for i in indices]
            for run, targets in self._runs(same, into, async_op):
                rows = np.concatenate([array.reshape(self.size, -1) for array in run], axis=1)
                flat, _, unpack = unpacked(targets)
                works.append(self.reduce_scatter_single(flat, rows, op, async_op))
                finish = both(finish, unpack)
        return joined(works, finish)

    def _runs(self, larger: list[Any], smaller: list[Any], async_op: bool) -> list[tuple[list[Any], list[Any]]]:
        """Return neighbours that go together, of `larger` at most so many bytes, as the compiled room cuts them."""
        if async_op or sum(map(nbytes_of, larger)) <= self._run_bytes:
            return [(larger, smaller)]
        from .segments import runs

        cut, start = [], 0
        for run, _ in runs(larger, self._run_bytes, nbytes_of):
            cut.append((run, smaller[start : start + len(run)]))
            start += len(run)
        return cut


def _cut(flat: Any, lists: list[list[Any]]) -> list[Any]:
    """Return the parts of a flat array that have the values of each list of arrays."""
    ends = np.cumsum([sum(map(nbytes_of, each)) // flat.itemsize for each in lists])
    return np.split(flat, ends[:-1])
