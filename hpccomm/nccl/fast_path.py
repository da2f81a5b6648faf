"""The fast path of GPU arrays: operations that are one NCCL call, on the arrays themselves.

Planning an operation (buffers for strided arrays, overlapping memory, another current GPU) takes the host far longer
than the NCCL call. Each method checks for the ordinary case: contiguous, aligned CuPy arrays on the GPU of a connected
group, with a dtype and op that `types.py` has seen before, on the planned path. Then it makes the same NCCL call as
`NCCLBackend`, because another rank may take the planned path; otherwise it does nothing and returns False.
`Connection` orders streams, locks NCCL and handles failures on both paths.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..core.arrays import device_of_type
from ..core.backend import GPUFastPath
from ..core.operation_list import CALLED
from .types import known_moves, known_reductions

if TYPE_CHECKING:
    from .backend import NCCLBackend
    from .connection import Connection

NO_TAG = 0  # the only tag of NCCL's messages


class NCCLFastPath(GPUFastPath):
    """The fast path of one group."""

    def __init__(self, backend: NCCLBackend) -> None:
        self._backend = backend
        self._rank = backend.rank
        self._size = backend.size
        self._device = ""  # of the arrays that it accepts; empty until NCCL has connected the ranks
        self._connection: Connection

    def open(self, connection: Connection, device: str) -> None:
        """Accept the arrays of `device` from now on."""
        self._connection = connection
        self._device = device

    # -- operations ------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Any:
        how = self._moved(array)
        if how is None or not self._is_rank(root):
            return False
        at = array.data.ptr
        return self._do("broadcast", self._connection.comm.broadcast, (at, at, *how, root), async_op, array)

    def all_reduce(self, array: Any, op: Any, async_op: bool) -> Any:
        how = self._reduced(array, op)
        if how is None:
            return False
        at = array.data.ptr
        return self._do("all_reduce", self._connection.comm.all_reduce, (at, at, *how), async_op, array)

    def reduce(self, array: Any, root: int, op: Any, async_op: bool) -> Any:
        how = self._reduced(array, op)
        if how is None or not self._is_rank(root):
            return False
        at = array.data.ptr
        return self._do("reduce", self._connection.comm.reduce, (at, at, *how, root), async_op, array)

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Any:
        how = self._moved(array)
        if how is None or type(output) is not type(array) or output.dtype is not array.dtype:
            return False
        pointers = _apart(array, output)
        if pointers is None or output.size != array.size * self._size or not output.flags.c_contiguous:
            return False
        return self._do(
            "all_gather_single", self._connection.comm.all_gather, (*pointers, *how), async_op, output, array
        )

    def reduce_scatter_single(self, output: Any, array: Any, op: Any, async_op: bool) -> Any:
        how = self._reduced(output, op)
        if how is None or type(array) is not type(output) or array.dtype is not output.dtype:
            return False
        pointers = _apart(array, output)
        if pointers is None or array.size != output.size * self._size or not array.flags.c_contiguous:
            return False
        return self._do(
            "reduce_scatter_single", self._connection.comm.reduce_scatter, (*pointers, *how), async_op, output, array
        )

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Any:
        how = self._moved(array)
        if how is None or not self._is_message(dst, tag):
            return False
        return self._do("send", self._connection.comm.send, (array.data.ptr, *how, dst), async_op, array, peer=dst)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Any:
        how = self._moved(array)
        if how is None or not self._is_message(src, tag):
            return False
        done = self._do("recv", self._connection.comm.recv, (array.data.ptr, *how, src), async_op, array, peer=src)
        if async_op and done:
            done.source = src
        return done

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int | None, async_op: bool
    ) -> Any:
        how, into = self._moved(array), self._moved(output)
        if how is None or into is None or recv_tag is not None:
            return False
        if not (type(dst) is type(src) is type(tag) is int and tag == 0):
            return False
        if not (0 <= dst < self._size and 0 <= src < self._size):
            return False
        pointers = _apart(array, output)
        if pointers is None:
            return False
        arguments = pointers[0], *how, dst, pointers[1], *into, src
        done = self._do("sendrecv", self._exchange, arguments, async_op, output, array, peer=dst)
        if async_op and done:
            done.source = src
        return done

    def _exchange(
        self, sent: int, count: int, datatype: int, dst: int, into: int, room: int, kind: int, src: int, stream: int
    ) -> None:
        """Send and receive as one group of calls."""
        comm = self._connection.comm
        comm.group_start()
        try:
            comm.send(sent, count, datatype, dst, stream)
            comm.recv(into, room, kind, src, stream)
        finally:
            comm.group_end()

    # -- the ordinary case -----------------------------------------------------------------------

    def _moved(self, array: Any) -> tuple[int, int] | None:
        """Return NCCL's count and datatype of an array; None if it is no ordinary case."""
        if device_of_type.get(type(array)) != self._device or not array.flags.c_contiguous:
            return None
        known, size = known_moves.get(array.dtype), array.size
        if known is None or not size or array.data.ptr % array.itemsize:
            return None
        return size * known[1], known[0]

    def _reduced(self, array: Any, op: Any) -> tuple[int, int, int] | None:
        """Return NCCL's count, datatype and operation of an array; None if it is no ordinary case."""
        if device_of_type.get(type(array)) != self._device or not array.flags.c_contiguous:
            return None
        try:
            known, size = known_reductions.get((array.dtype, op)), array.size
        except TypeError:  # an unhashable op
            return None
        if known is None or not size or array.data.ptr % array.itemsize:
            return None
        return size * known[1], known[0], known[2]

    def _is_rank(self, given: Any) -> bool:
        return type(given) is int and 0 <= given < self._size

    def _is_message(self, peer: Any, tag: Any) -> bool:
        return type(peer) is type(tag) is int and tag == 0 and 0 <= peer < self._size and peer != self._rank

    # -- the call --------------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        async_op: bool,
        result: Any,
        sent: Any = None,
        peer: int | None = None,
    ) -> Any:
        """Run an operation as one NCCL call, and count it (as a message if `peer` is given); or return False."""
        connection, dispatcher, failure = self._connection, self.dispatcher, None
        if result.data.device_id != connection.device:
            return False
        try:
            if async_op:
                done: Any = connection.begin(function, arguments, result if sent is None else (result, sent))
            else:
                done = connection.call(function, arguments)
        except Exception as error:
            failure, done = error, True
        if not done:
            return False
        if peer is not None:
            dispatcher.messages = dispatcher.fast_path.passed_messages = dispatcher.messages + 1
            number = dispatcher.messages + dispatcher.fast_path.messages
            if name != "recv":
                dispatcher.last_sent.append(("send", peer, NO_TAG))
        else:
            dispatcher.collectives = dispatcher.fast_path.passed_collectives = dispatcher.collectives + 1
            number = dispatcher.collectives + dispatcher.fast_path.count
            dispatcher.recent.append((number, name, result.dtype, result.nbytes))
        if failure is not None:
            raise dispatcher.translated(self._backend, CALLED.get((name, async_op), name), number, failure)
        if async_op:
            dispatcher.follow(done, name, number, result, *(() if peer is None else (peer, NO_TAG)))
        elif monotonic() >= connection.last.due:
            connection.last.mark(dispatcher, name, result, peer)
        return done


def _apart(array: Any, output: Any) -> tuple[int, int] | None:
    """Return the addresses of two contiguous arrays; None if on different GPUs, misaligned or overlapping."""
    read, written = array.data, output.data
    start, begin = read.ptr, written.ptr
    if read.device_id != written.device_id or start % array.itemsize or begin % output.itemsize:
        return None
    return None if start < begin + output.nbytes and begin < start + array.nbytes else (start, begin)
