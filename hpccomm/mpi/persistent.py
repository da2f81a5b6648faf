"""Persistent operations on MPI's persistent requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from ..core.work import Once, repeatable
from ..process.tuning import Tuning
from .datatypes import message, parts
from .layout import Finish, is_plain, recv_buffer
from .reductions import plan, reduction_input, reduction_output
from .segments import segments
from .works import received


class MPIPersistentWork(PersistentWork):
    """An operation whose `prepare` fills the inputs before each start, and `finish` unpacks the outputs after it."""

    def __init__(self, requests: list[MPI.Prequest], prepare: Finish, finish: Finish, *alive: Any) -> None:
        self._requests = requests
        self._one = requests[0] if len(requests) == 1 else None
        self._prepare = prepare
        self._finish = repeatable(finish)
        self._alive = alive

    def begin(self) -> None:
        """Pack, and start every request."""
        if self._prepare is not None:
            self._prepare()
        if isinstance(self._finish, Once):
            self._finish.arm()
        if self._one is not None:
            self._one.Start()
        else:
            MPI.Prequest.Startall(self._requests)

    def block(self) -> None:
        """Wait for every request, and unpack."""
        if self._one is not None:
            self._one.Wait()
        else:
            MPI.Request.Waitall(self._requests)
        if self._finish is not None:
            self._finish()

    def poll(self) -> bool:
        """Look at every request; unpack when all are done."""
        # one by one: MPICH 5.0's Testall reports an error for persistent collectives
        if not all(request.Test() for request in self._requests):
            return False
        if self._finish is not None:
            self._finish()
        return True

    def release(self) -> None:
        """Free the requests, and let go of the arrays."""
        for request in self._requests:
            request.Free()
        self._requests, self._one, self._alive = [], None, ()
        self._prepare = self._finish = None


class PersistentReceive(MPIPersistentWork):
    """A receive, which notices messages that are too short."""

    def begin(self) -> None:
        """As MPIPersistentWork."""
        self._message = MPI.Status()
        super().begin()

    def block(self) -> None:
        """As MPIPersistentWork; then look at the message."""
        if self._message.Get_source() == MPI.ANY_SOURCE:  # otherwise this was interrupted after it had come
            self._requests[0].Wait(self._message)
        received("recv", self._message, self._alive[0], self._finish)

    def poll(self) -> bool:
        """As MPIPersistentWork; then look at the message."""
        if self._message.Get_source() == MPI.ANY_SOURCE and not self._requests[0].Test(self._message):
            self._message = MPI.Status()  # MPI leaves it undefined
            return False
        self.block()
        return True


def set_up(comm: MPI.Intracomm, tuning: Tuning, operation: str, arguments: tuple[Any, ...]) -> PersistentWork:
    """Return the persistent form of an operation; the arguments are those of MPIBackend's method without async_op."""
    if operation == "all_reduce":
        return _all_reduce(comm, tuning.segment_bytes, *arguments)
    return _OPERATIONS[operation](comm, *arguments)


def _all_reduce(comm: MPI.Intracomm, segment_bytes: int, array: Any, op: ReduceOp) -> PersistentWork:
    buffer, finish = reduction_output(array, op, comm.Get_size())
    how = plan(op, array.dtype)
    prepare = partial(reduction_input, array, op, buffer) if how.changes or buffer is not array else None
    pieces = segments(buffer, segment_bytes)
    requests = [comm.Allreduce_init(MPI.IN_PLACE, (piece, how.datatype), how.op) for piece in pieces]
    return MPIPersistentWork(requests, prepare, finish, buffer)


def _broadcast(comm: MPI.Intracomm, array: Any, root: int) -> PersistentWork:
    if comm.Get_rank() == root:
        sent, prepare = _source(array)
        return MPIPersistentWork([comm.Bcast_init(message(sent), root)], prepare, None, sent)
    buffer, finish = recv_buffer(array)
    return MPIPersistentWork([comm.Bcast_init(message(buffer), root)], None, finish, buffer)


def _all_gather_single(comm: MPI.Intracomm, output: Any, array: Any) -> PersistentWork:
    sent, prepare = _source(array, output)
    buffer, finish = recv_buffer(output)
    return MPIPersistentWork([comm.Allgather_init(message(sent), message(buffer))], prepare, finish, sent, buffer)


def _reduce_scatter_single(comm: MPI.Intracomm, output: Any, array: Any, op: ReduceOp) -> PersistentWork:
    sent, prepare = _source(array, output, op)
    buffer, finish = reduction_output(output, op, comm.Get_size())
    how = plan(op, array.dtype)
    request = comm.Reduce_scatter_block_init((sent, how.datatype), (buffer, how.datatype), how.op)
    return MPIPersistentWork([request], prepare, finish, sent, buffer)


def _all_to_all_single(
    comm: MPI.Intracomm, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None
) -> PersistentWork:
    sent, prepare = _source(array, output)
    buffer, finish = recv_buffer(output)
    if output_counts is None or input_counts is None:  # equal parts
        request = comm.Alltoall_init(message(sent), message(buffer))
    else:
        request = comm.Alltoallv_init(parts(sent, input_counts), parts(buffer, output_counts))
    return MPIPersistentWork([request], prepare, finish, sent, buffer)


def _send(comm: MPI.Intracomm, array: Any, dst: int, tag: int) -> PersistentWork:
    sent, prepare = _source(array)
    return MPIPersistentWork([comm.Send_init(message(sent), dst, tag)], prepare, None, sent)


def _recv(comm: MPI.Intracomm, array: Any, src: int | None, tag: int) -> PersistentWork:
    buffer, finish = recv_buffer(array)
    source = MPI.ANY_SOURCE if src is None else src
    return PersistentReceive([comm.Recv_init(message(buffer), source, tag)], None, finish, buffer)


_OPERATIONS: dict[str, Callable[..., PersistentWork]] = {
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "send": _send,
    "recv": _recv,
}


def _source(array: Any, output: Any = None, op: ReduceOp | None = None) -> tuple[Any, Finish]:
    """Return the buffer that is sent, and the function that fills it before each start (None: it is the array)."""
    how = None if op is None else plan(op, array.dtype)
    overlaps = output is not None and np.may_share_memory(array, output)
    if is_plain(array) and not (how and how.changes) and not overlaps:
        return array, None
    buffer = np.empty(array.shape, how.dtype if how else array.dtype)
    return buffer, partial(reduction_input, array, op, buffer) if op else partial(setitem, buffer, ..., array)
