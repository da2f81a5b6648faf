"""Plan: what one operation does on a stream, to be run once, or again and again.

That is, in this order: packing; NCCL's calls, those of one operation as one group; unpacking. Making a plan puts
nothing on a stream.

In a capture no stream waits for what is outside of it: CUDA refuses that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..cuda.packing import Packing
from ..cuda.seam import Communicator, Runtime
from ..errors import DistBackendError, here
from .types import Reduction, moved

CALLS_PER_GROUP = 1024  # NCCL takes 2048 (its user guide, "Group Calls")
# NCCL allows no two threads at once to issue operations of communicators on one GPU (its user guide, "Thread Safety").
ISSUING = threading.RLock()

Step = tuple[Callable[..., None], tuple[Any, ...]]  # a function whose last argument is the stream, and the others


class Plan(Packing):
    """The steps of one operation of a communicator; its temporary memory may be used again by what follows on `stream`.

    A plan that `is_kept` keeps that memory, so that a CUDA graph may replay its steps.
    """

    __slots__ = ("_calls", "_comm", "_cuts", "_packing", "is_elsewhere", "is_kept")

    def __init__(self, runtime: Runtime, comm: Communicator, device: int, stream: int) -> None:
        super().__init__(runtime, device, stream)
        self.is_elsewhere = False  # whether `device` is not the current one
        self.is_kept = False
        self._comm = comm
        self._packing: list[Step] = []
        self._calls: list[Step] = []
        self._cuts: list[int] = []  # where steps end, if it matters

    def run(self, stream: int) -> None:
        """Put all but the unpacking on the stream; the GPU is the current one, and no other thread calls NCCL."""
        for function, arguments in self._packing:
            function(*arguments, stream)
        if len(self._calls) == 1:
            function, arguments = self._calls[0]
            function(*arguments, stream)
        else:
            self._make_calls(stream)

    # -- what is planned -------------------------------------------------------------------------

    def broadcast(self, sent: Any, buffer: Any, root: int) -> None:
        """Copy `sent` of the root into `buffer` of every rank."""
        self._call(buffer.size, self._comm.broadcast, sent.data.ptr, buffer.data.ptr, *_moved(buffer), root)

    def all_reduce(self, sent: Any, buffer: Any, how: Reduction) -> None:
        """Reduce `sent` of every rank into `buffer` of every rank."""
        count = buffer.size * how.width
        self._call(count, self._comm.all_reduce, sent.data.ptr, buffer.data.ptr, count, how.datatype, how.op)

    def reduce(self, sent: Any, buffer: Any, root: int, how: Reduction) -> None:
        """Reduce `sent` of every rank into `buffer` of the root."""
        count = sent.size * how.width
        self._call(count, self._comm.reduce, sent.data.ptr, buffer.data.ptr, count, how.datatype, how.op, root)

    def reduce_scatter(self, sent: Any, buffer: Any, how: Reduction) -> None:
        """Reduce the r-th part of `sent` of every rank into `buffer` of rank r."""
        count = buffer.size * how.width
        self._call(count, self._comm.reduce_scatter, sent.data.ptr, buffer.data.ptr, count, how.datatype, how.op)

    def all_gather(self, sent: Any, buffer: Any) -> None:
        """Copy `sent` of every rank, one after the other, into `buffer` of every rank."""
        self._call(sent.size, self._comm.all_gather, sent.data.ptr, buffer.data.ptr, *_moved(sent))

    def all_to_all(self, sent: Any, buffer: Any, ranks: int) -> None:
        """Copy the r-th part of `sent` of rank s into the s-th part of `buffer` of rank r."""
        count, datatype = _moved(sent)
        self._call(count, self._comm.all_to_all, sent.data.ptr, buffer.data.ptr, count // ranks, datatype)

    def send(self, sent: Any, peer: int) -> None:
        """Send an array; an empty one needs no message."""
        self._call(sent.size, self._comm.send, sent.data.ptr, *_moved(sent), peer)

    def recv(self, buffer: Any, peer: int) -> None:
        """Receive an array; an empty one needs no message."""
        self._call(buffer.size, self._comm.recv, buffer.data.ptr, *_moved(buffer), peer)

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call this function, whose last argument is the stream, in place of NCCL."""
        self._calls.append((function, arguments))

    def ends_step(self) -> None:
        """Mark the end of a step, which no group of NCCL's may cut: both ends would wait."""
        self._cuts.append(len(self._calls))

    def _do(self, function: Callable[..., None], *arguments: Any) -> None:
        self._packing.append((function, arguments))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return temporary memory, which a CUDA graph would use again when it has been freed."""
        if not self.is_kept:
            refuse_capture(self._runtime, self.stream, "an operation that needs temporary memory")
        return super().empty(shape, dtype)

    def _call(self, size: int, function: Callable[..., None], *arguments: int) -> None:
        if size:
            self._calls.append((function, arguments))

    def _make_calls(self, stream: int) -> None:
        """Make the calls as one group of NCCL's, very many as several groups."""
        start = 0
        while start < len(self._calls):
            end = self._end_of_group(start)
            self._comm.group_start()
            try:
                for function, arguments in self._calls[start:end]:
                    function(*arguments, stream)
            finally:
                self._comm.group_end()
            start = end

    def _end_of_group(self, start: int) -> int:
        """Return the end of a group that begins at `start`: behind as many whole steps as fit."""
        fits = [cut for cut in self._cuts if start < cut <= start + CALLS_PER_GROUP]
        return fits[-1] if fits else min(start + CALLS_PER_GROUP, len(self._calls))


def refuse_capture(runtime: Runtime, stream: int, what: str) -> None:
    """Raise where a CUDA graph is captured: what is put on the stream would be replayed without its host's part."""
    if runtime.is_capturing(stream):
        raise DistBackendError(
            f"{what} can't be replayed by a CUDA graph, and the current stream is being captured; capture blocking "
            f"operations on contiguous arrays, or persistent ones (all_reduce_init, ...), or take it out of the graph"
            f"{here()}"
        )


def _moved(array: Any) -> tuple[int, int]:
    """Return the number of an array's elements and their datatype, as NCCL counts them."""
    datatype, width = moved(array.dtype)
    return array.size * width, datatype
