"""Raw mpi4py, as an MPI expert writes it: buffers with datatypes, in place if MPI can."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ...core.operation_list import OPERATIONS, OperationSpec
from ...mpi import datatypes
from ..registry import BENCHMARKS, Arrays, Benchmark, Case
from .contender import Call, Contender, Unsupported

# The MPI standard has no half precisions.
DATATYPES = {np.dtype(code): MPI.Datatype.fromcode(code) for code in "bBhHiIlLqQfdgFDG"}

OPS = {op.name.lower(): mpi_op for op, mpi_op in datatypes.OPS.items()}


class RawMPI4py(Contender):
    """The methods of mpi4py's communicators."""

    name = "mpi4py"

    def wait(self, handle: MPI.Request) -> Any:
        return handle.Wait()

    def poll(self, handle: MPI.Request) -> bool:
        return handle.Test()

    def wait_all(self, handles: Iterable[MPI.Request]) -> None:
        MPI.Request.Waitall(list(handles))

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        return partial(self._method("Send", async_op), described(array), peer, 0)

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        return partial(self._method("Recv", async_op), described(array), peer, 0)

    def _call(self, benchmark: Benchmark, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if not benchmark.mpi:
            return super()._call(benchmark, case, arrays, async_op)
        spec, given = OPERATIONS[benchmark.name], list[Any]()
        has_root = "root" in spec.arguments
        is_written = not has_root or case.rank == case.root
        if arrays.receive is not None:
            describe = reducible if spec.reduces else described
            given = [describe(each) for each in (arrays.send, arrays.receive) if each is not None]
        if spec.reduces:
            if arrays.send is None:  # in place
                given = [MPI.IN_PLACE, *given] if is_written else [*given, None]
            given += [_op(spec, case)]
        operation = partial(self._method(benchmark.mpi, async_op), *given, *[case.root] * has_root)
        return (
            _averaged(operation, case, arrays.receive if is_written else None, async_op) if spec.reduces else operation
        )

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if async_op:
            return super().sendrecv(case, arrays, async_op)
        send, receive = described(arrays.send), described(arrays.receive)
        return partial(self.comm.Sendrecv, send, case.right, 0, receive, case.left, 0)

    def _method(self, name: str, async_op: bool) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.comm, f"I{name.lower()}" if async_op else name)
        return method

    # -- several arrays: packed into one array that is reused, sent, and unpacked -------------------------

    def all_gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        gathered = np.empty(case.count, case.dtype)
        gather = partial(self.comm.Allgather, described(arrays.send), described(gathered))
        return _coalesced([], None, gather, gathered, arrays.receive, async_op)

    def gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        is_root = case.rank == case.root
        gathered = np.empty(case.count if is_root else 0, case.dtype)
        receive = described(gathered) if is_root else None
        gather = partial(self.comm.Gather, described(arrays.send), receive, case.root)
        return _coalesced([], None, gather, gathered, arrays.receive or [], async_op)

    def scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        packed = np.empty(case.count if arrays.send else 0, case.dtype)
        send = described(packed) if arrays.send else None
        scatter = partial(self.comm.Scatter, send, described(arrays.receive), case.root)
        return _coalesced(arrays.send, packed, scatter, packed, [], async_op)

    def reduce_scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        packed = np.empty(case.count, case.dtype)
        reduce = self._call(BENCHMARKS["reduce_scatter_single"], case, Arrays(arrays.receive, packed), False)
        return _coalesced(arrays.send, packed, reduce, packed, [], async_op)

    def all_to_all(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        packed, received = np.empty(case.count, case.dtype), np.empty(case.count, case.dtype)
        exchange = partial(self.comm.Alltoall, described(packed), described(received))
        return _coalesced(arrays.send, packed, exchange, received, arrays.receive, async_op)

    def all_reduce_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        packed = np.empty(case.count, case.dtype)
        operation = partial(self.comm.Allreduce, MPI.IN_PLACE, reducible(packed), OPS[case.op])
        reduce = _averaged(operation, case, packed, async_op)
        return _coalesced(arrays.receive, packed, reduce, packed, arrays.receive, async_op)

    def broadcast_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        packed = np.empty(case.count, case.dtype)
        broadcast = partial(self.comm.Bcast, described(packed), case.root)
        sent, received = (arrays.receive, []) if case.rank == case.root else ([], arrays.receive)
        return _coalesced(sent, packed, broadcast, packed, received, async_op)

    def all_gather_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of MPI_Allgather; each result is a block of columns of the gathered array."""
        return self._all_gather(arrays, np.empty((case.ranks, case.part), case.dtype), async_op)

    def all_gather_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        return self._all_gather(arrays, np.empty(case.count, case.dtype), async_op)

    def _all_gather(self, arrays: Arrays, gathered: Any, async_op: bool) -> Call:
        packed = np.empty(gathered.size // self.comm.size, gathered.dtype)
        gather = partial(self.comm.Allgather, described(packed), described(gathered))
        return _coalesced(arrays.send, packed, gather, gathered, arrays.receive, async_op)

    def reduce_scatter_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of MPI_Reduce_scatter_block; each array is a block of columns of its input."""
        packed, result = np.empty((case.ranks, case.part), case.dtype), np.empty(case.part, case.dtype)
        operation = partial(self.comm.Reduce_scatter_block, reducible(packed), reducible(result), OPS[case.op])
        reduce = _averaged(operation, case, result, async_op)
        columns = [each.reshape(case.ranks, -1) for each in arrays.send]
        return _coalesced(columns, packed, reduce, result, arrays.receive, async_op)


def _coalesced(sent: list[Any], packed: Any, operation: Call, result: Any, received: list[Any], async_op: bool) -> Call:
    """Return a call that packs `sent` side by side, communicates, and unpacks `result` to `received`."""
    if async_op:
        raise Unsupported("mpi4py has no asynchronous form of packing and unpacking")
    ends = np.cumsum([each.shape[-1] for each in received], dtype=int)
    pieces = list(zip(received, np.split(result, ends[:-1], axis=-1), strict=False))  # an extra one if `received` is []

    def call() -> None:
        if sent:
            np.concatenate(sent, axis=-1, out=packed)
        operation()
        for array, piece in pieces:
            array[...] = piece

    return call


def described(array: Any) -> list[Any]:
    """Return ``[array, datatype]``, with MPI.BYTE if MPI has no such datatype."""
    if array.dtype in DATATYPES:
        return [array, DATATYPES[array.dtype]]
    return [array.view(np.uint8), MPI.BYTE]


def reducible(array: Any) -> list[Any]:
    """Return ``[array, datatype]`` for a reduction; raise Unsupported if MPI has no such datatype."""
    if array.dtype not in DATATYPES:
        raise Unsupported(f"MPI does not reduce {array.dtype}")
    return [array, DATATYPES[array.dtype]]


def _op(spec: OperationSpec, case: Case) -> MPI.Op:
    if case.op == "avg" and any(role.kind == "prefix_op" for role in spec.roles):
        raise Unsupported("AVG has no meaning for a prefix")
    return OPS[case.op]


def _averaged(call: Call, case: Case, result: Any, async_op: bool) -> Call:
    """Return `call`; for AVG, which MPI does not have, it is followed by a division of `result`."""
    if case.op != "avg":
        return call
    if async_op:
        raise Unsupported("AVG is no operation of MPI's")

    def call_and_divide() -> None:
        call()
        if result is not None:
            np.divide(result, case.ranks, out=result)

    return call_and_divide
