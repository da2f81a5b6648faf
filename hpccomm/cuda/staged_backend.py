"""StagedBackend: GPU arrays over any MPI (``cuda:mpi``), by way of page-locked host memory.

Each operation copies its inputs to staging buffers on the host, has the host's backend work there, and copies the
outputs back; the host waits for the copies. A blocking operation on one large array goes in chunks, so that the copies
and the messages overlap; every rank cuts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

from ..core.backend import Backend
from ..core.options import BackendOptions
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import DistBackendError, UnsupportedOperationError, here
from . import choice, seam
from .packing import Packing, gpu_of

T = TypeVar("T")

CHUNK_BYTES = 4 << 20  # of collectives; of a message the other end may be a host array
CHUNKS = 3  # one on its way to the host, one in a message, one on its way back


class Staged(NamedTuple):
    """An argument of an operation that is staged: a GPU array, a list of them, a list of lists, or None."""

    arrays: Any
    is_input: bool = True
    is_output: bool = False


def result(arrays: Any) -> Staged:
    """Return an argument that the operation only writes."""
    return Staged(arrays, is_input=False, is_output=True)


def flat(arrays: Any) -> list[Any]:
    """Return the arrays of an argument as one list."""
    if isinstance(arrays, list):
        return [array for each in arrays for array in flat(each)]
    return [] if arrays is None else [arrays]


class StagedBackend(Backend):
    """GPU arrays by way of the host; `host` is the backend that does the work there."""

    name = "mpi"

    def __init__(self, options: BackendOptions, host: Backend) -> None:
        super().__init__(options.rank, options.size)
        self._options = options
        self._host = host
        self._runtime = seam.runtime()
        self._copy_streams: dict[int, CopyStreams] = {}  # of each GPU

    def connect(self) -> int | None:
        device, comm = self._options.device_id, self._options.comm
        if device == "auto" and comm is not None:
            device = choice.choose(comm.allgather(choice.visible_gpus(self._runtime, None)), self._options.ranks)[
                self.rank
            ]
        if device is None or device == "auto":
            return None
        self._runtime.use_device(device)
        return device

    def _staging(self, *arrays: Any) -> Staging:
        """Return the staging of an operation, after blocking the host until the current stream is done."""
        device = gpu_of(arrays[0])
        for array in arrays:
            if gpu_of(array) != device:
                raise ValueError(
                    f"arrays of one call are on GPUs {device} and {gpu_of(array)}; one call, one GPU{here()}"
                )
        if device not in self._copy_streams:
            self._copy_streams[device] = CopyStreams(self._runtime, device)
        # The host waits for the copies anyway: it may as well wait for the arrays, which needs no event.
        with seam.on_device(self._runtime, device):
            self._runtime.synchronize_stream(self._runtime.current_stream(device))
        return Staging(self._runtime, self._copy_streams[device])

    def _staged(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Call the host's `operation` with host arrays in place of each `Staged` argument."""
        staging = self._staging(
            *(array for each in arguments if isinstance(each, Staged) for array in flat(each.arrays))
        )
        return staging.run(
            operation, *(staging.on_host(*each) if isinstance(each, Staged) else each for each in arguments)
        )

    # -- one array -------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        is_root = root == self.rank
        return self._elementwise(self._host.broadcast, Staged(array, is_root, not is_root), root, async_op)

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(self._host.all_reduce, Staged(array, True, True), op, async_op)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(self._host.reduce, Staged(array, True, root == self.rank), root, op, async_op)

    def scan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(self._host.scan, Staged(array, True, True), op, async_op)

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(self._host.exscan, Staged(array, True, True), op, async_op)

    def _elementwise(self, operation: Callable[..., T], staged: Staged, *arguments: Any) -> T | None:
        """Run an operation that treats every element alike, large arrays in chunks; the last argument is async_op."""
        array, is_input, is_output = staged
        if arguments[-1] or array.nbytes <= CHUNK_BYTES:
            return self._staged(operation, staged, *arguments)
        staging = self._staging(array)
        if not is_output:
            buffer = staging.send_buffer(array)
        else:
            buffer = staging.in_place(array) if is_input else staging.recv_buffer(array)
        staging.run_in_chunks(lambda host: operation(host, *arguments), buffer.reshape(-1), is_input, is_output)
        return None

    # -- one array from or to each rank ----------------------------------------------------------

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        return self._staged(self._host.all_gather_single, result(output), Staged(array), async_op)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        return self._staged(self._host.all_gather, result(outputs), Staged(array), async_op)

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        return self._staged(self._host.gather, Staged(array), result(outputs), root, async_op)

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        return self._staged(self._host.scatter, result(output), Staged(inputs), root, async_op)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        return self._staged(self._host.reduce_scatter, result(output), Staged(inputs), op, async_op)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._staged(self._host.reduce_scatter_single, result(output), Staged(array), op, async_op)

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        return self._staged(self._host.all_to_all, result(outputs), Staged(inputs), async_op)

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        arguments = result(output), Staged(array), output_counts, input_counts, async_op
        return self._staged(self._host.all_to_all_single, *arguments)

    # -- many arrays in one message --------------------------------------------------------------

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        return self._staged(self._host.all_reduce_coalesced, Staged(arrays, True, True), op, async_op)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        is_root = root == self.rank
        return self._staged(self._host.broadcast_coalesced, Staged(arrays, is_root, not is_root), root, async_op)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        return self._staged(self._host.all_gather_coalesced, result(output_lists), Staged(arrays), async_op)

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        return self._staged(self._host.all_gather_single_coalesced, result(outputs), Staged(arrays), async_op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        return self._staged(self._host.reduce_scatter_single_coalesced, result(outputs), Staged(arrays), op, async_op)

    # -- point to point --------------------------------------------------------------------------

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        return self._staged(self._host.send, Staged(array), dst, tag, async_op)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int | None:
        return self._staged(self._host.recv, result(array), src, tag, async_op)

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int | None:
        return self._staged(self._host.sendrecv, Staged(array), dst, result(output), src, tag, recv_tag, async_op)

    # -- the rest --------------------------------------------------------------------------------

    def barrier(self, async_op: bool) -> Work | None:
        return self._host.barrier(async_op)

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        self._host.monitored_barrier(timeout, wait_all_ranks)

    def close(self) -> None:
        self._host.close()
        for streams in self._copy_streams.values():
            streams.close()

    def translate_error(self, operation: str, error: Exception) -> Exception:
        text = self._runtime.explain(error)
        if text is None:
            return self._host.translate_error(operation, error)
        return DistBackendError(f"CUDA reports {text}{here()}", operation)

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"not for GPU arrays over MPI; use a host array{here()}", operation)


