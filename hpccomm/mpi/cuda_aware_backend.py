"""CudaAwareBackend: GPU arrays passed to an MPI library that is proven to take pointers to GPU memory.

MPI gets the GPU arrays of messages, and of blocking operations on one array without preparation. Other operations are
staged through the host: Open MPI's non-blocking collectives take no GPU pointers, even if it reports CUDA support.
Before each call the host waits for the current stream, because MPI does not know about streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Self

from mpi4py import MPI

from ..core.backend import Backend
from ..core.options import BackendOptions
from ..core.reduce_op import ReduceOp
from ..core.timeouts import MAIN
from ..core.work import Work
from ..cuda.staged_backend import StagedBackend, Staging
from .datatypes import DIRECT, LARGEST_COUNT
from .works import MPIWork, ReceiveWork, received

IN_PLACE = MPI.IN_PLACE


class CudaAwareBackend(StagedBackend):
    """GPU arrays over a CUDA-aware MPI."""

    def __init__(self, options: BackendOptions, host: Backend) -> None:
        super().__init__(options, host)
        self._comm: Any = options.comm

    def broadcast(self, array: Any, root: int, async_op: bool) -> Work | None:
        if async_op or not _fits(array):
            return super().broadcast(array, root, async_op)
        staging = self._staging(array)
        buffer = staging.send_buffer(array) if root == self.rank else staging.recv_buffer(array)
        return self._call(staging, self._comm.Bcast, _bytes(buffer), root)

    def all_reduce(self, array: Any, op: ReduceOp, async_op: bool) -> Work | None:
        if async_op or not _is_reducible(array, op):
            return super().all_reduce(array, op, async_op)
        datatype, mpi_op = DIRECT[op, array.dtype]
        staging = self._staging(array)
        return self._call(staging, self._comm.Allreduce, IN_PLACE, _numbers(staging.in_place(array), datatype), mpi_op)

    def reduce(self, array: Any, root: int, op: ReduceOp, async_op: bool) -> Work | None:
        if async_op or not _is_reducible(array, op):
            return super().reduce(array, root, op, async_op)
        datatype, mpi_op = DIRECT[op, array.dtype]
        staging = self._staging(array)
        call = self._comm.Reduce
        if root == self.rank:
            return self._call(staging, call, IN_PLACE, _numbers(staging.in_place(array), datatype), mpi_op, root)
        return self._call(staging, call, _numbers(staging.send_buffer(array), datatype), None, mpi_op, root)

    def all_gather_single(self, output: Any, array: Any, async_op: bool) -> Work | None:
        if async_op or not _fits(output):
            return super().all_gather_single(output, array, async_op)
        staging = self._staging(output, array)
        (sent,) = staging.unaliased([array], [output])
        return self._call(staging, self._comm.Allgather, _bytes(sent), _bytes(staging.recv_buffer(output)))

    def send(self, array: Any, dst: int, tag: int, async_op: bool) -> Work | None:
        if not _fits(array):
            return super().send(array, dst, tag, async_op)
        staging = self._staging(array)
        staging.alive.append(array)
        call = self._comm.Isend if async_op else self._comm.Send
        return self._call(staging, call, _bytes(staging.send_buffer(array)), dst, tag)

    def recv(self, array: Any, src: int | None, tag: int, async_op: bool) -> Work | int | None:
        if not _fits(array):
            return super().recv(array, src, tag, async_op)
        staging = self._staging(array)
        buffer = staging.recv_buffer(array)
        source = MPI.ANY_SOURCE if src is None else src
        staging.synchronize()
        if async_op or get_ident() != MAIN:
            with staging.on_its_gpu():
                request = self._comm.Irecv(_bytes(buffer), source, tag)
            work = GPUReceiveWork(request, buffer.nbytes, staging.copy_back, (array, staging.alive))
            work.on(staging.on_its_gpu)
            return work if async_op else work.receive()
        status = MPI.Status()
        with staging.on_its_gpu():
            self._comm.Recv(_bytes(buffer), source, tag, status)
        return received("recv", status, buffer, staging.copy_back)

    def _call(self, staging: Staging, call: Any, *arguments: Any) -> Work | None:
        """Call MPI after packing, and unpack after MPI; return a Work, or None after a blocking call."""
        staging.synchronize()
        with staging.on_its_gpu():
            request = call(*arguments)
        if request is not None:
            return GPUWork(request, staging.copy_back, (arguments, staging)).on(staging.on_its_gpu)
        staging.copy_back()
        return None


class OnItsGPU(Work):
    """A Work that calls MPI while its buffer's GPU is the current one, as UCX requires."""

    def on(self, its_gpu: Callable[[], AbstractContextManager[None]]) -> Self:
        """Call MPI inside the context manager that `its_gpu` returns; return this Work."""
        self._its_gpu = its_gpu
        return self

    def poll(self) -> bool:
        """Poll like the Work of a host buffer."""
        with self._its_gpu():
            return super().poll()

    def block(self) -> None:
        """Wait like the Work of a host buffer."""
        with self._its_gpu():
            super().block()


class GPUWork(OnItsGPU, MPIWork):
    """An operation of one request on GPU memory."""


class GPUReceiveWork(OnItsGPU, ReceiveWork):
    """A receive into GPU memory."""


def _is_reducible(array: Any, op: ReduceOp) -> bool:
    """Return whether MPI reduces such an array itself; our own MIN and MAX are only for the host."""
    return (op, array.dtype) in DIRECT and DIRECT[op, array.dtype][1].is_predefined and _fits(array)


def _fits(array: Any) -> bool:
    """Return whether MPI takes an array of this size in one call. Layouts don't matter: ranks may differ in them."""
    return bool(array.nbytes <= LARGEST_COUNT)


def _bytes(array: Any) -> Any:
    return _numbers(array, MPI.BYTE)


def _numbers(array: Any, datatype: MPI.Datatype) -> Any:
    return [MPI.buffer.fromaddress(array.data.ptr, array.nbytes), datatype]
