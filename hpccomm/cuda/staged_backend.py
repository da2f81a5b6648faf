"""StagedBackend: GPU arrays over any MPI (``cuda:mpi``), staged in page-locked host memory.

Each operation copies its inputs to staging buffers on the host, calls the host backend there, and copies the outputs
back; the host waits for the copies. A small blocking operation copies on the current stream, and the host waits only
for the inputs. A blocking operation on one large array runs in chunks, so that copies and messages overlap; every rank
uses the same chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..core.backend import Backend, Pieces, finished
from ..core.operation_list import OPERATIONS
from ..core.options import BackendOptions
from ..core.persistent_work import PersistentWork, Repeated
from ..core.work import Work
from ..errors import UnsupportedOperationError, on_rank
from . import choice, seam
from .packing import Packing, gpu_of, is_plain
from .work import error_from_cuda

T = TypeVar("T")

CHUNK_BYTES = 4 << 20  # of collectives; a message has no chunks, because its other end may be a host array
CHUNKS = 3  # one is copied to the host, one is communicated, one is copied back
SMALL_BYTES = 64 << 10  # of all arrays of a blocking operation that the host does not wait for at its end
ALIGNMENT = 64  # bytes, of each array in a kept buffer

Uses: TypeAlias = list[tuple[int, bool, bool]]  # of arrays: the argument's place, and if it is an input, an output


def flat(arrays: Any) -> list[Any]:
    """Return the arrays of an argument (a GPU array, a list of them, a list of lists, or None) as one list."""
    if isinstance(arrays, list):
        return [array for each in arrays for array in flat(each)]
    return [] if arrays is None else [arrays]


class StagedBackend(Backend):
    """GPU arrays staged on the host; the backend `host` communicates.

    `_staged_form` makes its methods from the list of operations.
    """

    name = "mpi"

    def __init__(self, options: BackendOptions, host: Backend) -> None:
        super().__init__(options.rank, options.size)
        self._options = options
        self._is_patient = not options.settings.blocking_wait  # the host need not wait for results
        self._host = host
        self._runtime = seam.runtime()
        self._copy_streams: dict[int, CopyStreams] = {}  # for each GPU

    def connect(self) -> int | None:
        device, comm = self._options.device_id, self._options.comm
        if device is not None and comm is not None:
            visible = comm.allgather(choice.visible_gpus(self._runtime, None if device == "auto" else device))
            device = choice.choose(visible, self._options.ranks)[self.rank]
        if device is None or device == "auto":
            return None
        self._runtime.use_device(device)
        return device

    def _staging(self, *arrays: Any) -> Staging:
        """Block the host until the current stream is done, and return the staging of an operation."""
        streams = self._streams_of(*arrays)
        streams.wait_for_the_current_one()
        return Staging(self._runtime, streams)

    def _streams_of(self, *arrays: Any) -> CopyStreams:
        """Return the streams of the arrays' GPU."""
        device = gpu_of(arrays[0])
        for array in arrays[1:]:
            if gpu_of(array) != device:
                raise ValueError(
                    f"arrays of one call are on GPUs {device} and {gpu_of(array)}; one call, one GPU{on_rank()}"
                )
        if device not in self._copy_streams:
            self._copy_streams[device] = CopyStreams(self._runtime, device)
        return self._copy_streams[device]

    def _staged(self, operation: Callable[..., T], uses: Uses, arguments: list[Any]) -> T:
        """Call the host's `operation` with host arrays instead of the GPU arrays; the last argument is async_op."""
        arrays = [array for place, _, _ in uses for array in flat(arguments[place])]
        streams = self._streams_of(*arrays)
        if arguments[-1] or not self._is_small(arrays):
            streams.wait_for_the_current_one()
            staging = Staging(self._runtime, streams)
        elif self._runtime.current_device() == streams.device:
            staging = SmallStaging(self._runtime, streams)
        else:
            with seam.on_device(self._runtime, streams.device):
                return self._staged(operation, uses, arguments)
        for place, is_input, is_output in uses:
            arguments[place] = staging.on_host(arguments[place], is_input, is_output)
        return staging.run(operation, *arguments)

    def _at_once(self, operation: Callable[..., T], uses: Uses, array: Any, *others: Any) -> T:
        """Do the same as `SmallStaging` for one contiguous array, in less time."""
        runtime, ((_, is_input, is_output),) = self._runtime, uses
        device = array.data.device_id
        stream, kept = runtime.current_stream(device), kept_buffer(runtime, device)
        host = np.ndarray(array.shape, array.dtype, kept.memory)
        runtime.wait(stream, kept.emptied)
        if is_input:
            runtime.to_host(host, array, stream)
        runtime.synchronize_stream(stream)
        outcome = operation(host, *others)
        if is_output:
            runtime.to_device(array, host, stream)
        runtime.record(kept.emptied, stream)
        kept_buffers[device].append(kept)
        return outcome

    def _is_small(self, arrays: list[Any]) -> bool:
        """Return True if the arrays of a blocking operation fit in a kept buffer."""
        return self._is_patient and sum([array.nbytes + ALIGNMENT for array in arrays]) <= SMALL_BYTES

    def _is_ordinary(self, array: Any) -> bool:
        """Return True for a small array on the current GPU that is copied as it is."""
        is_small = array.nbytes <= SMALL_BYTES and self._is_patient
        return is_small and gpu_of(array) == self._runtime.current_device() and is_plain(array)

    def _in_chunks(self, operation: Callable[..., None], uses: Uses, array: Any, *others: Any) -> None:
        """Run a blocking elementwise operation on a large array."""
        staging, ((_, is_input, is_output),) = self._staging(array), uses
        if not is_output:
            buffer = staging.send_buffer(array)
        else:
            buffer = staging.in_place(array) if is_input else staging.recv_buffer(array)
        staging.run_in_chunks(lambda host: operation(host, *others), buffer.reshape(-1), is_input, is_output)

    def exchange(self, sends: Pieces, receives: Pieces, adds: bool, async_op: bool) -> Work | None:
        arrays = [piece for _, piece in (*sends, *receives)]
        is_small = arrays and not async_op and self._is_small(arrays)
        if not is_small or gpu_of(arrays[0]) != self._runtime.current_device():
            return self._exchange(self._plan(sends, receives, adds), async_op)
        staging = SmallStaging(self._runtime, self._streams_of(*arrays))
        messages = staging.messages(self.rank, sends, receives, adds)
        staging.exchange(messages, adds)
        sent = [(peer, staging.on_host(buffer, True, False)) for peer, buffer in messages.sent.items()]
        received = [(peer, staging.on_host(buffer, False, True)) for peer, buffer in messages.received.items()]
        return staging.run(self._host.exchange, sent, received, False, False)

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        if operation == "exchange":  # planned once
            return Repeated(partial(self._exchange, self._plan(*arguments), True))
        return super().persistent(operation, *arguments)

    def _plan(self, sends: Pieces, receives: Pieces, adds: bool) -> StagedMessages | None:
        """Return the messages of an exchange, or None if this rank has none."""
        arrays = [piece for _, piece in (*sends, *receives)]
        if not arrays:
            return None
        return StagedMessages(self._runtime, self._streams_of(*arrays), self.rank, sends, receives, adds)

    def _exchange(self, plan: StagedMessages | None, async_op: bool) -> Work | None:
        if plan is None:
            return self._host.exchange([], [], False, async_op)
        plan.fetch()
        return plan.run(self._host.exchange, plan.sent, plan.received, False, async_op)

    def barrier(self, async_op: bool) -> Work | None:
        return self._host.barrier(async_op)

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        self._host.monitored_barrier(timeout, wait_all_ranks)

    def close(self) -> None:
        self._host.close()
        for streams in self._copy_streams.values():
            streams.close()

    def translate_error(self, operation: str, error: Exception) -> Exception:
        return error_from_cuda(self._runtime, error, operation) or self._host.translate_error(operation, error)

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"not for GPU arrays over MPI; use a host array{on_rank()}", operation)


