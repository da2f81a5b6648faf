"""Persistent operations on MPI's persistent requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..core.persistent_work import PersistentWork, Repeated
from ..core.reduce_op import ReduceOp
from ..core.work import InPlace, Once, repeatable
from .datatypes import message, parts
from .layout import Finish, is_plain, recv_buffer
from .reductions import plan, reduction_input, reduction_output
from .segments import segments
from .works import received

if TYPE_CHECKING:
    from .backend import MPIBackend


LARGEST_IN_NODE = 2 << 20  # bytes of the input; larger ones are as fast in the communication thread


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


class Buffers(NamedTuple):
    """The arrays of an operation as MPI can work on them, and how MPI's persistent operation is made of them."""

    sent: Any
    fill: Finish  # puts the input's values into `sent` before each start
    received: Any
    finish: Finish  # puts the values of `received` into the output
    init: Callable[[], list[MPI.Prequest]]
    op: ReduceOp | None = None  # as which values are reduced
    in_node: bool = True  # whether memory of the node has such an operation
    averages: bool = False  # `finish` does nothing but divide `received` by the number of ranks


def set_up(
    backend: MPIBackend, operation: str, arguments: tuple[Any, ...], is_part: bool = False, arrays: Any = None
) -> PersistentWork:
    """Return the persistent form of an operation; the arguments are those of MPIBackend's method without async_op.

    In memory of the node; or else, if it is large and no part of another one, the asynchronous operation at each start;
    or else MPI's persistent operation. `arrays`: those that memory of the node may pack instead of having them in the
    flat array of an all_reduce.
    """
    made = _BUFFERS[operation](backend, *arguments)
    if made.in_node and backend.node_persistent is not None:
        root = arguments[1] if operation == "broadcast" else 0
        fill, finish = (None, None) if arrays else (made.fill, None if made.averages else made.finish)
        buffers = made.sent, made.received
        node = backend.node_persistent
        work = node.set_up(operation, *buffers, fill, finish, made.op, root, arrays, made.averages)
        if work is not None:
            return work
    if made.in_node and not is_part and max(made.sent.nbytes, made.received.nbytes) >= backend.thread_bytes:
        return Repeated(partial(getattr(backend, operation), *arguments, async_op=True))
    kind = PersistentReceive if operation == "recv" else MPIPersistentWork
    return kind(made.init(), made.fill, made.finish, made.received, made.sent)


def _all_reduce(backend: MPIBackend, array: Any, op: ReduceOp) -> Buffers:
    buffer, finish = reduction_output(array, op, backend.size)
    how = plan(op, array.dtype)
    fill = partial(reduction_input, array, op, buffer) if how.changes or buffer is not array else None

    def init() -> list[MPI.Prequest]:
        pieces = segments(buffer, backend.segment_bytes)
        return [backend.comm.Allreduce_init(MPI.IN_PLACE, (piece, how.datatype), how.op) for piece in pieces]

    return Buffers(buffer, fill, buffer, finish, init, how.reduces, how.reduces is not None, _averages(finish, buffer))


def _broadcast(backend: MPIBackend, array: Any, root: int) -> Buffers:
    finish: Finish = None
    if backend.rank == root:
        buffer, fill = _source(array)
    else:
        (buffer, finish), fill = recv_buffer(array), None
    return Buffers(buffer, fill, buffer, finish, lambda: [backend.comm.Bcast_init(message(buffer), root)])


def _all_gather_single(backend: MPIBackend, output: Any, array: Any) -> Buffers:
    sent, fill = _source(array, output)
    buffer, finish = recv_buffer(output)
    return Buffers(sent, fill, buffer, finish, lambda: [backend.comm.Allgather_init(message(sent), message(buffer))])


def _reduce_scatter_single(backend: MPIBackend, output: Any, array: Any, op: ReduceOp) -> Buffers:
    sent, fill = _source(array, output, op)
    buffer, finish = reduction_output(output, op, backend.size)
    how = plan(op, array.dtype)
    both_ends = (sent, how.datatype), (buffer, how.datatype)
    init = lambda: [backend.comm.Reduce_scatter_block_init(*both_ends, how.op)]
    return Buffers(sent, fill, buffer, finish, init, how.reduces, how.reduces is not None, _averages(finish, buffer))


def _all_to_all_single(
    backend: MPIBackend, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None
) -> Buffers:
    sent, fill = _source(array, output)
    buffer, finish = recv_buffer(output)
    if output_counts is None or input_counts is None:  # equal parts
        return Buffers(sent, fill, buffer, finish, lambda: [backend.comm.Alltoall_init(message(sent), message(buffer))])
    both_ends = parts(sent, input_counts), parts(buffer, output_counts)
    return Buffers(sent, fill, buffer, finish, lambda: [backend.comm.Alltoallv_init(*both_ends)], in_node=False)


def _send(backend: MPIBackend, array: Any, dst: int, tag: int) -> Buffers:
    sent, fill = _source(array)
    return Buffers(sent, fill, sent, None, lambda: [backend.comm.Send_init(message(sent), dst, tag)], in_node=False)


def _recv(backend: MPIBackend, array: Any, src: int | None, tag: int) -> Buffers:
    buffer, finish = recv_buffer(array)
    source = MPI.ANY_SOURCE if src is None else src
    return Buffers(
        buffer, None, buffer, finish, lambda: [backend.comm.Recv_init(message(buffer), source, tag)], in_node=False
    )  # fmt: skip


_BUFFERS: dict[str, Callable[..., Buffers]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "send": _send,
    "recv": _recv,
}


def _averages(finish: Finish, buffer: Any) -> bool:
    """Return whether the last step is a division in place of what the compiled extension divides."""
    return isinstance(finish, InPlace) and buffer.dtype.char in "fd"


def _source(array: Any, output: Any = None, op: ReduceOp | None = None) -> tuple[Any, Finish]:
    """Return the buffer that is sent, and the function that fills it before each start (None: it is the array)."""
    how = None if op is None else plan(op, array.dtype)
    overlaps = output is not None and np.may_share_memory(array, output)
    if is_plain(array) and not (how and how.changes) and not overlaps:
        return array, None
    buffer = np.empty(array.shape, how.dtype if how else array.dtype)
    return buffer, partial(reduction_input, array, op, buffer) if op else partial(setitem, buffer, ..., array)
