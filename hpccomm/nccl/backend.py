"""NCCLBackend: GPU arrays over NCCL; each operation is one call or one group of calls.

PREMUL_SUM multiplies in a kernel, so it works for complex factors and with every version of NCCL. ncclGather and
ncclScatter are not used: they need one contiguous buffer of equal parts, but sizes may differ between ranks, and no
rank knows the others' sizes. NCCL makes the same sends and receives of them (`taskAppend` in src/enqueue.cc of 2.30).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, chain
from time import monotonic
from typing import Any, cast

import numpy as np

from ..core.backend import Backend, FastPath, Pieces
from ..core.options import BackendOptions
from ..core.persistent_work import PersistentWork
from ..core.reduce_op import ReduceOp
from ..core.timeouts import as_seconds
from ..core.work import Work
from ..cuda import seam
from ..cuda.packing import gpu_of
from ..cuda.time_limit import TimeLimit
from ..cuda.work import CudaWork
from ..errors import DistBackendError, DistError, DistTimeoutError, UnsupportedOperationError, on_rank
from ..native import fastpath
from .bootstrap import Unavailable, all_or_none, connect, used
from .connection import Connection
from .intra_node import IntraNode
from .persistent import NCCLPersistentWork
from .plan import Plan, refuse_capture
from .symmetric import SymmetricArrays
from .types import reduced

MOST_CALLS = 2048  # in one group (NCCL's user guide, "Group Calls"); two ranks might split a larger one differently
LONGEST_DESTROY = 60.0  # seconds; a group's timeout is meant for longer pauses of the program


class NCCLBackend(Backend):
    """GPU arrays over NCCL."""

    name = "nccl"

    def __init__(self, options: BackendOptions, _: Any = None) -> None:
        super().__init__(options.rank, options.size)
        if options.comm is None:
            raise TypeError(f"the nccl backend needs a group with an MPI communicator, to find together{on_rank()}")
        self._options = options
        self._mpi = options.comm
        self._runtime = seam.runtime()
        self.nccl = seam.nccl()
        self._connection: Connection | None = None
        self._intra_node: IntraNode | None = None
        self._symmetric: SymmetricArrays | None = None
        self._meeting: Any = None  # an MPI.Request
        self.gpu_fast_path = self._fast_path = fast_path_of(self)

    # -- the connection --------------------------------------------------------------------------

    def connect(self) -> int:
        return self._connect().device

    def connected_on(self) -> int | None:
        return None if self._connection is None else self._connection.device

    def _connect(self, device: int | None = None) -> Connection:
        """Connect all ranks on the GPU that the program named, else on `device`, else on one chosen for each rank."""
        if self._options.device_id is not None:
            device = None if self._options.device_id == "auto" else self._options.device_id
        time_limit = self._time_limit()
        if time_limit is not None:
            self._meeting = self._meeting or self._mpi.Ibarrier()  # may be left from a call that timed out
            time_limit.wait_while(lambda: not self._meeting.Test())
            self._meeting = None
        return self._use(connect(self.nccl, self._runtime, self._options, device, time_limit, self._connection_on))

    def _time_limit(self) -> TimeLimit | None:
        """Return the limit of a call if time-outs raise; otherwise None: a limit costs NCCL a thread for each call."""
        return TimeLimit(as_seconds(self._options.timeout)) if self._options.on_timeout == "raise" else None

    def _connection_on(self, comm: seam.Communicator, device: int, time_limit: TimeLimit | None) -> Connection:
        return Connection(self._runtime, comm, device, self._options.settings.blocking_wait, time_limit)

    def _use(self, connection: Connection) -> Connection:
        settings, device = self._options.settings, connection.device
        self._connection, self.last_on_gpu = connection, connection.last
        if settings.intra_node != "0":
            by_host = settings.intra_node == "host"
            with seam.on_device(self._runtime, device):
                self._intra_node = IntraNode(self._runtime, self._mpi, device, connection.stream, by_host)
        elif not settings.blocking_wait:
            self._fast_path.open(connection, self._options.device)
        return connection

    def split(self, options: BackendOptions | None, color: int) -> Backend | None:
        connection = self._connection
        if connection is None:
            return None
        new = None if options is None else type(self)(options._replace(device_id=connection.device))
        time_limit = None if new is None else new._time_limit()

        def made() -> Connection | None:
            key = 0 if options is None else options.rank
            comm = connection.split(-1 if options is None else color, key, time_limit)
            if isinstance(comm, Unavailable) and options is not None and options.size == 1:  # it shares no GPU
                with seam.on_device(self._runtime, connection.device):
                    comm = self.nccl.connect(1, self.nccl.unique_id(), 0, time_limit)
            if comm is None or new is None:
                return None
            return used(comm, connection.device, time_limit, new._connection_on)

        own = self._time_limit()  # all ranks have a limit, or none has
        limit = own and (time_limit or own)
        for_all = partial(all_or_none, self.nccl, self._mpi, self._options.ranks)
        for_all(connection.prepare_split, limit)
        if (made_one := for_all(made, limit)) is not None and new is not None:
            new._use(made_one)
        return new

    # -- one array -------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        return self.broadcast_coalesced([array], root, async_op)

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        reduction = reduced("all_reduce", array.dtype, op)
        plan = self._plan(async_op, array)
        if self._intra_node is None or not self._intra_node.all_reduce(plan, array, op):
            buffer = plan.in_place(array)
            plan.all_reduce(plan.multiplied(buffer, op.factor, buffer), buffer, reduction)
        return self._end(plan, async_op, array)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        reduction = reduced("reduce", array.dtype, op)
        plan = self._plan(async_op, array)
        buffer = plan.in_place(array) if root == self.rank else plan.send_buffer(array)
        plan.reduce(plan.multiplied(buffer, op.factor), buffer, root, reduction)
        return self._end(plan, async_op, array)

    # -- one array from or to each rank ----------------------------------------------------------

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        return self.all_gather_single_coalesced([output], [array], async_op)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        return self.all_gather_coalesced([[output] for output in outputs], [array], async_op)

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        plan = self._plan(async_op, array, *(outputs or ()))
        (sent,) = plan.unaliased([array], outputs or ())
        if outputs is None:
            plan.send(sent, root)
        for rank, output in enumerate(outputs or ()):
            if rank == root:
                plan.copy(output, sent)
            else:
                plan.recv(plan.recv_buffer(output), rank)
        return self._end(plan, async_op, (outputs, array))

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        plan = self._plan(async_op, output, *(inputs or ()))
        if inputs is None:
            plan.recv(plan.recv_buffer(output), root)
        for rank, part in enumerate(plan.unaliased(inputs or (), [output])):
            if rank == root:
                plan.copy(output, part)
            else:
                plan.send(part, rank)
        return self._end(plan, async_op, (output, inputs))

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self.reduce_scatter_single_coalesced([output], [array], op, async_op)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        reduction = reduced("reduce_scatter", output.dtype, op)
        plan = self._plan(async_op, output, *inputs)
        buffer = plan.recv_buffer(output)
        for root, part in enumerate(plan.unaliased(inputs, [output])):  # their sizes may differ
            sent = plan.multiplied(part, op.factor)
            plan.reduce(sent, buffer if root == self.rank else sent, root, reduction)
        return self._end(plan, async_op, (output, inputs))

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        plan = self._plan(async_op, *outputs, *inputs)
        self._exchange(plan, outputs, plan.unaliased(inputs, outputs))
        return self._end(plan, async_op, (outputs, inputs))

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        plan = self._plan(async_op, output, array)
        (sent,) = plan.unaliased([array], [output])
        buffer = plan.recv_buffer(output)
        if output_counts is None and self.nccl.has_all_to_all:
            plan.all_to_all(sent, buffer, self.size)
        else:
            equal = [output.size // self.size] * self.size
            self._exchange(plan, _cut(buffer, output_counts or equal), _cut(sent, input_counts or equal))
        return self._end(plan, async_op, (output, array))

    def _exchange(self, plan: Plan, outputs: list[Any], inputs: list[Any]) -> None:
        """Send each rank its part of `inputs`, whose memory does not overlap that of `outputs`."""
        plan.copy(outputs[self.rank], inputs[self.rank])
        # In each step all ranks send the same distance, so both ends of a message are in the same group of calls.
        for step in range(1, self.size):
            dst, src = (self.rank + step) % self.size, (self.rank - step) % self.size
            plan.send(inputs[dst], dst)
            plan.recv(plan.recv_buffer(outputs[src]), src)
            plan.end_step()

    # -- many arrays in one group of calls -------------------------------------------------------

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        reductions = [reduced("all_reduce_coalesced", array.dtype, op) for array in arrays]
        plan = self._plan(async_op, *arrays)
        for array, reduction in zip(arrays, reductions, strict=True):
            buffer = plan.in_place(array)
            plan.all_reduce(plan.multiplied(buffer, op.factor, buffer), buffer, reduction)
        return self._end(plan, async_op, arrays)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        plan = self._plan(async_op, *arrays)
        for array in arrays:
            buffer = plan.send_buffer(array) if root == self.rank else plan.recv_buffer(array)
            plan.broadcast(buffer, buffer, root)
        return self._end(plan, async_op, arrays)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        all_outputs = [*chain(*output_lists)]
        plan = self._plan(async_op, *arrays, *all_outputs)
        # All ranks must decide alike: by the sizes, and by graph capture, which refuses temporary memory.
        may_copy = plan.is_persistent or not self._runtime.is_capturing(plan.stream)
        for sent, outputs in zip(plan.unaliased(arrays, all_outputs), zip(*output_lists, strict=True), strict=True):
            if may_copy and len({output.size for output in outputs}) == 1:
                plan.all_gather(sent, plan.joined_buffer(outputs))
                continue
            for root, output in enumerate(outputs):
                buffer = plan.recv_buffer(output)
                plan.broadcast(sent if root == self.rank else buffer, buffer, root)
        return self._end(plan, async_op, (output_lists, arrays))

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        plan = self._plan(async_op, *outputs, *arrays)
        for output, sent in zip(outputs, plan.unaliased(arrays, outputs), strict=True):
            plan.all_gather(sent, plan.recv_buffer(output))
        return self._end(plan, async_op, (outputs, arrays))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        reductions = [reduced("reduce_scatter_single", output.dtype, op) for output in outputs]
        plan = self._plan(async_op, *outputs, *arrays)
        for output, array, reduction in zip(outputs, plan.unaliased(arrays, outputs), reductions, strict=True):
            plan.reduce_scatter(plan.multiplied(array, op.factor), plan.recv_buffer(output), reduction)
        return self._end(plan, async_op, (outputs, arrays))

    # -- point to point --------------------------------------------------------------------------

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        plan = self._message("send", tag, async_op, array)
        plan.send(plan.send_buffer(array), dst)
        return self._end(plan, async_op, array)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int:
        source = _given_source("recv", src)
        plan = self._message("recv", tag, async_op, array)
        plan.recv(plan.recv_buffer(array), source)
        return _with_source(source, self._end(plan, async_op, array))

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int:
        source = _given_source("sendrecv", src)
        plan = self._message("sendrecv", tag or recv_tag, async_op, array, output)
        (sent,) = plan.unaliased([array], [output])
        plan.send(sent, dst)
        plan.recv(plan.recv_buffer(output), source)
        return _with_source(source, self._end(plan, async_op, (array, output)))

    def exchange(self, sends: Pieces, receives: Pieces, adds: bool, async_op: bool) -> Work | None:
        arrays = [piece for _, piece in (*sends, *receives)]
        plan = self._plan(async_op, *arrays) if arrays else (self._connection or self._connect()).plan(async_op)
        if adds and not plan.is_persistent:  # it may load kernels, which takes memory
            refuse_capture(self._runtime, plan.stream, "a sum of received parts")
        messages = plan.messages(self.rank, sends, receives, adds)
        if len(messages.sent) + len(messages.received) > MOST_CALLS:  # in several groups, receives would wait for sends
            raise UnsupportedOperationError(
                f"this rank exchanges parts of GPU arrays with {len(messages.sent)} ranks; NCCL takes {MOST_CALLS} "
                f"messages at once, and MPI more: make a group with new_group(backend='cpu:mpi,cuda:mpi'){on_rank()}",
                "exchange",
            )
        for peer, buffer in messages.received.items():
            plan.recv(buffer, peer)
        for peer, buffer in messages.sent.items():
            plan.send(buffer, peer)
        plan.end_step()
        plan.exchange(messages, adds)
        return self._end(plan, async_op, arrays)

    def check_batch(self, messages: list[tuple[Any, int | None, int]]) -> None:
        if len(messages) > MOST_CALLS:
            raise ValueError(
                f"batch_isend_irecv: {len(messages)} messages on GPU arrays; NCCL takes {MOST_CALLS} at once, so make "
                f"several batches{on_rank()}"
            )
        for _, peer, tag in messages:
            _given_source("recv", peer)
            self._check_message("batch_isend_irecv", tag)
        arrays = [array for array, _, _ in messages]
        device = gpu_of(arrays[0]) if self._connection is None else self._connection.device
        self._check_gpus(arrays, device)
        refuse_capture(self._runtime, self._runtime.current_stream(device), "an asynchronous operation")

    def batch(self, arrays: list[Any]) -> AbstractContextManager[None]:
        self._message("batch_isend_irecv", 0, True, *arrays)
        return cast("Connection", self._connection).batch()

    def _message(self, operation: str, tag: int, async_op: bool, *arrays: Any) -> Plan:
        """Return a plan for a message."""
        self._check_message(operation, tag)
        plan = self._plan(async_op, *arrays)
        plan.message = operation
        return plan

    def _check_message(self, operation: str, tag: int) -> None:
        """Raise if NCCL can't take a message: its two ranks alone can't connect the group."""
        if tag != 0:
            raise UnsupportedOperationError(
                f"tag is {tag}, and NCCL has no tags: its messages from one rank to another arrive in the order of the "
                f"calls; leave the tag out{on_rank()}",
                operation,
            )
        if self._connection is None and self.size > 2:
            raise self._unconnected(operation)

    # -- the rest --------------------------------------------------------------------------------

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        work: NCCLPersistentWork = getattr(Planner(self), operation)(*arguments, async_op=True)
        work.use(self._fast_path, operation, arguments)
        return work

    def barrier(self, async_op: bool) -> Work | None:
        connection = self._connection or self._connect()
        plan = connection.plan(async_op)
        token = plan.empty((1,), np.dtype(np.uint8))
        plan.all_reduce(token, token, reduced("barrier", token.dtype, ReduceOp.MAX))
        work = connection.end(plan, async_op, arrays=token)
        if isinstance(work, CudaWork):
            work.wait_blocks = True  # `wait` returns when every rank has called it
        else:
            connection.wait_for(plan.stream)
        return work

    @property
    def nccl_handle(self) -> int:
        return self._present("nccl_handle").comm.handle

    @contextmanager
    def nccl_config(self, settings: Mapping[str, Any]) -> Iterator[None]:
        connection, fast_path = self._present("nccl_config"), self._fast_path
        plain, is_open = connection.comm, fast_path.is_open
        connection.comm, fast_path.is_open = plain.configured(settings), False
        try:
            yield
        finally:
            connection.comm, fast_path.is_open = plain, is_open

    def empty_symmetric(self, shape: tuple[int, ...], dtype: Any) -> Any:
        connection = self._connection or self._connect()
        if self._symmetric is None:
            self._symmetric = SymmetricArrays(self.nccl, self._mpi, connection)
        return self._symmetric.empty(shape, dtype)

    def close(self) -> None:
        self._fast_path.memory = [None, None]  # before its stream is destroyed
        if self._connection is not None:
            self._connection.destroy(min(as_seconds(self._options.timeout), LONGEST_DESTROY))
        if self._symmetric is not None:
            self._symmetric.close()
        if self._intra_node is not None:
            self._intra_node.close(others_come=self._connection is None or self._connection.failure is None)

    def abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def translate_error(self, operation: str, error: Exception) -> Exception:
        if isinstance(error, DistTimeoutError):
            return DistTimeoutError(f"{operation}: {error}")
        text = self.nccl.explain(error) or self._runtime.explain(error)
        return error if text is None else DistBackendError(f"NCCL reports {text}{on_rank()}", operation)

    def _present(self, wanted: str) -> Connection:
        """Return the connection, for functions that do not connect the ranks themselves."""
        if self._connection is None:
            raise self._unconnected(wanted)
        self._connection.raise_failure()
        return self._connection

    def _unconnected(self, operation: str) -> DistError:
        return DistError(
            f"{operation}: the ranks of the group are not connected by NCCL yet, and that takes all of them: "
            f"start with init_process_group(device_id=...), or call a collective on GPU arrays first{on_rank()}"
        )

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"NCCL does not have it; MPI has, also for GPU arrays: make a group with "
            f"new_group(backend='cpu:mpi,cuda:mpi'){on_rank()}",
            operation,
        )

    def _plan(self, async_op: bool, *arrays: Any) -> Plan:
        """Return a plan for an operation on these arrays; the first operation connects the ranks."""
        connection = self._connection or self._connect(gpu_of(arrays[0]))
        self._check_gpus(arrays, connection.device)
        return self._begin(connection, async_op)

    def _check_gpus(self, arrays: Sequence[Any], device: int) -> None:
        for array in arrays:
            if gpu_of(array) != device:
                raise ValueError(
                    f"an array is on GPU {gpu_of(array)}, but this rank's GPU in the group is "
                    f"{device}: one GPU per rank in a group{on_rank()}"
                )

    def _begin(self, connection: Connection, async_op: bool) -> Plan:
        return connection.plan(async_op)

    def _end(self, plan: Plan, async_op: bool, arrays: Any) -> Work | None:
        connection, dispatcher = cast("Connection", self._connection), self._fast_path.dispatcher
        work = connection.end(plan, async_op, arrays)
        if not async_op and monotonic() >= connection.last.due:
            connection.last.mark(dispatcher, plan.message or dispatcher.recent[-1][1], arrays)
        return work


def fast_path_of(backend: NCCLBackend) -> Any:
    """Return the compiled fast path; without the extension, one that does nothing."""
    if fastpath is None:
        return FastPath()
    from .fast_path import NCCLFastPath

    return NCCLFastPath(backend)


class Planner(NCCLBackend):
    """The state of `backend`, with operations that return a PersistentWork instead of running."""

    def __init__(self, backend: NCCLBackend) -> None:
        self.__dict__ = backend.__dict__

    def _begin(self, connection: Connection, async_op: bool) -> Plan:
        return connection.persistent_plan()

    def _end(self, plan: Plan, async_op: bool, arrays: Any) -> Any:
        connection = cast("Connection", self._connection)
        connection.prepare(plan)
        return NCCLPersistentWork(connection, plan, arrays)


def _cut(flat: Any, counts: list[int]) -> list[Any]:
    """Cut an array into consecutive parts of these sizes."""
    ends = list(accumulate(counts))
    flat = flat.reshape(-1)
    return [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _given_source(operation: str, src: int | None) -> int:
    if src is None:
        raise UnsupportedOperationError(f"NCCL can't receive from any rank; give src={on_rank()}", operation)
    return src


def _with_source(source: int, work: Work | None) -> Work | int:
    """Return the result of a receive: its Work, with the source set, or the source."""
    if work is None:
        return source
    work.source = source
    return work
