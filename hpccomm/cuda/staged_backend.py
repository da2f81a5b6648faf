"""StagedBackend: GPU arrays over any MPI (``cuda:mpi``), by way of page-locked host memory.

Each operation copies what it reads to the host, has the host's backend do its work there, and copies back what that has
written; the host waits for the copies. Blocking operations on one large array go in chunks, so that the copies to and
fro and the messages overlap; every rank cuts alike.
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


class StagedBackend(Backend):
    """GPU arrays by way of the host; `host` is the backend that does the work there."""

    name = "mpi"

    def __init__(self, options: BackendOptions, host: Backend) -> None:
        super().__init__(options.rank, options.size)
        self._options = options
        self._host = host
        self._runtime = seam.runtime()
        self._lanes: dict[int, Lane] = {}  # of each GPU

    def connect(self) -> int | None:
        device, comm = self._options.device_id, self._options.comm
        if device == "auto" and comm is not None:
            sights = comm.allgather(choice.look(self._runtime, None))
            device = choice.choose(sights, self._options.ranks)[self.rank]
        if device is None or device == "auto":
            return None
        self._runtime.use_device(device)
        return device

    def _stage(self, *arrays: Any) -> Stage:
        """Begin an operation: copies wait for the current stream."""
        device = gpu_of(arrays[0])
        for array in arrays:
            if gpu_of(array) != device:
                raise ValueError(
                    f"arrays of one call are on GPUs {device} and {gpu_of(array)}; one call, one GPU{here()}"
                )
        if device not in self._lanes:
            self._lanes[device] = Lane(self._runtime, device)
        # The host waits for the copies anyway: it may as well wait for the arrays, which needs no event.
        with seam.on_device(self._runtime, device):
            self._runtime.synchronize_stream(self._runtime.current_stream(device))
        return Stage(self._runtime, self._lanes[device])

    # -- one array -------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        is_root = root == self.rank
        return self._elementwise(array, self._host.broadcast, root, async_op, reads=is_root, writes=not is_root)

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(array, self._host.all_reduce, op, async_op)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(array, self._host.reduce, root, op, async_op, writes=root == self.rank)

    def scan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(array, self._host.scan, op, async_op)

    def exscan(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self._elementwise(array, self._host.exscan, op, async_op)

    def _elementwise(
        self, array: Any, operation: Callable[..., T], *arguments: Any, reads: bool = True, writes: bool = True
    ) -> T | None:
        """Do an operation that treats every element alike, on the whole or in chunks; the last argument is async_op."""
        stage = self._stage(array)
        if arguments[-1] or array.nbytes <= CHUNK_BYTES:
            host = stage.to_host(array) if reads else stage.room_for(array)
            if writes:
                stage.delivers(array, host)
            return stage.run(operation, host, *arguments)
        buffer = (stage.in_place(array) if reads else stage.recv_buffer(array)) if writes else stage.send_buffer(array)
        stage.run_in_chunks(lambda host: operation(host, *arguments), buffer.reshape(-1), reads, writes)
        return None

    # -- one array from or to each rank ----------------------------------------------------------

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        stage = self._stage(output, array)
        return stage.run(self._host.all_gather_single, stage.result(output), stage.to_host(array), async_op)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        stage = self._stage(array, *outputs)
        return stage.run(self._host.all_gather, stage.results(outputs), stage.to_host(array), async_op)

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        stage = self._stage(array, *(outputs or ()))
        return stage.run(self._host.gather, stage.to_host(array), outputs and stage.results(outputs), root, async_op)

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        stage = self._stage(output, *(inputs or ()))
        return stage.run(self._host.scatter, stage.result(output), inputs and stage.all_to_host(inputs), root, async_op)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        stage = self._stage(output, *inputs)
        return stage.run(self._host.reduce_scatter, stage.result(output), stage.all_to_host(inputs), op, async_op)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        stage = self._stage(output, array)
        return stage.run(self._host.reduce_scatter_single, stage.result(output), stage.to_host(array), op, async_op)

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        stage = self._stage(*outputs, *inputs)
        return stage.run(self._host.all_to_all, stage.results(outputs), stage.all_to_host(inputs), async_op)

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        stage = self._stage(output, array)
        return stage.run(
            self._host.all_to_all_single,
            stage.result(output),
            stage.to_host(array),
            output_counts,
            input_counts,
            async_op,
        )

    # -- many arrays in one message --------------------------------------------------------------

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        stage = self._stage(*arrays)
        hosts = stage.all_to_host(arrays)
        for array, host in zip(arrays, hosts, strict=True):
            stage.delivers(array, host)
        return stage.run(self._host.all_reduce_coalesced, hosts, op, async_op)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        stage = self._stage(*arrays)
        hosts = stage.all_to_host(arrays) if root == self.rank else stage.results(arrays)
        return stage.run(self._host.broadcast_coalesced, hosts, root, async_op)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        stage = self._stage(*arrays, *(output for outputs in output_lists for output in outputs))
        results = [stage.results(outputs) for outputs in output_lists]
        return stage.run(self._host.all_gather_coalesced, results, stage.all_to_host(arrays), async_op)

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        stage = self._stage(*outputs, *arrays)
        return stage.run(
            self._host.all_gather_single_coalesced, stage.results(outputs), stage.all_to_host(arrays), async_op
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        stage = self._stage(*outputs, *arrays)
        return stage.run(
            self._host.reduce_scatter_single_coalesced,
            stage.results(outputs),
            stage.all_to_host(arrays),
            op,
            async_op,
        )

    # -- point to point --------------------------------------------------------------------------

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        stage = self._stage(array)
        return stage.run(self._host.send, stage.to_host(array), dst, tag, async_op)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int | None:
        stage = self._stage(array)
        return stage.run(self._host.recv, stage.result(array), src, tag, async_op)

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int | None:
        stage = self._stage(array, output)
        return stage.run(
            self._host.sendrecv, stage.to_host(array), dst, stage.result(output), src, tag, recv_tag, async_op
        )

    # -- the rest --------------------------------------------------------------------------------

    def barrier(self, async_op: bool) -> Work | None:
        return self._host.barrier(async_op)

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        self._host.monitored_barrier(timeout, wait_all_ranks)

    def close(self) -> None:
        self._host.close()
        for lane in self._lanes.values():
            lane.close()

    def translate_error(self, operation: str, error: Exception) -> Exception:
        text = self._runtime.explain(error)
        if text is None:
            return self._host.translate_error(operation, error)
        return DistBackendError(f"CUDA reports {text}{here()}", operation)

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"not for GPU arrays over MPI; use a host array{here()}", operation)


class Chunk(NamedTuple):
    """Page-locked memory, and the events that tell when it was filled and emptied."""

    memory: Any
    filled: int
    emptied: int


class Lane:
    """A group's streams on one GPU (one to the host, one back), and the chunks of host memory between them."""

    def __init__(self, runtime: seam.Runtime, device: int) -> None:
        self._runtime = runtime
        self.device = device
        self.stream = runtime.create_stream(device)
        self.back = runtime.create_stream(device)
        self._chunks: list[Chunk] = []

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks, made when they are first needed."""
        if not self._chunks:
            create = partial(self._runtime.create_event, self.device)
            self._chunks = [Chunk(self._runtime.pinned(CHUNK_BYTES), create(), create()) for _ in range(CHUNKS)]
        return self._chunks

    def close(self) -> None:
        """Free everything."""
        for chunk in self._chunks:
            self._runtime.destroy_event(chunk.filled)
            self._runtime.destroy_event(chunk.emptied)
        self._runtime.destroy_stream(self.stream)
        self._runtime.destroy_stream(self.back)


class Stage(Packing):
    """The copies of one operation."""

    __slots__ = ("_deliveries", "_lane")

    def __init__(self, runtime: seam.Runtime, lane: Lane) -> None:
        super().__init__(runtime, lane.device, lane.stream)
        self._lane = lane
        self._deliveries: list[tuple[Any, Any]] = []

    def room_for(self, array: Any) -> Any:
        """Return host memory for the values of an array."""
        return self._runtime.pinned(array.nbytes).view(array.dtype).reshape(array.shape)

    def to_host(self, array: Any) -> Any:
        """Return a host array, and start to copy the values of `array` to it."""
        host = self.room_for(array)
        self._runtime.to_host(host, self.send_buffer(array), self._stream)
        return host

    def all_to_host(self, arrays: list[Any]) -> list[Any]:
        """As `to_host`, for several."""
        return [self.to_host(array) for array in arrays]

    def delivers(self, array: Any, host: Any) -> None:
        """Remember to copy `host` to `array` at the end."""
        self._deliveries.append((array, host))

    def result(self, array: Any) -> Any:
        """Return a host array; its values are copied to `array` at the end."""
        host = self.room_for(array)
        self.delivers(array, host)
        return host

    def results(self, arrays: list[Any]) -> list[Any]:
        """As `result`, for several."""
        return [self.result(array) for array in arrays]

    def run(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Do the host's operation, and deliver: now, or as the last part of its Work."""
        self.synchronize()
        outcome = operation(*arguments)
        if isinstance(outcome, Work):
            outcome.finish_with(self.deliver)
        else:
            self.deliver()
        return outcome

    def synchronize(self) -> None:
        """Block the host until everything on the stream is done."""
        self._runtime.synchronize_stream(self._stream)

    def deliver(self) -> None:
        """Copy the results to their arrays, and block the host until that is done."""
        with self.on_its_gpu():
            for array, host in self._deliveries:
                self._runtime.to_device(self.recv_buffer(array), host, self._stream)
            self.unpack(self._stream)
            self.synchronize()

    @property
    def on_its_gpu(self) -> Callable[[], AbstractContextManager[None]]:
        """What makes its GPU the current one: in a thread of hpccomm's that would be GPU 0, maybe another rank's."""
        return partial(seam.on_device, self._runtime, self._device)

    def run_in_chunks(self, operation: Callable[[Any], Any], flat: Any, reads: bool, writes: bool) -> None:
        """Do the host's operation chunk by chunk, while the next chunk comes and the last one goes back."""
        runtime, back = self._runtime, self._lane.back
        step = max(1, CHUNK_BYTES // flat.itemsize)
        parts = [flat[start : start + step] for start in range(0, flat.size, step)]
        steps = list(zip(parts, cycle(self._lane.chunks)))

        def fetch(i: int) -> None:
            part, chunk = steps[i]
            if i >= CHUNKS:
                runtime.wait(self._stream, chunk.emptied)
            if reads:
                runtime.to_host(chunk.memory[: part.nbytes], part, self._stream)
            runtime.record(chunk.filled, self._stream)

        fetch(0)
        for i, (part, chunk) in enumerate(steps):
            if i + 1 < len(steps):
                fetch(i + 1)
            runtime.synchronize_event(chunk.filled)
            host = chunk.memory[: part.nbytes].view(flat.dtype)
            operation(host)
            if writes:
                runtime.to_device(part, host, back)
            runtime.record(chunk.emptied, back)
        runtime.synchronize_stream(back)
        self.unpack(self._stream)
        self.synchronize()