def _staged_form(name: str) -> Callable[..., Any]:
    """Return the method `name`: it copies arrays to the host if they are read, and back if they are written."""
    inherited, spec = getattr(Backend, name), OPERATIONS[name]
    is_alone, is_a_message = [role.form for role in spec.roles if role.is_array] == ["one"], spec.is_a_message
    root = spec.arguments.index("root") if "root" in spec.arguments else None
    of_others, of_root = (
        [(i, role.is_read(at), role.is_written(at)) for i, role in enumerate(spec.roles) if role.is_array]
        for at in (False, True)
    )

    @wraps(inherited)
    def method(self: StagedBackend, *arguments: Any) -> Any:
        uses = of_root if root is None or arguments[root] == self.rank else of_others
        operation = getattr(self._host, name)
        if is_alone and not arguments[-1]:
            if arguments[0].nbytes > CHUNK_BYTES and not is_a_message:
                return self._in_chunks(operation, uses, *arguments)
            if self._is_ordinary(arguments[0]):
                return self._at_once(operation, uses, *arguments)
        return self._staged(operation, uses, [*arguments])

    return method


for _name, _spec in OPERATIONS.items():
    if hasattr(Backend, _name) and _spec.is_asynchronous and any(role.is_array for role in _spec.roles):
        setattr(StagedBackend, _name, _staged_form(_name))


