"""GlooBackend: host arrays over PyTorch's ProcessGroupGloo, as tensors that share the arrays' memory.

Every operation is asynchronous here; for blocking calls, the group waits. Arrays that are not reduced are sent as
bytes. Non-contiguous arrays are packed before and unpacked after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
from torch._C import _distributed_c10d as c10d

from ..core.backend import Backend
from ..core.options import BackendOptions
from ..core.reduce_op import ReduceOp
from ..core.work import CompletedWork, Work
from ..errors import UnsupportedOperationError, on_rank
from .reductions import as_bytes, recv_tensor, send_tensor, unpacking
from .works import WAITING, GlooWork, MessageWork, ReceiveWork, as_dist_error

ProcessGroupGloo: Any = c10d.ProcessGroupGloo
TorchStore: Any = c10d.Store

GATHER, SCATTER, LAST, EXCHANGE = 2**31 - 1, 2**31 - 2, 2**31 - 3, 2**31 - 4  # tags above the range for programs
LONGEST_END = 5.0  # seconds: the longest time that `leave` waits for messages
NEVER = timedelta(days=3650)


class GlooBackend(Backend):
    """Host arrays over gloo. Every rank of the group makes one; the constructor connects the ranks."""

    name = "gloo"
    exchange_tag = EXCHANGE

    def __init__(self, options: BackendOptions, _: Any = None) -> None:
        super().__init__(options.rank, options.size)
        # A time-out in gloo breaks its connections. If time-outs end the job, the watchdog's report says more.
        timeout = options.timeout if options.on_timeout == "raise" else NEVER
        self._store = GroupStore(options.store)
        one_node = len(set(options.nodes)) == 1
        try:
            self._gloo = _connected(self._store, options.rank, options.size, timeout, one_node)
        except RuntimeError as error:
            raise as_dist_error("connecting the ranks", error) from error

    # -- one array -------------------------------------------------------------------------------

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work:
        opts = c10d.BroadcastOptions()
        opts.rootRank = root
        if self.rank == root:
            sent = send_buffer(array)
            return GlooWork([self._gloo.broadcast([as_bytes(sent)], opts)], None, sent)
        buffer, finish = recv_buffer(array)
        return GlooWork([self._gloo.broadcast([as_bytes(buffer)], opts)], finish, buffer)

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work:
        opts = c10d.AllreduceOptions()
        memory, tensor, opts.reduceOp = send_tensor("all_reduce", array, op)
        return GlooWork([self._gloo.allreduce([tensor], opts)], unpacking(array, memory, op, self.size), memory)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work:
        opts = c10d.ReduceOptions()
        opts.rootRank = root
        is_root = self.rank == root  # gloo writes partial results to the other ranks' memory
        memory, tensor, opts.reduceOp = send_tensor("reduce", array, op, copied=not is_root)
        finish = unpacking(array, memory, op, self.size) if is_root else None
        return GlooWork([self._gloo.reduce([tensor], opts)], finish, memory)

    # -- one array from or to each rank ----------------------------------------------------------

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work:
        buffer, finish = recv_buffer(output)
        sent = unaliased(array, buffer)
        work = self._gloo._allgather_base(as_bytes(buffer), as_bytes(sent))
        return GlooWork([work], finish, (sent, buffer))

    def all_gather(self, outputs: list[Any], array: Any, async_op: bool) -> Work:
        largest = max(output.nbytes for output in outputs)
        if all(output.nbytes == largest and output.flags.carray for output in outputs):
            buffers, finish = outputs, None
            sent = unaliased(array, *outputs)
        else:  # gloo needs equal sizes
            buffers = [np.empty(largest, np.uint8) for _ in outputs]
            finish = partial(unpack_each, buffers, outputs)
            sent = np.zeros(largest, np.uint8)
            sent[: array.nbytes] = in_bytes(array)
        work = self._gloo.allgather([[as_bytes(buffer) for buffer in buffers]], [as_bytes(sent)])
        return GlooWork([work], finish, (sent, buffers))

    def gather(self, array: Any, outputs: list[Any] | None, root: int, async_op: bool) -> Work:
        if outputs is None:
            return self.send(array, root, GATHER, async_op)
        own = outputs[root]
        own[...] = unaliased(array, own).reshape(own.shape)  # NumPy's copy is wrong between overlapping strides
        others = [(rank, output) for rank, output in enumerate(outputs) if rank != root]
        return together([self._received(output, rank, GATHER, MessageWork) for rank, output in others], MessageWork)

    def scatter(self, output: Any, inputs: list[Any] | None, root: int, async_op: bool) -> Work:
        if inputs is None:
            return self._received(output, root, SCATTER, MessageWork)
        sent = [unaliased(array, output) for array in inputs]
        output[...] = sent[root].reshape(output.shape)
        others = [rank for rank in range(self.size) if rank != root]
        return MessageWork([self._gloo.send([as_bytes(sent[rank])], rank, SCATTER) for rank in others], None, sent)

    def reduce_scatter(self, output: Any, inputs: list[Any], op: ReduceOp, async_op: bool) -> Work:
        # parts may have different sizes, which gloo's reduce_scatter does not support
        opts = c10d.AllreduceOptions()
        flat, tensor, opts.reduceOp = send_tensor("reduce_scatter", np.concatenate(inputs, axis=None), op)
        start = sum(array.size for array in inputs[: self.rank])
        part = flat[start : start + output.size]
        return GlooWork([self._gloo.allreduce([tensor], opts)], unpacking(output, part, op, self.size), flat)

    def reduce_scatter_single(self, output: Any, array: Any, op: ReduceOp, async_op: bool) -> Work:
        opts = c10d.ReduceScatterOptions()
        shares = np.may_share_memory(output, array)
        sent, tensor, opts.reduceOp = send_tensor("reduce_scatter_single", array, op, copied=shares)
        buffer, output_tensor = recv_tensor("reduce_scatter_single", output, op)
        work = self._gloo._reduce_scatter_base(output_tensor, tensor, opts)
        return GlooWork([work], unpacking(output, buffer, op, self.size), (sent, buffer))

    def all_to_all(self, outputs: list[Any], inputs: list[Any], async_op: bool) -> Work:
        sent = np.concatenate([in_bytes(array) for array in inputs])
        sizes, sent_sizes = ([each.nbytes for each in arrays] for arrays in (outputs, inputs))
        received = np.empty(sum(sizes), np.uint8)
        buffers = np.split(received, np.cumsum(sizes)[:-1])
        return self._exchanged(received, sent, sizes, sent_sizes, partial(unpack_each, buffers, outputs))

    def all_to_all_single(
        self, output: Any, array: Any, output_counts: list[int] | None, input_counts: list[int] | None, async_op: bool
    ) -> Work:
        buffer, finish = recv_buffer(output)
        sent = unaliased(array, buffer)
        sizes, sent_sizes = (
            [count * array.itemsize for count in counts or ()] for counts in (output_counts, input_counts)
        )
        return self._exchanged(buffer, sent, sizes, sent_sizes, finish)

    def _exchanged(
        self, received: Any, sent: Any, sizes: list[int], sent_sizes: list[int], finish: Callable[[], None] | None
    ) -> Work:
        opts = c10d.AllToAllOptions()
        work = self._gloo.alltoall_base(as_bytes(received), as_bytes(sent), sizes, sent_sizes, opts)
        return GlooWork([work], finish, (sent, received))

    def _each(self, operation: str, columns: Iterable[tuple[Any, ...]], *arguments: Any) -> Work:
        """Start the plain operation for the arrays of each of `columns`, all in flight together."""
        plain = getattr(self, operation.removesuffix("_coalesced"))
        return together([plain(*arrays, *arguments) for arrays in columns])

    # -- messages --------------------------------------------------------------------------------

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work:
        self._is_another("send", dst)
        sent = send_buffer(array)
        return MessageWork([self._gloo.send([as_bytes(sent)], dst, tag)], None, sent)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work:
        self._is_another("recv", src)
        return self._received(array, src, tag, ReceiveWork)

    def sendrecv(
        self, array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int, async_op: bool
    ) -> Work:
        if dst == src == self.rank and tag == recv_tag and array.nbytes == output.nbytes:
            in_bytes_of(output, in_bytes(unaliased(array, output)))
            work: Work = CompletedWork()
            work.source = self.rank
            return work
        self._is_another("sendrecv", dst)
        self._is_another("sendrecv", src)
        sent = unaliased(array, output)
        receive = self._received(output, src, recv_tag, ReceiveWork)
        receive._works.append(self._gloo.send([as_bytes(sent)], dst, tag))
        receive.alive = (receive.alive, sent)
        return receive

    def _received(self, array: Any, src: int | None, tag: int, kind: type[MessageWork]) -> MessageWork:
        buffer, finish = recv_buffer(array)
        tensors = [as_bytes(buffer)]
        work = self._gloo.recv_anysource(tensors, tag) if src is None else self._gloo.recv(tensors, src, tag)
        return kind([work], finish, buffer)

    def _is_another(self, operation: str, rank: int | None) -> None:
        if rank == self.rank:
            raise UnsupportedOperationError(
                f"gloo sends nothing to the same rank; copy the array, or use 'cpu:mpi'{on_rank()}", operation
            )

    # -- the rest --------------------------------------------------------------------------------

    def barrier(self, async_op: bool) -> Work:
        return GlooWork([self._gloo.barrier(c10d.BarrierOptions())], None, None)

    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None:
        self._gloo.monitored_barrier(timedelta(seconds=timeout), wait_all_ranks)

    def close(self) -> None:
        del self._gloo, self._store

    def leave(self) -> None:
        """End the threads that wait for messages; a thread that returns after Python's end aborts the process."""
        if not WAITING:
            return
        other = (self.rank + 1) % self.size
        with suppress(RuntimeError):  # this time-out ends all operations that gloo has in flight
            self._gloo.recv([as_bytes(np.empty(1, np.uint8))], other, LAST).wait(timedelta(milliseconds=1))
        deadline = time.monotonic() + LONGEST_END
        for thread in list(WAITING):
            thread.join(max(0.0, deadline - time.monotonic()))

    def translate_error(self, operation: str, error: Exception) -> Exception:
        return as_dist_error(operation, error)


