"""Raw mpi4py, as somebody who knows MPI well writes it: buffers named with their datatype, in place where MPI can."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..registry import Arrays, Case
from .contender import Call, Contender, Unsupported

# Without the half precisions, which the MPI standard does not have.
DATATYPES = {np.dtype(code): MPI.Datatype.fromcode(code) for code in "bBhHiIlLqQfdgFDG"}

OPS = {
    "sum": MPI.SUM,
    "avg": MPI.SUM,  # and a division
    "product": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}


class RawMPI4py(Contender):
    """The methods of mpi4py's communicators."""

    name = "mpi4py"

    def wait(self, handle: MPI.Request) -> Any:
        """MPI_Wait."""
        return handle.Wait()

    def poll(self, handle: MPI.Request) -> bool:
        """MPI_Test."""
        return handle.Test()

    def wait_all(self, handles: Iterable[MPI.Request]) -> None:
        """MPI_Waitall."""
        MPI.Request.Waitall(list(handles))

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """MPI_Send or MPI_Isend."""
        return partial(self.comm.Isend if async_op else self.comm.Send, described(array), peer, 0)

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """MPI_Recv or MPI_Irecv."""
        return partial(self.comm.Irecv if async_op else self.comm.Recv, described(array), peer, 0)

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Allreduce, in place."""
        call = self.comm.Iallreduce if async_op else self.comm.Allreduce
        return _averaged(
            partial(call, MPI.IN_PLACE, reducible(arrays.receive), OPS[case.op]), case, arrays.receive, async_op
        )

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Reduce, in place on the root."""
        call = self.comm.Ireduce if async_op else self.comm.Reduce
        buffer = reducible(arrays.receive)
        send, receive = (MPI.IN_PLACE, buffer) if case.rank == case.root else (buffer, None)
        result = arrays.receive if case.rank == case.root else None
        return _averaged(partial(call, send, receive, OPS[case.op], case.root), case, result, async_op)

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Bcast."""
        call = self.comm.Ibcast if async_op else self.comm.Bcast
        return partial(call, described(arrays.receive), case.root)

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Allgather."""
        call = self.comm.Iallgather if async_op else self.comm.Allgather
        return partial(call, described(arrays.send), described(arrays.receive))

    # A list of arrays in hpccomm is the rows of one array here: nobody would write it otherwise for MPI.
    all_gather = all_gather_single

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Reduce_scatter_block."""
        call = self.comm.Ireduce_scatter_block if async_op else self.comm.Reduce_scatter_block
        return _averaged(
            partial(call, reducible(arrays.send), reducible(arrays.receive), OPS[case.op]),
            case,
            arrays.receive,
            async_op,
        )

    reduce_scatter = reduce_scatter_single

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Alltoall."""
        call = self.comm.Ialltoall if async_op else self.comm.Alltoall
        return partial(call, described(arrays.send), described(arrays.receive))

    all_to_all = all_to_all_single

    def gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Gather."""
        call = self.comm.Igather if async_op else self.comm.Gather
        receive = None if arrays.receive is None else described(arrays.receive)
        return partial(call, described(arrays.send), receive, case.root)

    def scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Scatter."""
        call = self.comm.Iscatter if async_op else self.comm.Scatter
        send = described(arrays.send) if case.rank == case.root else None
        return partial(call, send, described(arrays.receive), case.root)

    def scan(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Scan, in place."""
        call = self.comm.Iscan if async_op else self.comm.Scan
        return partial(call, MPI.IN_PLACE, reducible(arrays.receive), _plain(case))

    def exscan(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Exscan, in place."""
        call = self.comm.Iexscan if async_op else self.comm.Exscan
        return partial(call, MPI.IN_PLACE, reducible(arrays.receive), _plain(case))

    def barrier(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Barrier."""
        return self.comm.Ibarrier if async_op else self.comm.Barrier

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Sendrecv."""
        right, left = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
        if async_op:
            send, receive = self.sender(arrays.send, right, True), self.receiver(arrays.receive, left, True)
            return lambda: MPI.Request.Waitall([receive(), send()])
        return partial(self.comm.Sendrecv, described(arrays.send), right, 0, described(arrays.receive), left, 0)

    # -- many arrays: packed into one that is kept, sent, and unpacked ------------------------------------

    def all_reduce_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Allreduce of the packed arrays."""
        _blocking_only(async_op)
        packed = np.empty(case.count, case.dtype)
        operation = partial(self.comm.Allreduce, MPI.IN_PLACE, reducible(packed), OPS[case.op])
        reduce = _averaged(operation, case, packed, False)

        def call() -> None:
            np.concatenate(arrays.receive, out=packed)
            reduce()
            _unpack(packed, arrays.receive)

        return call

    def broadcast_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Bcast of the packed arrays."""
        _blocking_only(async_op)
        packed = np.empty(case.count, case.dtype)
        broadcast = partial(self.comm.Bcast, described(packed), case.root)

        def on_root() -> None:
            np.concatenate(arrays.receive, out=packed)
            broadcast()

        def elsewhere() -> None:
            broadcast()
            _unpack(packed, arrays.receive)

        return on_root if case.rank == case.root else elsewhere

    def all_gather_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Allgather of the packed arrays; each of the results is a set of columns."""
        _blocking_only(async_op)
        packed, gathered = np.empty(case.part, case.dtype), np.empty((case.ranks, case.part), case.dtype)
        gather = partial(self.comm.Allgather, described(packed), described(gathered))
        ends = np.cumsum([each.size for each in arrays.send])
        columns = np.split(gathered, ends[:-1], axis=1)

        def call() -> None:
            np.concatenate(arrays.send, out=packed)
            gather()
            for result, column in zip(arrays.receive, columns, strict=True):
                result[...] = column

        return call

    def all_gather_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Allgather of the packed arrays."""
        _blocking_only(async_op)
        packed, gathered = np.empty(case.part, case.dtype), np.empty(case.count, case.dtype)
        gather = partial(self.comm.Allgather, described(packed), described(gathered))

        def call() -> None:
            np.concatenate(arrays.send, out=packed)
            gather()
            _unpack(gathered, arrays.receive)

        return call

    def reduce_scatter_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """MPI_Reduce_scatter_block of the packed arrays."""
        _blocking_only(async_op)
        packed, result = np.empty((case.ranks, case.part), case.dtype), np.empty(case.part, case.dtype)
        operation = partial(self.comm.Reduce_scatter_block, reducible(packed), reducible(result), OPS[case.op])
        reduce = _averaged(operation, case, result, False)
        rows = [each.reshape(case.ranks, -1) for each in arrays.send]

        def call() -> None:
            np.concatenate(rows, axis=1, out=packed)
            reduce()
            _unpack(result, arrays.receive)

        return call


def described(array: Any) -> list[Any]:
    """Return ``[array, datatype]``; as bytes where MPI has no such datatype."""
    if array.dtype in DATATYPES:
        return [array, DATATYPES[array.dtype]]
    return [array.view(np.uint8), MPI.BYTE]


def reducible(array: Any) -> list[Any]:
    """Return ``[array, datatype]`` for a reduction, which can't be done on bytes."""
    if array.dtype not in DATATYPES:
        raise Unsupported(f"MPI does not reduce {array.dtype}")
    return [array, DATATYPES[array.dtype]]


def _plain(case: Case) -> MPI.Op:
    if case.op == "avg":
        raise Unsupported("AVG has no meaning for a prefix")
    return OPS[case.op]


def _averaged(call: Call, case: Case, result: Any, async_op: bool) -> Call:
    """Add the division of AVG, which MPI does not have, where `result` is."""
    if case.op != "avg":
        return call
    if async_op:
        raise Unsupported("AVG is no operation of MPI's")

    def call_and_divide() -> None:
        call()
        if result is not None:
            np.divide(result, case.ranks, out=result)

    return call_and_divide


def _blocking_only(async_op: bool) -> None:
    if async_op:
        raise Unsupported("mpi4py has no asynchronous form of packing and unpacking")


def _unpack(packed: Any, arrays: list[Any]) -> None:
    start = 0
    for each in arrays:
        each[...] = packed[start : start + each.size]
        start += each.size
