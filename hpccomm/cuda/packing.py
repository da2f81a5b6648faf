"""Packing: the contiguous buffers of an operation on GPU arrays of any layout.

A contiguous array is its own buffer if its address is a multiple of its element size; a misaligned access by a kernel
of NCCL or CuPy would end the process's CUDA context. Any other array is packed into a temporary buffer before the
transport works, and unpacked after it, both on a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from ..core.arrays import why_no_gpu_view
from ..core.backend import Pieces
from ..core.overlap import extent, overlapping
from ..core.pieces import Messages
from ..errors import on_rank
from . import seam
from .seam import Runtime

_pointer = attrgetter("data.ptr")
MOST_ALIGNED = 16  # bytes: CuPy reads complex numbers of 16 bytes at once


class Packing:
    """The buffers of one operation, packed on `stream`; keep `alive`, the temporary ones, until it is done."""

    __slots__ = ("_device", "_runtime", "_unpacking", "alive", "stream")

    def __init__(self, runtime: Runtime, device: int, stream: int) -> None:
        self._runtime = runtime
        self._device = device
        self.stream = stream
        self._unpacking: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.alive: list[Any] = []

    def send_buffer(self, array: Any) -> Any:
        """Return a contiguous array with the values of `array`."""
        return array if is_plain(array) else self._packed(array)

    def recv_buffer(self, array: Any) -> Any:
        """Return a contiguous array; `unpack` copies its values to `array`."""
        if is_plain(array):
            return array
        buffer = self.empty(array.shape, array.dtype)
        self._unpacking.append((self._runtime.copy, (array, buffer)))
        return buffer

    def joined_buffer(self, arrays: Sequence[Any]) -> Any:
        """Return the start of contiguous memory for equally large `arrays`; `unpack` copies it to them.

        It is the arrays' own memory if they are already adjacent.
        """
        first = arrays[0]
        if all(is_plain(each) and each.data.ptr == first.data.ptr + i * first.nbytes for i, each in enumerate(arrays)):
            return first
        buffer = self.empty((len(arrays), first.size), first.dtype)
        self._unpacking += [(self._runtime.copy, pair) for pair in zip(arrays, buffer, strict=True)]
        return buffer

    def in_place(self, array: Any, alignment: int = 1) -> Any:
        """Return a contiguous array with the values of `array`; `unpack` copies the new values back.

        The address is a multiple of `alignment` bytes (at most 256, the alignment of every CUDA allocation).
        """
        if is_plain(array) and array.data.ptr % alignment == 0:
            return array
        buffer = self._packed(array)
        self._unpacking.append((self._runtime.copy, (array, buffer)))
        return buffer

    def unaliased(self, arrays: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return contiguous arrays with the values of `arrays`, in memory that does not overlap `outputs`."""
        shared = overlapping(*([extent(each, each.data.ptr) for each in given] for given in (arrays, outputs)))
        return [
            self._packed(array) if is_shared else self.send_buffer(array) for array, is_shared in zip(arrays, shared)
        ]

    def multiplied(self, array: Any, factor: Any, target: Any = None) -> Any:
        """Return ``factor * array``, contiguous, in `target` or a new array; with factor None, act as `send_buffer`."""
        if factor is None or not array.size:
            return array if array is target else self.send_buffer(array)
        if target is None:
            target = self.empty(array.shape, array.dtype)
        if not is_aligned(array):
            array = self._packed(array)
        self._do(self._runtime.multiply, target, array, factor)
        return target

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array: to pack it, or because a rank sends it to itself."""
        self._do(self._runtime.copy, target, source)

    def _do(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the seam with the stream as its last argument."""
        function(*arguments, self.stream)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a contiguous temporary array for this operation."""
        buffer = self._runtime.empty(shape, dtype, self._device, self.stream)
        self.alive.append(buffer)
        return buffer

    def _packed(self, array: Any) -> Any:
        buffer = self.empty(array.shape, array.dtype)
        self.copy(buffer, array)
        return buffer

    def messages(self, rank: int, sends: Pieces, receives: Pieces, adds: bool) -> Messages:
        """Return the messages of `Backend.exchange`; `exchange` packs them."""
        return Messages(rank, sends, receives, adds, _pointer, is_plain, self.empty)

    def exchange(self, messages: Messages, adds: bool) -> None:
        """Pack the messages to send; `unpack` copies the received messages to their arrays, or adds them."""
        for launch in self._runtime.copies(messages.packed):
            self._do(launch)
        if adds:  # in sequence: several may be added to the same cells
            for array, buffer in messages.unpacked:
                self._add_later(array, buffer)
        else:
            self._unpacking += [(launch, ()) for launch in self._runtime.copies(messages.unpacked)]

    def _add_later(self, array: Any, buffer: Any) -> None:
        """Make `unpack` add a received buffer, or a message of this rank to itself, to an array."""
        target = array if is_aligned(array) else self.empty(array.shape, array.dtype)
        source = buffer if is_aligned(buffer) else self._packed(buffer)
        # now: a launch behind a pending receive could wait
        self._runtime.load_additions(target.dtype, joined_dimensions(target), self._device, self.stream)
        addition = (self._runtime.add, (target, source))
        if target is array:
            self._unpacking.append(addition)
        else:
            copy = self._runtime.copy
            self._unpacking += [(copy, (target, array)), addition, (copy, (array, target))]

    def unpack(self, stream: int) -> None:
        """Copy the received buffers to their arrays, or add them."""
        for function, arguments in self._unpacking:
            function(*arguments, stream)


def is_plain(array: Any) -> bool:
    """Return True for a contiguous array whose memory a transport can use directly."""
    return bool(array.flags.c_contiguous) and array.data.ptr % _alignment(array) == 0


def is_aligned(array: Any) -> bool:
    """Return True for an array of any layout whose elements are all aligned for CuPy's kernels."""
    bits = array.data.ptr
    for length, stride in zip(array.shape, array.strides):
        if length > 1:
            bits |= stride
    return bits % _alignment(array) == 0  # type: ignore[no-any-return]


