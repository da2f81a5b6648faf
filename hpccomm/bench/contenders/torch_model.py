"""The operations of torch.distributed's model, which have the same names and arguments in hpccomm and in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..registry import Arrays, Case
from .contender import Call, Contender


class TorchModel(Contender):
    """The functions of `library`, a module like torch.distributed."""

    library: Any

    def wait(self, handle: Any) -> Any:
        """Wait for a Work."""
        return handle.wait()

    def poll(self, handle: Any) -> bool:
        """Whether a Work is done."""
        return bool(handle.is_completed())

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of send or isend."""
        return partial(self.library.isend if async_op else self.library.send, self._array(array), *self._peer(peer))

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of recv or irecv."""
        return partial(self.library.irecv if async_op else self.library.recv, self._array(array), *self._peer(peer))

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(self.library.all_reduce, self._array(arrays.receive), self._op(case), self._group, async_op)

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place on the root."""
        root, op = self._rank(case.root), self._op(case)
        return partial(self.library.reduce, self._array(arrays.receive), root, op, self._group, async_op)

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """From the root."""
        array, root = self._array(arrays.receive), self._rank(case.root)
        return partial(self.library.broadcast, array, root, self._group, async_op)

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into one."""
        out, array = self._array(arrays.receive), self._array(arrays.send)
        return partial(self.library.all_gather_single, out, array, self._group, async_op)

    def all_gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into a list of rows."""
        out, array = self._rows(arrays.receive), self._array(arrays.send)
        return partial(self.library.all_gather, out, array, self._group, async_op)

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into one."""
        out, array = self._array(arrays.receive), self._array(arrays.send)
        return partial(self.library.reduce_scatter_single, out, array, self._op(case), self._group, async_op)

    def reduce_scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows into one array."""
        out, rows = self._array(arrays.receive), self._rows(arrays.send)
        return partial(self.library.reduce_scatter, out, rows, self._op(case), self._group, async_op)

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into one, equal parts."""
        out, array = self._array(arrays.receive), self._array(arrays.send)
        return partial(self.library.all_to_all_single, out, array, None, None, self._group, async_op)

    def all_to_all(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows into another."""
        out, rows = self._rows(arrays.receive), self._rows(arrays.send)
        return partial(self.library.all_to_all, out, rows, self._group, async_op)

    def gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One array into a list of rows on the root."""
        rows = None if arrays.receive is None else self._rows(arrays.receive)
        return partial(
            self.library.gather, self._array(arrays.send), rows, self._rank(case.root), self._group, async_op
        )

    def scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows on the root into one array."""
        out, rows = self._array(arrays.receive), self._rows(arrays.send) if case.rank == case.root else None
        return partial(self.library.scatter, out, rows, self._rank(case.root), self._group, async_op)

    def barrier(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Without arrays."""
        return partial(self.library.barrier, self._group, async_op)

    # -- where the libraries differ ----------------------------------------------------------------------

    @property
    def _group(self) -> Any:
        """What is passed as `group`: nothing for the world."""
        return None

    def _array(self, array: Any) -> Any:
        return array

    def _rows(self, array: Any) -> list[Any]:
        return [self._array(row) for row in array]

    def _rank(self, rank: int) -> int:
        """Return the rank in the world of a rank of the group."""
        return rank

    def _peer(self, peer: int) -> tuple[Any, ...]:
        return (self._rank(peer),) if self._group is None else (self._rank(peer), self._group)

    def _op(self, case: Case) -> Any:
        return getattr(self.library.ReduceOp, case.op.upper())
