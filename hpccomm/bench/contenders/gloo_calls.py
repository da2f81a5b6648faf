"""torch.distributed over gloo, on tensors that share the arrays' memory."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import ranks
from ..registry import Arrays, Case
from .contender import Call, Contender, Unsupported

if TYPE_CHECKING:
    from mpi4py import MPI

    from ... import ProcessGroup

OPS = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}


class Gloo(Contender):
    """The functions of torch.distributed, with a gloo process group that MPI helps to start."""

    name = "gloo"
    refusals = (*Contender.refusals, RuntimeError)

    def __init__(self, group: ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        import socket

        one_node = ranks.get_node_count(group) == 1
        if one_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        host = "127.0.0.1" if one_node else comm.bcast(socket.gethostname())
        if group.rank == 0:
            store = dist.TCPStore(host, 0, group.size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined, unused-ignore]
            comm.bcast(store.port)
        else:
            store = dist.TCPStore(host, comm.bcast(None), group.size, is_master=False)  # type: ignore[attr-defined, unused-ignore]
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)

    @classmethod
    def missing(cls) -> str | None:
        """Torch is no requirement of hpccomm's."""
        if importlib.util.find_spec("torch") is None:
            return "not installed (pip install torch)"
        dist = importlib.import_module("torch.distributed")
        return None if dist.is_available() and dist.is_gloo_available() else "torch was built without gloo"

    def close(self) -> None:
        """Destroy the gloo process group."""
        self.dist.destroy_process_group()

    def wait(self, handle: Any) -> Any:
        """Wait for torch's Work."""
        return handle.wait()

    def poll(self, handle: Any) -> bool:
        """Whether torch's Work is done."""
        done: bool = handle.is_completed()
        return done

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of send or isend."""
        return partial(self.dist.isend if async_op else self.dist.send, self._tensor(array), peer)

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """Return a call of recv or irecv."""
        return partial(self.dist.irecv if async_op else self.dist.recv, self._tensor(array), peer)

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place."""
        return partial(self.dist.all_reduce, self._tensor(arrays.receive), self._op(case), None, async_op)

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """In place on the root."""
        return partial(self.dist.reduce, self._tensor(arrays.receive), case.root, self._op(case), None, async_op)

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """From the root."""
        return partial(self.dist.broadcast, self._tensor(arrays.receive), case.root, None, async_op)

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into one."""
        function = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        return partial(function, self._flat(arrays.receive), self._flat(arrays.send), None, async_op)

    def all_gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into a list of rows."""
        return partial(self.dist.all_gather, self._rows(arrays.receive), self._tensor(arrays.send), None, async_op)

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into one."""
        function = getattr(self.dist, "reduce_scatter_single", None) or self.dist.reduce_scatter_tensor
        out, tensor = self._flat(arrays.receive), self._flat(arrays.send)
        return partial(function, out, tensor, self._op(case), None, async_op)

    def reduce_scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows into one tensor."""
        out, rows = self._tensor(arrays.receive), self._rows(arrays.send)
        return partial(self.dist.reduce_scatter, out, rows, self._op(case), None, async_op)

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into one, equal parts."""
        out, tensor = self._tensor(arrays.receive), self._tensor(arrays.send)
        return partial(self.dist.all_to_all_single, out, tensor, None, None, None, async_op)

    def all_to_all(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows into another."""
        return partial(self.dist.all_to_all, self._rows(arrays.receive), self._rows(arrays.send), None, async_op)

    def gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into a list of rows on the root."""
        rows = None if arrays.receive is None else self._rows(arrays.receive)
        return partial(self.dist.gather, self._tensor(arrays.send), rows, case.root, None, async_op)

    def scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A list of rows on the root into one tensor."""
        rows = self._rows(arrays.send) if case.rank == case.root else None
        return partial(self.dist.scatter, self._tensor(arrays.receive), rows, case.root, None, async_op)

    def barrier(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Without tensors."""
        return partial(self.dist.barrier, None, async_op)

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """irecv and isend: torch has no sendrecv."""
        if case.ranks == 1:
            raise Unsupported("torch does not send to the same rank")
        right, left = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
        send, receive = self.sender(arrays.send, right, True), self.receiver(arrays.receive, left, True)
        return lambda: self.wait_all([receive(), send()])

    def _tensor(self, array: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view("i2")).view(self.torch.bfloat16)
        try:
            return self.torch.from_numpy(array)
        except TypeError as error:
            raise Unsupported(f"torch has no {array.dtype}") from error

    def _flat(self, array: Any) -> Any:
        return self._tensor(array.reshape(-1))

    def _rows(self, array: Any) -> list[Any]:
        return [self._tensor(row) for row in array]

    def _op(self, case: Case) -> Any:
        if case.op not in OPS:
            raise Unsupported(f"gloo has no {case.op}")
        return getattr(self.dist.ReduceOp, OPS[case.op])
