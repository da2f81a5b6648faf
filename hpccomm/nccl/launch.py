"""Launch: one operation on its way to the stream: its memory, NCCL's calls, and what is done after them.

An array that is contiguous is its own buffer; every other one is packed into a temporary one on the stream, and
unpacked there. NCCL's calls are collected and made at the end, those of one operation as one group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from ..cuda.seam import NCCL, Communicator, Runtime
from .types import Reduction, moved

CALLS_PER_GROUP = 1024  # NCCL takes 2048 (its user guide, "Group Calls")


class Launch:
    """An operation whose packing may be on the stream already; `alive` has to live until it is done."""

    __slots__ = ("_calls", "_comm", "_device", "_nccl", "_runtime", "_stream", "_unpacking", "alive")

    def __init__(self, nccl: NCCL, runtime: Runtime, comm: Communicator, device: int, stream: int) -> None:
        self._nccl = nccl
        self._runtime = runtime
        self._comm = comm
        self._device = device
        self._stream = stream
        self._calls: list[tuple[Callable[..., None], tuple[int, ...]]] = []
        self._unpacking: list[tuple[Any, Any]] = []
        self.alive: list[Any] = []

    # -- memory ----------------------------------------------------------------------------------

    def reading(self, array: Any) -> Any:
        """Return a contiguous array with the values of `array`."""
        return array if array.flags.c_contiguous else self._packed(array)

    def writing(self, array: Any) -> Any:
        """Return a contiguous array whose values get into `array` in the end."""
        if array.flags.c_contiguous:
            return array
        buffer = self._empty_like(array)
        self._unpacking.append((array, buffer))
        return buffer

    def in_place(self, array: Any) -> Any:
        """Return a contiguous array with the values of `array`, whose new ones get into `array` in the end."""
        if array.flags.c_contiguous:
            return array
        buffer = self._packed(array)
        self._unpacking.append((array, buffer))
        return buffer

    def apart(self, arrays: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return contiguous arrays with the values of `arrays`, outside the memory of `outputs`."""
        written = sorted(_extent(output) for output in outputs if output.size)
        starts = [start for start, _ in written]
        return [self._packed(array) if _touches(array, starts, written) else self.reading(array) for array in arrays]

    def multiplied(self, array: Any, factor: Any, target: Any = None) -> Any:
        """Return `array` times a factor in `target`, or in a new contiguous array; without a factor, as it is."""
        if factor is None or not array.size:
            return self.reading(array)
        if target is None:
            target = self._empty_like(array)
        self._runtime.multiply(target, array, factor, self._stream)
        return target

    def copy(self, target: Any, source: Any) -> None:
        """Copy what a rank sends to itself."""
        self._runtime.copy(target, source, self._stream)

    def _packed(self, array: Any) -> Any:
        buffer = self._empty_like(array)
        self._runtime.copy(buffer, array, self._stream)
        return buffer

    def _empty_like(self, array: Any) -> Any:
        buffer = self._runtime.empty(array.shape, array.dtype, self._device, self._stream)
        self.alive.append(buffer)
        return buffer

    # -- NCCL's calls ----------------------------------------------------------------------------

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

    def _call(self, size: int, function: Callable[..., None], *arguments: int) -> None:
        if size:
            self._calls.append((function, arguments))

    def make_calls(self) -> None:
        """Make the calls, several of them as one group of NCCL's, very many as several groups."""
        stream = self._stream
        if len(self._calls) == 1:
            function, arguments = self._calls[0]
            return function(*arguments, stream)
        for start in range(0, len(self._calls), CALLS_PER_GROUP):
            self._nccl.group_start()
            try:
                for function, arguments in self._calls[start : start + CALLS_PER_GROUP]:
                    function(*arguments, stream)
            finally:
                self._nccl.group_end()

    def unpack(self) -> None:
        """Copy to the arrays that are not contiguous."""
        for array, buffer in self._unpacking:
            self._runtime.copy(array, buffer, self._stream)


def _moved(array: Any) -> tuple[int, int]:
    """Return how many elements of which of NCCL's types an array is."""
    datatype, width = moved(array.dtype)
    return array.size * width, datatype


def _touches(array: Any, starts: list[int], extents: list[tuple[int, int]]) -> bool:
    """Whether an array shares memory with one of these extents, which are in the order of their starts."""
    if not starts or not array.size:
        return False
    start, end = _extent(array)
    i = bisect_right(starts, start)
    return (i > 0 and extents[i - 1][1] > start) or (i < len(starts) and starts[i] < end)


def _extent(array: Any) -> tuple[int, int]:
    """Return the lowest address of an array, and the one behind its highest."""
    start = end = array.data.ptr
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        start, end = (start + reach, end) if reach < 0 else (start, end + reach)
    return start, end + array.itemsize