def _alignment(array: Any) -> int:
    """Return the alignment of an element: the largest power of 2 that divides its size, at most 16."""
    itemsize = array.itemsize or 1
    return min(itemsize & -itemsize, MOST_ALIGNED)


def joined_dimensions(array: Any) -> int:
    """Return the number of dimensions of an array in CuPy's kernels, which join dimensions with a common stride.

    See `_reduced_view_core` in CuPy's _core/_kernel.pyx.
    """
    axes = [(length, stride) for length, stride in zip(array.shape, array.strides) if length != 1]
    return 1 + sum(1 for (_, outer), (length, stride) in pairwise(axes) if outer != length * stride)


def gpu_of(array: Any) -> int:
    """Return the number of an array's GPU; raise TypeError for an array that CuPy can't view."""
    try:
        return array.data.device_id  # type: ignore[no-any-return]
    except AttributeError:
        raise TypeError(
            f"CuPy can't view a {type(array).__name__} of dtype {getattr(array, 'dtype', None)} without a copy "
            f"({why_no_gpu_view(array)}); view it as integers of the same size, or convert it{on_rank()}"
        ) from None


def on_the_host(array: Any, host: Any = None) -> Any:
    """Copy a GPU array's values on the current stream to a NumPy array in C order: `host`, or a new one."""
    runtime, device = seam.runtime(), array.data.device_id
    host = np.empty(array.shape, array.dtype) if host is None else host
    with seam.on_device(runtime, device):
        stream = runtime.current_stream(device)
        contiguous = Packing(runtime, device, stream).send_buffer(array)
        runtime.to_host(host, contiguous, stream)
        runtime.synchronize_stream(stream)
    return host


def from_the_host(array: Any, host: Any) -> None:
    """Write the values of a NumPy array in C order to a GPU array, and wait for the copy."""
    runtime, device = seam.runtime(), array.data.device_id
    with seam.on_device(runtime, device):
        stream = runtime.current_stream(device)
        packing = Packing(runtime, device, stream)
        runtime.to_device(packing.recv_buffer(array), host, stream)
        packing.unpack(stream)
        runtime.synchronize_stream(stream)
