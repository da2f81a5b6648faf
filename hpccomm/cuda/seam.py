"""The private seam: exactly the functions of CUDA and NCCL that hpccomm calls.

Streams, events and memory are integers, as in CUDA's C functions; arrays are ``cupy.ndarray``. A *provider* implements
the seam: CuPy (``cuda/cupy_runtime.py``) with one of the NCCL bindings (``nccl/providers.py``), or the tests' stand-in
for machines without a GPU (``tests/gpu/stand_in.py``). ``HPCCOMM_GPU_PROVIDER=package.module`` on rank 0 names another
module with `Runtime` and `NCCL`, from hpccomm or its tests.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from ..core.late import CUDA_PROVIDER, NCCL_PROVIDER, late
from ..process.settings import gpu_provider
from .time_limit import TimeLimit

OWN_THREADS = "hpccomm-"  # prefix of the names of hpccomm's threads
_this_thread = threading.local()


class Kernel(NamedTuple):
    """A kernel of ``cuda/intra_node.cu``: its name, and its template arguments."""

    name: str
    dtype: str
    ranks: int
    rank: int


class Runtime(Protocol):
    """CUDA's devices, streams, events and memory, and a few operations on arrays."""

    # -- devices

    def device_count(self) -> int:
        """Return the number of visible GPUs."""

    def current_device(self) -> int:
        """Return the number of this thread's current GPU."""

    def use_device(self, device: int) -> None:
        """Make `device` this thread's current GPU."""

    def identity(self, device: int) -> str:
        """Return an identifier of a GPU, unique among all machines and the same in every process."""

    # -- streams and events

    def create_stream(self, device: int) -> int:
        """Create a stream that does not wait for the legacy default stream (cudaStreamNonBlocking)."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of the current GPU, and free the memory that `empty` keeps for it."""

    def current_stream(self, device: int) -> int:
        """Return this thread's current CuPy stream on any GPU."""

    def is_capturing(self, stream: int) -> bool:
        """Return True while a CUDA graph captures the stream."""

    def synchronize_stream(self, stream: int) -> None:
        """Block the host until everything on the stream is done."""

    def create_event(self, device: int) -> int:
        """Create an event without timing."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""

    def record(self, event: int, stream: int) -> None:
        """Record an event: it passes when everything on the stream so far is done."""

    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event; the host does not wait."""

    def is_done(self, event: int) -> bool:
        """Return True once the event has passed."""

    def addresses_for_c(self) -> tuple[int, int]:
        """Return the addresses of cuEventQuery and cuThreadExchangeStreamCaptureMode for calls from C, or 0 and 0."""

    def functions_for_c(self) -> dict[str, int]:
        """Return the addresses of CUDA's and CuPy's functions for `native/gpu_path.pxi`; those that there are."""

    def copy_kernels(self, device: int) -> list[int]:
        """Return the CUfunctions of ``copies.cu`` for few axes, by unit: first for one copy, then for many."""

    def error(self, code: int) -> Exception:
        """Return the exception for an error code of one of these functions."""

    def relax_captures(self) -> None:
        """Let this thread query events while other threads capture (cudaThreadExchangeStreamCaptureMode)."""

    def synchronize_event(self, event: int) -> None:
        """Block the host until the event has passed."""

    # -- arrays

    def as_array(self, array: Any) -> Any:
        """Return a ``cupy.ndarray`` that views another library's GPU array (DLPack, CUDA array interface)."""

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        """Return a new contiguous array; once it is freed, later work on `stream` may reuse its memory."""

    def copy(self, target: Any, source: Any, stream: int) -> None:
        """Copy `source` to `target`, which has the same dtype and size; any layouts and addresses."""

    def copies(self, pairs: Iterable[tuple[Any, Any]]) -> Sequence[Callable[[int], None]]:
        """Return a few kernel launchers that copy each source to its target (same shape and dtype) on a stream."""

    def view(self, memory: int, nbytes: int, shape: tuple[int, ...], dtype: Any, device: int, owner: Any) -> Any:
        """Return an array over GPU memory; the array and its views keep `owner` alive."""

    def load_copies(self, device: int, stream: int) -> None:
        """Load the kernels that `copies` and `copy` use."""

    def load_additions(self, dtype: Any, dimensions: int, device: int, stream: int) -> None:
        """Load the kernels of `add` for arrays of up to `dimensions` dimensions, by using them once."""

    def add(self, target: Any, source: Any, stream: int) -> None:
        """Add `source` to `target`, which has the same dtype and shape; any layouts, aligned."""

    def multiply(self, target: Any, source: Any, factor: Any, stream: int) -> None:
        """Write ``factor * source`` to `target`, in their dtype; any layouts, aligned."""

    def sum_entries(self, matrix: Any, rows: Any, columns: Any, values: Any, device: int, stream: int) -> None:
        """Set a sparse matrix to the sum of entries, and block the host until this is done."""

    # -- the host's memory

    def pinned(self, nbytes: int) -> Any:
        """Return page-locked host memory, as a NumPy array of bytes."""

    def to_host(self, host: Any, array: Any, stream: int) -> None:
        """Copy a contiguous GPU array to a NumPy array of the same size in bytes."""

    def to_device(self, array: Any, host: Any, stream: int) -> None:
        """Copy a NumPy array to a contiguous GPU array of the same size in bytes."""

    # -- memory shared with other processes of the node (CUDA IPC)

    def allocate(self, nbytes: int, device: int) -> int:
        """Allocate memory that can be shared (cudaMalloc)."""

    def free(self, memory: int) -> None:
        """Free memory from `allocate`."""

    def ipc_handle(self, memory: int) -> bytes:
        """Return a handle with which other processes open the memory."""

    def open_ipc(self, handle: bytes, device: int) -> int:
        """Return the address, in this process, of another process's memory."""

    def close_ipc(self, memory: int) -> None:
        """Close an address from `open_ipc`."""

    def clear(self, memory: int, nbytes: int, stream: int) -> None:
        """Fill memory with zeros."""

    def copy_bytes(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory."""

    def compile_intra_node(self, ranks: int, rank: int, device: int) -> None:
        """Compile and load the kernels of ``cuda/intra_node.cu`` for a rank; `explain` knows the errors."""

    def intra_node_kernel(
        self, kernel: Kernel, shape: tuple[int, int], out: int, memory: Any, vectors: int, stream: int
    ) -> None:
        """Launch a kernel of `shape` (blocks, threads); `memory` is its struct, a NumPy array of one element."""

    def explain(self, error: Exception) -> str | None:
        """Return the text of a CUDA error; None for any other error."""


class Communicator(Protocol):
    """NCCL's communicator (ncclComm_t). Counts are elements; types and operations are nccl.h's numbers.

    Only one thread at a time calls it. With a non-blocking communicator, a function whose NCCL call returns
    ncclInProgress waits for the end of the call, at most for the TimeLimit of the communicator.
    """

    def group_start(self) -> None:
        """ncclGroupStart."""

    def group_end(self) -> None:
        """ncclGroupEnd: launch this communicator's calls since `group_start` as one."""

    def all_reduce(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:
        """ncclAllReduce."""

    def reduce(self, send: int, recv: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """ncclReduce."""

    def broadcast(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> None:
        """ncclBroadcast."""

    def reduce_scatter(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:
        """ncclReduceScatter; `count` is the size of `recv`."""

    def all_gather(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        """ncclAllGather; `count` is the size of `send`."""

    def send(self, send: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """ncclSend."""

    def recv(self, recv: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """ncclRecv."""

    def all_to_all(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        """ncclAlltoAll, if `NCCL.has_all_to_all`; `count` is the size of one part."""

    @property
    def handle(self) -> int:
        """The address of the ncclComm_t."""

    def finish(self, code: int) -> None:
        """Wait for the end of the call that has returned `code`; raise its error."""

    def configured(self, settings: Mapping[str, Any]) -> Communicator:
        """Return this communicator with an ncclCollConfig_t for its collectives (ncclAllReduceConfig); since 2.31."""

    def register_window(self, memory: int, nbytes: int) -> int:
        """ncclCommWindowRegister, symmetric; return the ncclWindow_t, or 0 if the GPUs have no symmetric memory."""

    def deregister_window(self, window: int) -> None:
        """ncclCommWindowDeregister; no operation may be in flight in its memory. Not collective."""

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Communicator | None:
        """ncclCommSplit; None for ``color=-1``. No operation may be in flight on this communicator."""

    def async_error(self) -> str | None:
        """Return the text of the communicator's error, or None (ncclCommGetAsyncError)."""

    def abort(self) -> None:
        """ncclCommAbort: end all operations in flight, and free the communicator. Not collective."""

    def destroy(self) -> None:
        """ncclCommFinalize and ncclCommDestroy: wait for operations in flight on all ranks; free the communicator."""


class NCCL(Protocol):
    """The functions of NCCL that do not belong to one communicator."""

    bindings: str  # the library through which hpccomm calls NCCL
    has_all_to_all: bool  # since NCCL 2.28

    def version(self) -> int:
        """Return the version of the library, 22703 for 2.27.3."""

    def unique_id(self) -> Any:
        """Return a new id for `connect`; it can be pickled."""

    def connect(self, size: int, unique_id: Any, rank: int, time_limit: TimeLimit | None) -> Communicator:
        """Return a communicator on the current GPU (ncclCommInitRank); it blocks unless `time_limit` is given."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the current GPU that can be registered (ncclMemAlloc), and return its address."""

    def free(self, memory: int) -> None:
        """Free memory from `allocate` (ncclMemFree)."""

    def functions_for_c(self) -> dict[str, int]:
        """Return the addresses of the library's functions by their names."""

    def error(self, code: int) -> Exception:
        """Return the exception for a result code of one of these functions."""

    def explain(self, error: Exception) -> str | None:
        """Return the text of an NCCL error, with that of its last error; None for any other error."""


@contextmanager
def on_device(runtime: Runtime, device: int) -> Iterator[None]:
    """Make a GPU the current one inside the block; hpccomm's own threads keep it afterwards.

    A thread starts on GPU 0; going back there would make a context (about 500 MB) on a GPU that another rank may use.
    If another thread captures a graph in the default mode, as PyTorch does, querying an event would end the capture.
    """
    before = runtime.current_device()
    runtime.use_device(device)
    is_own = threading.current_thread().name.startswith(OWN_THREADS)
    if is_own and not hasattr(_this_thread, "is_relaxed"):
        runtime.relax_captures()
        _this_thread.is_relaxed = True
    try:
        yield
    finally:
        if before != device and not is_own:
            runtime.use_device(before)


@functools.cache
def runtime() -> Runtime:
    """Return the provider's `Runtime`; ImportError names the package to install."""
    return _provided("Runtime", CUDA_PROVIDER)  # type: ignore[no-any-return]


@functools.cache
def nccl() -> NCCL:
    """Return the provider's `NCCL`; ImportError names the package to install."""
    return _provided("NCCL", NCCL_PROVIDER)  # type: ignore[no-any-return]


def _provided(kind: str, otherwise: str) -> Any:
    module = gpu_provider()
    return late(f"{module}:{kind}" if module else otherwise)()
