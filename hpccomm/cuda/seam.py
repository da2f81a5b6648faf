"""The private seam: every function of CUDA and NCCL that hpccomm calls, on raw pointers, and nothing else.

Streams, events and memory are integers, as CUDA's C functions take them; arrays are ``cupy.ndarray``. Behind the seam
is a *provider*: CuPy (``cuda/cupy_runtime.py``, ``nccl/cupy_nccl.py``), or the stand-in of the tests, which needs no
GPU (``tests/gpu/stand_in.py``). ``HPCCOMM_GPU_PROVIDER=package.module`` names another module that has a class `Runtime`
and a class `NCCL`.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from .time_limit import TimeLimit

OWN_THREADS = "hpccomm-"  # how their names begin
PROVIDERS = {"Runtime": "hpccomm.cuda.cupy_runtime", "NCCL": "hpccomm.nccl.cupy_nccl"}


class Kernel(NamedTuple):
    """Which kernel of ``nccl/intra_node.cu``: its name, and the arguments of the template."""

    name: str
    dtype: str
    ranks: int
    rank: int


class Runtime(Protocol):
    """CUDA: devices, streams, events, and the few things that are done to arrays."""

    # -- devices

    def device_count(self) -> int:
        """Return the number of GPUs that this process sees."""

    def current_device(self) -> int:
        """Return the number of this thread's current GPU."""

    def use_device(self, device: int) -> None:
        """Make a GPU this thread's current one."""

    def identity(self, device: int) -> str:
        """Return an identifier of a GPU, unique in the machine and the same in every process."""

    # -- streams and events

    def create_stream(self, device: int) -> int:
        """Create a stream that does not wait for the legacy default stream (cudaStreamNonBlocking)."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream."""

    def current_stream(self, device: int) -> int:
        """Return the stream on which this thread's CuPy calls for a GPU run, whichever GPU is the current one."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether what is put on the stream goes into a CUDA graph."""

    def synchronize_stream(self, stream: int) -> None:
        """Block the host until the stream has done all that was put on it."""

    def create_event(self, device: int) -> int:
        """Create an event without timing."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""

    def record(self, event: int, stream: int) -> None:
        """Record an event: it stands for everything that was put on the stream so far."""

    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event; the host does not wait."""

    def is_done(self, event: int) -> bool:
        """Return whether everything that the event stands for is done."""

    def synchronize_event(self, event: int) -> None:
        """Block the host until everything that the event stands for is done."""

    # -- arrays

    def as_array(self, array: Any) -> Any:
        """View a GPU array of another library (DLPack, CUDA array interface) as a ``cupy.ndarray``, without a copy."""

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        """Make a contiguous array; when it is dropped, its memory may be used again by what follows on `stream`."""

    def copy(self, target: Any, source: Any, stream: int) -> None:
        """Copy the values of `source` to `target`, which has the same dtype and size; any layouts."""

    def multiply(self, target: Any, source: Any, factor: Any, stream: int) -> None:
        """Put ``factor * source`` in `target`, in their dtype."""

    def sum_entries(self, matrix: Any, rows: Any, columns: Any, values: Any, device: int, stream: int) -> None:
        """Make a sparse matrix the sum of the entries given, and block the host until it is."""

    # -- the host's memory

    def pinned(self, nbytes: int) -> Any:
        """Return page-locked host memory, as a NumPy array of bytes."""

    def to_host(self, host: Any, array: Any, stream: int) -> None:
        """Copy a contiguous GPU array to a NumPy array of as many bytes."""

    def to_device(self, array: Any, host: Any, stream: int) -> None:
        """Copy a NumPy array to a contiguous GPU array of as many bytes."""

    # -- memory that other processes of the node see (CUDA IPC)

    def allocate(self, nbytes: int, device: int) -> int:
        """Allocate memory that can be shared (cudaMalloc)."""

    def free(self, memory: int) -> None:
        """Free memory from `allocate`."""

    def ipc_handle(self, memory: int) -> bytes:
        """Return a handle with which other processes can open the memory."""

    def open_ipc(self, handle: bytes, device: int) -> int:
        """Return the address, in this process, of another process's memory."""

    def close_ipc(self, memory: int) -> None:
        """Close an address from `open_ipc`."""

    def clear(self, memory: int, nbytes: int, stream: int) -> None:
        """Fill memory with zeros."""

    def copy_bytes(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory."""

    def compile_intra_node(self, ranks: int, rank: int, device: int) -> None:
        """Compile and load the kernels of ``nccl/intra_node.cu`` for a rank; an error is one that `explain` knows."""

    def intra_node_kernel(
        self, kernel: Kernel, shape: tuple[int, int], out: int, memory: Any, vectors: int, stream: int
    ) -> None:
        """Launch a kernel of ``nccl/intra_node.cu`` in `shape`, (blocks, threads).

        `memory` is its struct of pointers, as a NumPy array of one element.
        """

    def explain(self, error: Exception) -> str | None:
        """Return CUDA's error text if `error` came from CUDA, else None."""


class Communicator(Protocol):
    """NCCL's communicator (ncclComm_t). Counts are elements, types and operations nccl.h's numbers.

    One thread at a time calls it. A function that NCCL has not finished when it returns (ncclInProgress, where the
    communicator does not block) waits with the TimeLimit that the communicator was made with.
    """

    def group_start(self) -> None:
        """ncclGroupStart."""

    def group_end(self) -> None:
        """ncclGroupEnd: launch what was called of this communicator since `group_start`, as one."""

    def all_reduce(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:
        """ncclAllReduce."""

    def reduce(self, send: int, recv: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """ncclReduce."""

    def broadcast(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> None:
        """ncclBroadcast."""

    def reduce_scatter(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:
        """ncclReduceScatter; `count` is that of `recv`."""

    def all_gather(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        """ncclAllGather; `count` is that of `send`."""

    def send(self, send: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """ncclSend."""

    def recv(self, recv: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """ncclRecv."""

    def all_to_all(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        """ncclAlltoAll, where `NCCL.has_all_to_all`; `count` is that of one part."""

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Communicator | None:
        """ncclCommSplit; None for ``color=-1``. Nothing may be in flight on this communicator."""

    def async_error(self) -> str | None:
        """Return the error text if the communicator has failed, else None (ncclCommGetAsyncError)."""

    def abort(self) -> None:
        """ncclCommAbort: end what is in flight, and free the communicator. Not collective."""

    def destroy(self) -> None:
        """ncclCommFinalize and ncclCommDestroy: wait for what is in flight on every rank, and free the communicator."""


class NCCL(Protocol):
    """The functions of NCCL that do not belong to one communicator."""

    has_all_to_all: bool  # since NCCL 2.28

    def version(self) -> int:
        """Return the version of the library, 22703 for 2.27.3."""

    def unique_id(self) -> Any:
        """Return a new id for `connect`; it can be pickled."""

    def connect(self, size: int, unique_id: Any, rank: int, time_limit: TimeLimit | None) -> Communicator:
        """Make the communicator of this thread's current GPU (ncclCommInitRank); every rank calls it.

        It blocks without `time_limit`, and does not with it (ncclConfig_t.blocking).
        """

    def explain(self, error: Exception) -> str | None:
        """Return NCCL's error text, with that of its last error, if `error` came from NCCL, else None."""


@contextmanager
def on_device(runtime: Runtime, device: int) -> Iterator[None]:
    """Make a GPU the current one inside the block; in hpccomm's own threads also afterwards.

    A thread begins on GPU 0, and going back there would make a context (about 500 MB) on a GPU that is another rank's.
    """
    before = runtime.current_device()
    runtime.use_device(device)
    try:
        yield
    finally:
        if before != device and not threading.current_thread().name.startswith(OWN_THREADS):
            runtime.use_device(before)


@functools.cache
def runtime() -> Runtime:
    """Return the CUDA half of the provider; ImportError says what to install."""
    made: Runtime = _provided("Runtime")()
    return made


@functools.cache
def nccl() -> NCCL:
    """Return the NCCL half of the provider; ImportError says what to install."""
    made: NCCL = _provided("NCCL")()
    return made


def _provided(name: str) -> Any:
    module = os.environ.get("HPCCOMM_GPU_PROVIDER") or PROVIDERS[name]
    return getattr(importlib.import_module(module), name)
