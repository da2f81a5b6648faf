"""NCCLBackend: every operation on GPU arrays that NCCL has, each a few lines around one call or one group of calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import numpy as np

from ..core.backend import Backend
from ..core.options import BackendOptions
from ..core.reduce_op import ReduceOp
from ..core.work import Work, as_seconds
from ..cuda import seam
from ..errors import DistBackendError, DistError, UnsupportedOperationError, here
from .bootstrap import Unavailable, connect
from .connection import Connection
from .intra_node import IntraNode
from .launch import ISSUING, Launch
from .types import reduced

MOST_CALLS = 2048  # in one group (NCCL's user guide, "Group Calls"); the two ends of a batch might be cut differently
LONGEST_DESTROY = 60.0  # seconds; a group's timeout is meant for the program's own pauses


def create(options: BackendOptions, _: Any) -> NCCLBackend:
    """Make the backend of one group; the creator that hpccomm registers as "nccl"."""
    return NCCLBackend(options)


class NCCLBackend(Backend):
    """GPU arrays over NCCL."""

    name = "nccl"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options.rank, options.size)
        if options.comm is None:
            raise TypeError(f"the nccl backend needs a group with an MPI communicator, to find together{here()}")
        self._options = options
        self._mpi = options.comm
        self._runtime = seam.runtime()
        self._nccl = seam.nccl()
        self._connection: Connection | None = None
        self._intra_node: IntraNode | None = None

    # -- the connection --------------------------------------------------------------------------

    def connect(self) -> int:
        return self._connect().device

    def _connect(self, device: int | None = None) -> Connection:
        """Make the group's communicator; `device` is the GPU of the first array. Every rank of the group calls it.

        This rank's GPU is the one that the program named, else that of the array, else the ranks take turns.
        """
        named = self._options.device_id
        if named is not None:
            device = None if named == "auto" else named
        comm, device = connect(
            self._nccl,
            self._runtime,
            self._mpi,
            self._options.ranks,
            device,
            becomes_current=named is not None,
            may_do_without=self._options.settings.intra_node == "host",
        )
        return self._connected(comm, device)

    def _connected(self, comm: seam.Communicator, device: int) -> Connection:
        settings = self._options.settings
        self._connection = Connection(self._nccl, self._runtime, comm, device, settings.blocking_wait)
        if settings.intra_node != "0":
            by_host = settings.intra_node == "host"
            self._intra_node = IntraNode(self._runtime, self._mpi, device, self._connection.stream, by_host)
        return self._connection

    def split(self, options: BackendOptions | None, color: int) -> Backend | None:
        connection = self._connection
        if connection is None:
            return None
        with seam.on_device(self._runtime, connection.device):
            connection.synchronize()  # ncclCommSplit wants nothing in flight
            with ISSUING:
                comm = connection.comm.split(-1 if options is None else color, 0 if options is None else options.rank)
            if isinstance(comm, Unavailable) and options is not None and options.size == 1:  # no other has its GPU
                comm = self._nccl.connect(1, self._nccl.unique_id(), 0)
        if comm is None or options is None:
            return None
        backend = type(self)(replace(options, device_id=connection.device))
        backend._connected(comm, connection.device)
        return backend

    # -- one array -------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        launch = self._launch(async_op, array)
        buffer = launch.reading(array) if root == self.rank else launch.writing(array)
        launch.broadcast(buffer, buffer, root)
        return self._end(launch, async_op, array)

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        how = reduced("all_reduce", array.dtype, op)
        launch = self._launch(async_op, array)
        if self._intra_node is not None and self._intra_node.all_reduce(launch, array, op):
            return self._end(launch, async_op, array)
        buffer = launch.in_place(array)
        launch.all_reduce(launch.multiplied(buffer, op.factor, buffer), buffer, how)
        return self._end(launch, async_op, array)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        how = reduced("reduce", array.dtype, op)
        launch = self._launch(async_op, array)
        buffer = launch.in_place(array) if root == self.rank else launch.reading(array)
        launch.reduce(launch.multiplied(buffer, op.factor), buffer, root, how)
        return self._end(launch, async_op, array)

    # -- one array from or to each rank ----------------------------------------------------------

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        return self.all_gather_single_coalesced([output], [array], async_op)

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work | None:
        return self.all_gather_coalesced([[output] for output in outputs], [array], async_op)

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        launch = self._launch(async_op, array, *(outputs or ()))
        (sent,) = launch.apart([array], outputs or ())
        if outputs is None:
            launch.send(sent, root)
        for rank, output in enumerate(outputs or ()):
            if rank == root:
                launch.copy(output, sent)
            else:
                launch.recv(launch.writing(output), rank)
        return self._end(launch, async_op, (outputs, array))

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work | None:
        launch = self._launch(async_op, output, *(inputs or ()))
        if inputs is None:
            launch.recv(launch.writing(output), root)
        for rank, part in enumerate(launch.apart(inputs or (), [output])):
            if rank == root:
                launch.copy(output, part)
            else:
                launch.send(part, rank)
        return self._end(launch, async_op, (output, inputs))

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        return self.reduce_scatter_single_coalesced([output], [array], op, async_op)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        how = reduced("reduce_scatter", output.dtype, op)
        launch = self._launch(async_op, output, *inputs)
        buffer = launch.writing(output)
        for root, part in enumerate(launch.apart(inputs, [output])):  # their sizes may differ
            sent = launch.multiplied(part, op.factor)
            launch.reduce(sent, buffer if root == self.rank else sent, root, how)
        return self._end(launch, async_op, (output, inputs))

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work | None:
        launch = self._launch(async_op, *outputs, *inputs)
        self._exchange(launch, outputs, launch.apart(inputs, outputs))
        return self._end(launch, async_op, (outputs, inputs))

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work | None:
        launch = self._launch(async_op, output, array)
        (sent,) = launch.apart([array], [output])
        buffer = launch.writing(output)
        if output_counts is not None and input_counts is not None:
            self._exchange(launch, _cut(buffer, output_counts), _cut(sent, input_counts))
        elif self._nccl.has_all_to_all:
            launch.all_to_all(sent, buffer, self.size)
        else:
            equal = [output.size // self.size] * self.size
            self._exchange(launch, _cut(buffer, equal), _cut(sent, equal))
        return self._end(launch, async_op, (output, array))

    def _exchange(self, launch: Launch, outputs: list[Any], inputs: list[Any]) -> None:
        """Send each rank its part of `inputs`, whose memory does not overlap that of `outputs`."""
        launch.copy(outputs[self.rank], inputs[self.rank])
        # In each step everybody sends to the k-th rank after itself: so both ends of a message are in the same group
        # of calls, also where there are several groups.
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            launch.send(inputs[to], to)
            launch.recv(launch.writing(outputs[source]), source)
            launch.ends_step()

    # -- many arrays in one group of calls -------------------------------------------------------

    def all_reduce_coalesced(self, arrays: list[Any], op: ReduceOp, async_op: bool) -> Work | None:
        hows = [reduced("all_reduce_coalesced", array.dtype, op) for array in arrays]
        launch = self._launch(async_op, *arrays)
        for array, how in zip(arrays, hows, strict=True):
            buffer = launch.in_place(array)
            launch.all_reduce(launch.multiplied(buffer, op.factor, buffer), buffer, how)
        return self._end(launch, async_op, arrays)

    def broadcast_coalesced(self, arrays: list[Any], root: int, async_op: bool) -> Work | None:
        launch = self._launch(async_op, *arrays)
        for array in arrays:
            buffer = launch.reading(array) if root == self.rank else launch.writing(array)
            launch.broadcast(buffer, buffer, root)
        return self._end(launch, async_op, arrays)

    def all_gather_coalesced(self, output_lists: list[list[Any]], arrays: list[Any], async_op: bool) -> Work | None:
        everything = [output for outputs in output_lists for output in outputs]
        launch = self._launch(async_op, *arrays, *everything)
        sent = launch.apart(arrays, everything)
        for root, outputs in enumerate(output_lists):  # a broadcast of each: the sizes may differ
            for array, output in zip(sent, outputs, strict=True):
                buffer = launch.writing(output)
                launch.broadcast(array if root == self.rank else buffer, buffer, root)
        return self._end(launch, async_op, (output_lists, arrays))

    def all_gather_single_coalesced(self, outputs: list[Any], arrays: list[Any], async_op: bool) -> Work | None:
        launch = self._launch(async_op, *outputs, *arrays)
        for output, sent in zip(outputs, launch.apart(arrays, outputs), strict=True):
            launch.all_gather(sent, launch.writing(output))
        return self._end(launch, async_op, (outputs, arrays))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], arrays: list[Any], op: ReduceOp, async_op: bool
    ) -> Work | None:
        hows = [reduced("reduce_scatter_single", output.dtype, op) for output in outputs]
        launch = self._launch(async_op, *outputs, *arrays)
        for output, array, how in zip(outputs, launch.apart(arrays, outputs), hows, strict=True):
            launch.reduce_scatter(launch.multiplied(array, op.factor), launch.writing(output), how)
        return self._end(launch, async_op, (outputs, arrays))

    # -- point to point --------------------------------------------------------------------------

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        launch = self._message("send", tag, async_op, array)
        launch.send(launch.reading(array), dst)
        return self._end(launch, async_op, array)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int:
        source = _known("recv", src)
        launch = self._message("recv", tag, async_op, array)
        launch.recv(launch.writing(array), source)
        return _from(source, self._end(launch, async_op, array))

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work | int:
        source = _known("sendrecv", src)
        launch = self._message("sendrecv", tag or recv_tag, async_op, array, output)
        (sent,) = launch.apart([array], [output])
        launch.send(sent, dst)
        launch.recv(launch.writing(output), source)
        return _from(source, self._end(launch, async_op, (array, output)))

    def batch(self, arrays: list[Any]) -> AbstractContextManager[None]:
        if len(arrays) > MOST_CALLS:
            raise ValueError(
                f"batch_isend_irecv: {len(arrays)} messages on GPU arrays; NCCL takes {MOST_CALLS} at once, so make "
                f"several batches{here()}"
            )
        self._message("batch_isend_irecv", 0, True, *arrays)
        return cast("Connection", self._connection).batch()

    def _message(self, operation: str, tag: int, async_op: bool, *arrays: Any) -> Launch:
        """Begin a message: only two ranks make the call, and connecting takes all of them."""
        if tag != 0:
            raise UnsupportedOperationError(
                f"{operation}: tag is {tag}, and NCCL has no tags: its messages from one rank to another arrive in the "
                f"order of the calls; leave the tag out{here()}"
            )
        if self._connection is None and self.size > 2:
            raise DistError(
                f"{operation}: the ranks of the group are not connected by NCCL yet, and that takes all of them: "
                f"start with init_process_group(device_id=...), or call a collective on GPU arrays first{here()}"
            )
        return self._launch(async_op, *arrays)

    # -- the rest --------------------------------------------------------------------------------

    def barrier(self, async_op: bool) -> Work | None:
        connection = self._connection or self._connect()
        launch = connection.launch(async_op)
        token = launch.empty((1,), np.dtype(np.uint8))
        launch.all_reduce(token, token, reduced("barrier", token.dtype, ReduceOp.MAX))
        return connection.end(launch, async_op, token, host_waits=not async_op)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.destroy(min(as_seconds(self._options.timeout), LONGEST_DESTROY))
        if self._intra_node is not None:
            self._intra_node.close(others_come=self._connection is None or self._connection.failure is None)

    def abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def translate_error(self, operation: str, error: Exception) -> Exception:
        text = self._nccl.explain(error) or self._runtime.explain(error)
        return error if text is None else DistBackendError(f"{operation}: NCCL reports {text}{here()}")

    def _lacks(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{operation}: NCCL does not have it; MPI has, also for GPU arrays: make a group with "
            f"new_group(backend='cpu:mpi,cuda:mpi'){here()}"
        )

    def _launch(self, async_op: bool, *arrays: Any) -> Launch:
        """Begin an operation on these arrays; the first one connects the ranks."""
        connection = self._connection
        if connection is None:
            connection = self._connect(arrays[0].data.device_id)
        for array in arrays:
            if array.data.device_id != connection.device:
                raise ValueError(
                    f"an array is on GPU {array.data.device_id}, but this rank's GPU in the group is "
                    f"{connection.device}: one GPU per rank in a group{here()}"
                )
        return connection.launch(async_op)

    def _end(self, launch: Launch, async_op: bool, arrays: Any) -> Work | None:
        return self._connection.end(launch, async_op, arrays)  # type: ignore[union-attr]


def _cut(flat: Any, counts: list[int]) -> list[Any]:
    """Return consecutive parts of an array, of these sizes."""
    ends = list(accumulate(counts))
    flat = flat.reshape(-1)
    return [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _known(operation: str, src: int | None) -> int:
    if src is None:
        raise UnsupportedOperationError(f"{operation}: NCCL can't receive from any rank; give src={here()}")
    return src


def _from(source: int, work: Work | None) -> Work | int:
    """Return the result of a receive: its Work with the source noted, or the source without a Work."""
    if work is None:
        return source
    work._source = source
    return work
