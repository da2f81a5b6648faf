"""Raw `cupy.cuda.nccl` on the current stream, as the fastest hand-written program calls it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ...nccl.types import moved_array, reduced
from .. import gpu
from ..registry import Arrays, Case
from .contender import Call, Contender, Method, Unsupported

if TYPE_CHECKING:
    from mpi4py import MPI


def coalesced(single: Method) -> Method:
    """Return a method that calls `single` for each non-empty array, all calls in one NCCL group."""

    def method(self: RawNCCL, case: Case, arrays: Arrays, async_op: bool) -> Call:
        sent = arrays.receive if arrays.send is None else arrays.send
        pairs = [Arrays(receive, send) for receive, send in zip(arrays.receive, sent, strict=True) if receive.size]
        return self.together([single(self, case, each, async_op) for each in pairs])

    return method


class RawNCCL(Contender):
    """The methods of NcclCommunicator; `async_op` makes no difference, because the stream orders the calls."""

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
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a missing library
                from cupy.cuda import nccl
        except ImportError as error:
            return str(error)
        return None if nccl.available else "CuPy finds no NCCL library"

    def close(self) -> None:
        self._raw.destroy()

    def wait(self, handle: Any) -> None:
        """Do nothing: later work on the stream waits anyway."""

    def wait_all(self, handles: Iterable[Any]) -> None:
        """Do nothing."""

    def sender(self, array: Any, peer: int, async_op: bool) -> Call:
        return partial(self._raw.send, array.data.ptr, *moved_array(array), peer, gpu.current_stream())

    def receiver(self, array: Any, peer: int, async_op: bool) -> Call:
        return partial(self._raw.recv, array.data.ptr, *moved_array(array), peer, gpu.current_stream())

    def all_reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        pointer, how = arrays.receive.data.ptr, _reduced(case, arrays.receive)
        return partial(self._raw.allReduce, pointer, pointer, *how, gpu.current_stream())

    def reduce(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        pointer, how = arrays.receive.data.ptr, _reduced(case, arrays.receive)
        return partial(self._raw.reduce, pointer, pointer, *how, case.root, gpu.current_stream())

    def broadcast(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        pointer, how = arrays.receive.data.ptr, moved_array(arrays.receive)
        return partial(self._raw.broadcast, pointer, pointer, *how, case.root, gpu.current_stream())

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        send, receive = arrays.send.data.ptr, arrays.receive.data.ptr
        return partial(self._raw.allGather, send, receive, *moved_array(arrays.send), gpu.current_stream())

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        send, receive = arrays.send.data.ptr, arrays.receive.data.ptr
        return partial(self._raw.reduceScatter, send, receive, *_reduced(case, arrays.receive), gpu.current_stream())

    def all_to_all_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of a group of ncclSend and ncclRecv, because CuPy has no ncclAlltoAll."""
        starts = [self.receiver(row, rank, True) for rank, row in enumerate(arrays.receive)]
        return self.together(starts + [self.sender(row, rank, True) for rank, row in enumerate(arrays.send)])

    all_to_all = all_to_all_single

    def all_gather(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of a group of ncclBroadcast, because the results are not contiguous."""
        send, how, stream = arrays.send.data.ptr, moved_array(arrays.send), gpu.current_stream()
        outputs = enumerate(arrays.receive)
        return self.together([partial(self._raw.broadcast, send, to.data.ptr, *how, r, stream) for r, to in outputs])

    def reduce_scatter(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Return a call of a group of ncclReduce, because the inputs are not contiguous."""
        into, how, stream = arrays.receive.data.ptr, _reduced(case, arrays.receive), gpu.current_stream()
        inputs = enumerate(arrays.send)
        return self.together([partial(self._raw.reduce, each.data.ptr, into, *how, r, stream) for r, each in inputs])

    all_reduce_coalesced = coalesced(all_reduce)
    broadcast_coalesced = coalesced(broadcast)
    all_gather_single_coalesced = coalesced(all_gather_single)
    reduce_scatter_single_coalesced = coalesced(reduce_scatter_single)

    def together(self, starts: Sequence[Call]) -> Call:
        """Return a call of one NCCL group."""
        start, end = self._nccl.groupStart, self._nccl.groupEnd

        def call() -> None:
            start()
            for each in starts:
                each()
            end()

        return call


def _reduced(case: Case, array: Any) -> tuple[int, int, int]:
    """Return NCCL's count, datatype and operation for reducing an array."""
    return reduced("the benchmark", array.dtype, getattr(hc.ReduceOp, case.op.upper())).of(array)
