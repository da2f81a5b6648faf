"""Raw `cupy.cuda.nccl` on the current stream, as the fastest program written by hand calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ...nccl.types import moved, reduced
from .. import gpu
from ..registry import Arrays, Case
from .contender import Call, Contender, Unsupported, idle

if TYPE_CHECKING:
    from mpi4py import MPI


class RawNCCL(Contender):
    """The methods of NcclCommunicator. Asynchronous or not is the same on a stream; there is nothing to wait for."""

    name = "nccl"

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        from cupy.cuda import nccl

        self._nccl = nccl
        try:
            unique_id = comm.bcast(nccl.get_unique_id() if group.rank == 0 else None)
            self._raw = nccl.NcclCommunicator(group.size, unique_id, group.rank)
        except nccl.NcclError as error:  # two ranks have the same GPU
            raise Unsupported(str(error)) from error

    @classmethod
    def missing(cls) -> str | None:
        """CuPy may be there without NCCL."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a missing library
                from cupy.cuda import nccl
        except ImportError as error:
            return str(error)
        return None if nccl.available else "CuPy finds no NCCL library"

    def close(self) -> None:
        """Destroy the communicator."""
        self._raw.destroy()

    def wait(self, handle: Any) -> None:
        """Do nothing: what follows on the stream comes afterwards."""

    def wait_all(self, handles: Iterable[Any]) -> None:
        """Do nothing."""

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        """ncclSend."""
        return partial(self._raw.send, array.data.ptr, *_moved(array), peer, gpu.current_stream())

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        """ncclRecv."""
        return partial(self._raw.recv, array.data.ptr, *_moved(array), peer, gpu.current_stream())

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Both in one group."""
        receive, send = self.receiver(arrays.receive, case.left, True), self.sender(arrays.send, case.right, True)
        return self._group([receive, send])

    def bidirectional(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """All in one group."""
        if case.peer is None:
            return idle
        starts = [self.receiver(array, case.peer, True) for array in arrays.receive]
        return self._group(starts + [self.sender(arrays.send, case.peer, True)] * case.window)

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """ncclAllReduce, in place."""
        return self._all_reduce(case, arrays.receive)

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """ncclReduce, in place."""
        pointer, how = arrays.receive.data.ptr, _reduced(case, arrays.receive)
        return partial(self._raw.reduce, pointer, pointer, *how, case.root, gpu.current_stream())

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """ncclBroadcast, in place."""
        return self._broadcast(case, arrays.receive)

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """ncclAllGather."""
        return self._all_gather(arrays.send, arrays.receive)

    # A list of arrays in hpccomm is the rows of one array here.
    all_gather = all_gather_single

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """ncclReduceScatter."""
        return self._reduce_scatter(case, arrays.send, arrays.receive)

    reduce_scatter = reduce_scatter_single

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A group of ncclSend and ncclRecv: CuPy has no ncclAlltoAll."""
        starts = [self.receiver(row, rank, True) for rank, row in enumerate(arrays.receive)]
        return self._group(starts + [self.sender(row, rank, True) for rank, row in enumerate(arrays.send)])

    all_to_all = all_to_all_single

    # -- many arrays: one group ---------------------------------------------------------------------------

    def all_reduce_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A group of ncclAllReduce."""
        return self._group([self._all_reduce(case, each) for each in arrays.receive if each.size])

    def broadcast_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A group of ncclBroadcast."""
        return self._group([self._broadcast(case, each) for each in arrays.receive if each.size])

    def all_gather_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A group of ncclAllGather."""
        pairs = zip(arrays.send, arrays.receive, strict=True)
        return self._group([self._all_gather(send, receive) for send, receive in pairs if send.size])

    def reduce_scatter_single_coalesced(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """A group of ncclReduceScatter."""
        pairs = zip(arrays.send, arrays.receive, strict=True)
        return self._group([self._reduce_scatter(case, send, receive) for send, receive in pairs if receive.size])

    # -- one call of NCCL's -------------------------------------------------------------------------------

    def _all_reduce(self, case: Case, array: Any) -> Call:
        pointer = array.data.ptr
        return partial(self._raw.allReduce, pointer, pointer, *_reduced(case, array), gpu.current_stream())

    def _broadcast(self, case: Case, array: Any) -> Call:
        pointer = array.data.ptr
        return partial(self._raw.broadcast, pointer, pointer, *_moved(array), case.root, gpu.current_stream())

    def _all_gather(self, send: Any, receive: Any) -> Call:
        return partial(self._raw.allGather, send.data.ptr, receive.data.ptr, *_moved(send), gpu.current_stream())

    def _reduce_scatter(self, case: Case, send: Any, receive: Any) -> Call:
        how = _reduced(case, receive)
        return partial(self._raw.reduceScatter, send.data.ptr, receive.data.ptr, *how, gpu.current_stream())

    def _group(self, calls: list[Callable[[], Any]]) -> Call:
        start, end = self._nccl.groupStart, self._nccl.groupEnd

        def call() -> None:
            start()
            for each in calls:
                each()
            end()

        return call


def _moved(array: Any) -> tuple[int, int]:
    """Return NCCL's count and datatype of an array that is moved."""
    datatype, width = moved(array.dtype)
    return array.size * width, datatype


def _reduced(case: Case, array: Any) -> tuple[int, int, int]:
    """Return NCCL's count, datatype and operation of an array that is reduced."""
    how = reduced("the benchmark", array.dtype, getattr(hc.ReduceOp, case.op.upper()))
    return array.size * how.width, how.datatype, how.op