class StagingBuffer(NamedTuple):
    """Page-locked memory for one chunk, and the events recorded after the copies into it and out of it."""

    memory: Any
    filled: int
    emptied: int


class KeptBuffer(NamedTuple):
    """Page-locked memory for the arrays of a small operation, and the event recorded after the copies out of it."""

    memory: Any
    emptied: int


alive: list[KeptBuffer] = []  # all of them: after an error, a copy from or to one may still be in flight


# By GPU: the buffers that no operation uses; the last copy out of one may still be in flight.
kept_buffers: dict[int, list[KeptBuffer]] = defaultdict(list)


def kept_buffer(runtime: seam.Runtime, device: int) -> KeptBuffer:
    """Return a buffer for an operation; its stream must wait for the event, and the host for its stream."""
    try:
        return kept_buffers[device].pop()
    except IndexError:
        made = KeptBuffer(runtime.pinned(SMALL_BYTES), runtime.create_event(device))
        alive.append(made)
        return made


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
        """The staging buffers, allocated for the first large array."""
        if not self._buffers:
            event = partial(self._runtime.create_event, self.device)
            self._buffers = [StagingBuffer(self._runtime.pinned(CHUNK_BYTES), event(), event()) for _ in range(CHUNKS)]
        return self._buffers

    def wait_for_the_current_one(self) -> None:
        """Block the host until the program's current stream is done.

        The host waits for the copies anyway; waiting for the arrays here needs no event.
        """
        with seam.on_device(self._runtime, self.device):
            self._runtime.synchronize_stream(self._runtime.current_stream(self.device))

    def close(self) -> None:
        """Destroy the events and the streams."""
        for buffer in self._buffers:
            self._runtime.destroy_event(buffer.filled)
            self._runtime.destroy_event(buffer.emptied)
        with seam.on_device(self._runtime, self.device):
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
        """Return host arrays for `arrays`; start the copies of inputs, and note outputs for `copy_back`."""
        if arrays is None:
            return None
        if isinstance(arrays, list):
            return [self.on_host(array, is_input, is_output) for array in arrays]
        host = self._pinned(arrays)
        if is_input:
            self._runtime.to_host(host, self.send_buffer(arrays), self.stream)
        if is_output:
            self._outputs.append((arrays, host))
        return host

    def _pinned(self, array: Any) -> Any:
        return self._runtime.pinned(array.nbytes).view(array.dtype).reshape(array.shape)

    def run(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Call the host's operation, and copy its outputs back: now, or as the last part of its Work."""
        self.synchronize()
        return finished(operation(*arguments), self.copy_back)

    def synchronize(self) -> None:
        """Block the host until everything on the stream is done."""
        self._runtime.synchronize_stream(self.stream)

    def copy_back(self) -> None:
        """Copy the outputs to their arrays, and block the host until this is done; translate CUDA's errors."""
        try:
            with self.on_its_gpu():
                for array, host in self._outputs:
                    self._runtime.to_device(self.recv_buffer(array), host, self.stream)
                self.unpack(self.stream)
                self.synchronize()
        except Exception as error:
            if (translated := error_from_cuda(self._runtime, error)) is None:
                raise
            raise translated from error

    def on_its_gpu(self) -> AbstractContextManager[None]:
        """Return a context in which the array's GPU is current: hpccomm's threads start on GPU 0."""
        return seam.on_device(self._runtime, self._device)

    def run_in_chunks(self, operation: Callable[[Any], Any], array: Any, is_input: bool, is_output: bool) -> None:
        """Run the host's operation on a 1-d `array`, while neighbouring chunks are copied."""
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


class SmallStaging(Staging):
    """The copies of a small blocking operation, on the current stream, in a kept buffer."""

    __slots__ = ("_kept", "_used")

    def __init__(self, runtime: seam.Runtime, streams: CopyStreams) -> None:
        Packing.__init__(self, runtime, streams.device, runtime.current_stream(streams.device))
        self._outputs = []
        self._used = 0
        self._kept = kept_buffer(runtime, streams.device)
        runtime.wait(self.stream, self._kept.emptied)

    def on_host(self, arrays: Any, is_input: bool, is_output: bool) -> Any:
        """Return host arrays for `arrays`, as `Staging` does."""
        if arrays is None or isinstance(arrays, list):
            return super().on_host(arrays, is_input, is_output)
        host, plain = np.ndarray(arrays.shape, arrays.dtype, self._kept.memory, self._used), is_plain(arrays)
        self._used += -(-arrays.nbytes // ALIGNMENT) * ALIGNMENT
        if is_input:
            self._runtime.to_host(host, arrays if plain else self._packed(arrays), self.stream)
        if is_output:
            self._outputs.append((arrays if plain else self.recv_buffer(arrays), host))
        return host

    def copy_back(self) -> None:
        """Copy the outputs to their arrays, for later work on the current stream; the host does not wait."""
        for buffer, host in self._outputs:
            self._runtime.to_device(buffer, host, self.stream)
        self.unpack(self.stream)
        self._runtime.record(self._kept.emptied, self.stream)
        kept_buffers[self._device].append(self._kept)


class StagedMessages(Staging):
    """The messages of one exchange on the GPU and on the host, reusable; each `fetch` is followed by one `run`."""

    __slots__ = ("_packing", "_sources", "received", "sent")

    def __init__(
        self, runtime: seam.Runtime, streams: CopyStreams, rank: int, sends: Pieces, receives: Pieces, adds: bool
    ) -> None:
        super().__init__(runtime, streams)
        self._packing: list[Callable[[int], None]] = []
        self.alive += [piece for _, piece in (*sends, *receives)]  # the kernels know their addresses
        with self.on_its_gpu():
            messages = self.messages(rank, sends, receives, adds)
            self.exchange(messages, adds)
        self._sources = [*messages.sent.values()]
        self.sent, self.received = (
            [(peer, self._pinned(buffer)) for peer, buffer in side.items()]
            for side in (messages.sent, messages.received)
        )
        self._outputs = [(messages.received[peer], host) for peer, host in self.received]

    def fetch(self) -> None:
        """Start to copy outgoing messages to the host; `run` waits for the copies."""
        self._streams.wait_for_the_current_one()
        with self.on_its_gpu():
            for step in self._packing:
                step(self.stream)
            for source, (_, host) in zip(self._sources, self.sent):
                self._runtime.to_host(host, source, self.stream)

    def _do(self, function: Callable[..., None], *arguments: Any) -> None:
        self._packing.append(partial(function, *arguments))