class GroupStore(TorchStore):
    """The group's store as a c10d store, in which gloo's ranks find each other."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"gloo/{key}", value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(f"gloo/{key}"))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(f"gloo/{key}", amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([f"gloo/{key}" for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([f"gloo/{key}" for key in keys], timeout)


def _connected(store: GroupStore, rank: int, size: int, timeout: timedelta, one_node: bool) -> Any:
    if not one_node or "GLOO_SOCKET_IFNAME" in os.environ:
        return ProcessGroupGloo(store, rank, size, timeout)
    # a host may not be reachable by its own name
    opts = ProcessGroupGloo._Options()
    opts._timeout = timeout
    opts._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, size, opts)


def together(works: list[Any], kind: type[GlooWork] = GlooWork) -> Work:
    """Combine several Works in one."""
    steps = [work._finish for work in works if work._finish is not None]

    def finish() -> None:
        for step in steps:
            step()

    return kind([each for work in works for each in work._works], finish, [work.alive for work in works])


def send_buffer(array: Any) -> Any:
    """Return contiguous memory with the values of `array`; torch requires writeable memory."""
    return array if array.flags.carray else array.copy(order="C")


def unaliased(array: Any, *outputs: Any) -> Any:
    """Return contiguous memory with the values of `array`, not shared with `outputs`."""
    shared = any(np.may_share_memory(array, output) for output in outputs)
    return array.copy(order="C") if shared else send_buffer(array)


def recv_buffer(array: Any) -> tuple[Any, Callable[[], None] | None]:
    """Return contiguous memory for gloo to write, and the function that copies it to `array`, or None."""
    if array.flags.carray:
        return array, None
    buffer = np.empty(array.shape, array.dtype)
    return buffer, partial(setitem, array, ..., buffer)


def in_bytes(array: Any) -> Any:
    """Return the bytes of an array; they are a copy if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def in_bytes_of(output: Any, values: Any) -> None:
    """Fill `output` with bytes."""
    output[...] = values.view(output.dtype).reshape(output.shape)


def unpack_each(buffers: list[Any], outputs: list[Any]) -> None:
    """Fill each of `outputs` with the first bytes of its buffer."""
    for buffer, output in zip(buffers, outputs):
        in_bytes_of(output, buffer[: output.nbytes])
