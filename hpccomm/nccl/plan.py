"""Plan: the calls of one operation on a stream, to run once or repeatedly.

Their order: packing; NCCL's calls, as one group; unpacking. Making a plan puts nothing on a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .. import native
from ..cuda.packing import Packing
from ..cuda.seam import Communicator, Runtime
from ..errors import DistBackendError, on_rank
from .types import Reduction, moved_array

CALLS_PER_GROUP = 1024  # NCCL takes 2048 (its user guide, "Group Calls"), which one step may use up
# NCCL forbids two threads to issue operations on one GPU at once, for any communicators (user guide, "Thread Safety").
ISSUING = threading.RLock() if native.fastpath is None else native.fastpath.Lock()

Call = tuple[Callable[..., None], tuple[Any, ...]]  # a function, and its arguments except the last, the stream


class Plan(Packing):
    """The calls of one operation of a communicator; later work on `stream` may reuse its temporary memory.

    A plan that `is_persistent` keeps that memory, so that a CUDA graph may replay its calls.
    """

    __slots__ = ("_calls", "_comm", "_packing", "_step_ends", "is_here", "is_persistent", "message")

    def __init__(self, runtime: Runtime, comm: Communicator, device: int, stream: int, is_here: bool = True) -> None:
        super().__init__(runtime, device, stream)
        self.is_here = is_here  # `device` is the current one
        self.is_persistent = False
        self.message = ""  # the operation's name if it is between two ranks
        self._comm = comm
        self._packing: list[Call] = []
        self._calls: list[Call] = []
        self._step_ends: list[int] = []

    def run(self, stream: int) -> None:
        """Put all calls but the unpacking on the stream; the GPU is current, and no other thread calls NCCL."""
        for function, arguments in self._packing:
            function(*arguments, stream)
        if len(self._calls) == 1:
            function, arguments = self._calls[0]
            function(*arguments, stream)
        else:
            self._run_groups(stream)

    # -- calls -----------------------------------------------------------------------------------

    def broadcast(self, sent: Any, buffer: Any, root: int) -> None:
        """Copy `sent` of the root into `buffer` of every rank."""
        self._call(buffer.size, self._comm.broadcast, sent.data.ptr, buffer.data.ptr, *moved_array(buffer), root)

    def all_reduce(self, sent: Any, buffer: Any, reduction: Reduction) -> None:
        """Reduce `sent` of every rank into `buffer` of every rank."""
        self._call(buffer.size, self._comm.all_reduce, sent.data.ptr, buffer.data.ptr, *reduction.of(buffer))

    def reduce(self, sent: Any, buffer: Any, root: int, reduction: Reduction) -> None:
        """Reduce `sent` of every rank into `buffer` of the root."""
        self._call(sent.size, self._comm.reduce, sent.data.ptr, buffer.data.ptr, *reduction.of(sent), root)

    def reduce_scatter(self, sent: Any, buffer: Any, reduction: Reduction) -> None:
        """Reduce the r-th part of `sent` of every rank into `buffer` of rank r."""
        self._call(buffer.size, self._comm.reduce_scatter, sent.data.ptr, buffer.data.ptr, *reduction.of(buffer))

    def all_gather(self, sent: Any, buffer: Any) -> None:
        """Copy `sent` of every rank, in rank order, into `buffer` of every rank."""
        self._call(sent.size, self._comm.all_gather, sent.data.ptr, buffer.data.ptr, *moved_array(sent))

    def all_to_all(self, sent: Any, buffer: Any, ranks: int) -> None:
        """Copy the r-th part of `sent` of rank s into the s-th part of `buffer` of rank r."""
        count, datatype = moved_array(sent)
        self._call(count, self._comm.all_to_all, sent.data.ptr, buffer.data.ptr, count // ranks, datatype)

    def send(self, sent: Any, peer: int) -> None:
        """Send an array to a rank, unless it is empty."""
        self._call(sent.size, self._comm.send, sent.data.ptr, *moved_array(sent), peer)

    def recv(self, buffer: Any, peer: int) -> None:
        """Receive an array from a rank, unless it is empty."""
        self._call(buffer.size, self._comm.recv, buffer.data.ptr, *moved_array(buffer), peer)

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        """Add a call of a function that is not NCCL's; its last argument is the stream."""
        self._calls.append((function, arguments))

    def end_step(self) -> None:
        """Mark the end of a step: its calls must be in one group, otherwise both ends of a message would wait."""
        self._step_ends.append(len(self._calls))

    def _do(self, function: Callable[..., None], *arguments: Any) -> None:
        self._packing.append((function, arguments))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return temporary memory; refuse it in a capture: the graph would use it after it has been freed."""
        if not self.is_persistent:
            refuse_capture(self._runtime, self.stream, "an operation that needs temporary memory")
        return super().empty(shape, dtype)

    def _call(self, size: int, function: Callable[..., None], *arguments: int) -> None:
        if size:
            self._calls.append((function, arguments))

    def _run_groups(self, stream: int) -> None:
        """Make NCCL's calls as one group; if there are very many, as several groups of whole steps."""
        start = 0
        while start < len(self._calls):
            end = start + CALLS_PER_GROUP
            ends = [step for step in self._step_ends if start < step <= start + 2 * CALLS_PER_GROUP]
            end = max((step for step in ends if step <= end), default=min(ends, default=end))
            self._comm.group_start()
            try:
                for function, arguments in self._calls[start:end]:
                    function(*arguments, stream)
            finally:
                self._comm.group_end()
            start = end


def refuse_capture(runtime: Runtime, stream: int, what: str) -> None:
    """Raise DistBackendError if a CUDA graph is being captured: a replay would lack the host's part of `what`."""
    if runtime.is_capturing(stream):
        raise DistBackendError(
            f"{what} can't be replayed by a CUDA graph, and the current stream is being captured; capture blocking "
            f"operations on contiguous arrays, or persistent ones (all_reduce_init, ...), or take it out of the graph"
            f"{on_rank()}"
        )