class StagingBuffer(NamedTuple):
    """Page-locked memory for one chunk, and the events recorded behind the copies into it and out of it."""

    memory: Any
    filled: int
    emptied: int


class CopyStreams:
    """A group's two streams on one GPU, for copies to the host and back, and the staging buffers between them."""

    def __init__(self, runtime: seam.Runtime, device: int) -> None:
        self._runtime = runtime
        self.device = device
        self.to_host = runtime.create_stream(device)
        self.to_device = runtime.create_stream(device)
        self._buffers: list[StagingBuffer] = []

    @property
    def buffers(self) -> list[StagingBuffer]:
        """The staging buffers, which the first large array makes."""
        if not self._buffers:
            event = partial(self._runtime.create_event, self.device)
            self._buffers = [StagingBuffer(self._runtime.pinned(CHUNK_BYTES), event(), event()) for _ in range(CHUNKS)]
        return self._buffers

    def close(self) -> None:
        """Free everything."""
        for buffer in self._buffers:
            self._runtime.destroy_event(buffer.filled)
            self._runtime.destroy_event(buffer.emptied)
        self._runtime.destroy_stream(self.to_host)
        self._runtime.destroy_stream(self.to_device)


class Staging(Packing):
    """The copies of one operation between a GPU and the host."""

    __slots__ = ("_outputs", "_streams")

    def __init__(self, runtime: seam.Runtime, streams: CopyStreams) -> None:
        super().__init__(runtime, streams.device, streams.to_host)
        self._streams = streams
        self._outputs: list[tuple[Any, Any]] = []

    def on_host(self, arrays: Any, is_input: bool, is_output: bool) -> Any:
        """Return host arrays in place of `arrays`; copies of inputs have begun, outputs are copied back at the end."""
        if arrays is None:
            return None
        if isinstance(arrays, list):
            return [self.on_host(array, is_input, is_output) for array in arrays]
        host = self._runtime.pinned(arrays.nbytes).view(arrays.dtype).reshape(arrays.shape)
        if is_input:
            self._runtime.to_host(host, self.send_buffer(arrays), self.stream)
        if is_output:
            self._outputs.append((arrays, host))
        return host

    def run(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Call the host's operation, and copy its outputs back: now, or as the last part of its Work."""
        self.synchronize()
        outcome = operation(*arguments)
        if isinstance(outcome, Work):
            outcome.finish_with(self.copy_back)
        else:
            self.copy_back()
        return outcome

    def synchronize(self) -> None:
        """Block the host until everything on the stream is done."""
        self._runtime.synchronize_stream(self.stream)

    def copy_back(self) -> None:
        """Copy the outputs to their arrays, and block the host until that is done."""
        with self.on_its_gpu():
            for array, host in self._outputs:
                self._runtime.to_device(self.recv_buffer(array), host, self.stream)
            self.unpack(self.stream)
            self.synchronize()

    def on_its_gpu(self) -> AbstractContextManager[None]:
        """Return a context in which its GPU is the current one; a thread of hpccomm's begins on GPU 0."""
        return seam.on_device(self._runtime, self._device)

    def run_in_chunks(self, operation: Callable[[Any], Any], array: Any, is_input: bool, is_output: bool) -> None:
        """Run the host's operation on `array` (of one dimension), while the chunks before and after are copied."""
        runtime, to_device = self._runtime, self._streams.to_device
        length = max(1, CHUNK_BYTES // array.itemsize)
        starts = range(0, array.size, length)
        chunks = [
            (array[start : start + length], buffer) for start, buffer in zip(starts, cycle(self._streams.buffers))
        ]

        def fetch(i: int) -> None:
            chunk, buffer = chunks[i]
            if i >= CHUNKS:
                runtime.wait(self.stream, buffer.emptied)
            if is_input:
                runtime.to_host(buffer.memory[: chunk.nbytes], chunk, self.stream)
            runtime.record(buffer.filled, self.stream)

        fetch(0)
        for i, (chunk, buffer) in enumerate(chunks):
            if i + 1 < len(chunks):
                fetch(i + 1)
            runtime.synchronize_event(buffer.filled)
            host = buffer.memory[: chunk.nbytes].view(array.dtype)
            operation(host)
            if is_output:
                runtime.to_device(chunk, host, to_device)
            runtime.record(buffer.emptied, to_device)
        runtime.synchronize_stream(to_device)
        self.unpack(self.stream)
        self.synchronize()
