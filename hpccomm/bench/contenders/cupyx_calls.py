"""cupyx.distributed: CuPy's own communication of arrays, over NCCL, on the current stream."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Case
from .contender import Call, Contender, Unsupported

if TYPE_CHECKING:
    from mpi4py import MPI

OPS = {"sum": "sum", "product": "prod", "min": "min", "max": "max"}


class CupyxDistributed(Contender):
    """The methods of NCCLBackend; its ranks find each other over MPI."""

    name = "cupyx"
    refusals = (*Contender.refusals, RuntimeError)

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        from mpi4py import MPI

        if group.size != MPI.COMM_WORLD.Get_size():
            raise Unsupported("its ranks are those of MPI_COMM_WORLD")
        try:
            made = importlib.import_module("cupyx.distributed").NCCLBackend
            self._backend: Any = made(group.size, group.rank, use_mpi=True)
        except Exception as error:  # NCCL's error if two ranks have the same GPU
            raise Unsupported(f"{type(error).__name__}: {error}") from error

    @classmethod
    def missing(cls) -> str | None:
        try:
            if not importlib.import_module("cupy.cuda.nccl").available:
                return "CuPy finds no NCCL library"
            importlib.import_module("cupyx.distributed")
        except Exception as error:  # without a GPU, importing may raise any exception
            return f"can't be imported: {error}"
        return None

    def close(self) -> None:
        del self._backend  # destroys its communicator

    def wait(self, handle: Any) -> None:
        """Do nothing: later work on the stream waits anyway."""

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        return partial(self._backend.send, array, peer)

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        return partial(self._backend.recv, array, peer)

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if case.left != case.right:
            raise Unsupported("cupyx sends to the rank that it receives from")
        return partial(self._backend.send_recv, arrays.send, arrays.receive, case.left)

    def bidirectional(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        raise Unsupported("cupyx has no groups of messages")

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return partial(self._backend.all_reduce, arrays.receive, arrays.receive, _op(case))

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return partial(self._backend.reduce, arrays.receive, arrays.receive, case.root, _op(case))

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return partial(self._backend.broadcast, arrays.receive, case.root)

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return partial(self._backend.all_gather, arrays.send, arrays.receive, case.part)

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return partial(self._backend.reduce_scatter, arrays.send, arrays.receive, case.part, _op(case))

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return partial(self._backend.all_to_all, arrays.send, arrays.receive)


def _op(case: Case) -> str:
    if case.op not in OPS:
        raise Unsupported(f"cupyx has no {case.op}")
    return OPS[case.op]
