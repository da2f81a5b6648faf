"""The Python half of the compiled fast path of GPU arrays (`native/gpu_path.pxi`): tables, errors, Works.

Planning an operation (buffers for strided arrays, overlapping memory, another current GPU) takes the host far longer
than the NCCL call. The fast path checks for the ordinary case in C: CuPy arrays on the GPU of a connected group, with a
dtype and op of NCCL's. Then it makes the same NCCL call as `NCCLBackend`, because another rank may take the planned
path; otherwise it does nothing and returns False. Without the extension, all operations are planned.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.arrays import device_of_type, dlpack_code
from ..core.backend import FastPath
from ..core.dispatcher import REAP_ABOVE, REAP_BYTES
from ..core.operation_list import CALLED
from ..core.reduce_op import ReduceOp
from ..core.work import COMPLETED, IN_FLIGHT, Work
from ..core.work_info import work_info
from ..cuda.work import CudaWork
from ..errors import DistTimeoutError
from ..native import _fastpath as fastpath
from .types import rows

if TYPE_CHECKING:
    from ..core.dispatcher import Dispatcher
    from .backend import NCCLBackend
    from .connection import Connection

OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.BAND, ReduceOp.BOR]
LARGEST_NUMBER = 127  # of a dtype in the ring; other packages' dtypes have larger numbers


class CompiledCudaWork(fastpath.GPUPending, CudaWork):
    """An asynchronous operation of the compiled fast path."""

    _runtime = property(attrgetter("path.connection.runtime"))
    _device = property(attrgetter("path.connection.device"))
    _failure = property(attrgetter("path.connection.why_ended"))
    wait_blocks = property(attrgetter("path.connection.wait_blocks"))


class NCCLFastPath(fastpath.GPUPath, FastPath):
    """The fast path of one group."""

    connection: Connection

    def __init__(self, backend: NCCLBackend) -> None:
        self._backend = backend

    def open(self, connection: Connection, device: str) -> None:
        """Accept the arrays of `device` from now on, unless CuPy or CUDA lack a function."""
        runtime, backend = connection.runtime, self._backend
        functions = runtime.functions_for_c() | backend.nccl.functions_for_c()
        self.connection = connection
        if set_up() and {*fastpath.FUNCTIONS} - {"ncclAlltoAll"} <= {*functions}:
            self.connect(
                functions, connection.comm.handle, connection.stream, connection.order, backend.rank, backend.size,
                connection.device, device, connection.issuing, connection.events, connection.in_flight,
                CompiledCudaWork, runtime.copy_kernels(connection.device),
            )  # fmt: skip
            self._count_with_the_host()

    def attach(self, dispatcher: Dispatcher) -> None:
        """See FastPath.attach."""
        super().attach(dispatcher)
        self._count_with_the_host()

    def _count_with_the_host(self) -> None:
        """Make the fast path of host arrays, if the group has one: C writes to its counts and its ring buffer."""
        if self.is_open and self.dispatcher is not None and "cpu" in self.dispatcher.group.config.device_map:
            self.dispatcher.backends["cpu"]

    def new_event(self) -> int:
        """Return a new event; 0 if CUDA makes none, of which the checked path raises the error."""
        try:
            return self.connection.runtime.create_event(self.connection.device)
        except Exception:
            return 0

    def allocate(self, nbytes: int, stream: int) -> Any:
        """Return temporary memory, an array of bytes, or None; later work on `stream` may use it once it is dropped."""
        try:
            return self.connection.runtime.empty((nbytes,), np.dtype(np.uint8), self.connection.device, stream)
        except Exception:
            return None

    def finish_call(self, code: int) -> None:
        """Wait for the end of a call of a non-blocking communicator, which has returned `code`."""
        self.connection.comm.finish(code)

    def mark(self, name: str, result: Any, peer: int | None) -> None:
        """Let the watchdog see a blocking operation."""
        if monotonic() >= self.connection.last.due:
            self.connection.last.mark(self.dispatcher, name, result, peer)

    def cuda_error(self, code: int) -> Exception:
        """Return the exception for an error code of CUDA."""
        return self.connection.runtime.error(code)

    def nccl_error(self, code: int) -> Exception:
        """Return the exception for a result code of NCCL."""
        return self._backend.nccl.error(code)

    def failed(self, name: str, number: int, async_op: bool, error: Exception) -> Exception:
        """Return the error of an operation that the program should see."""
        if isinstance(error, DistTimeoutError):
            self.connection.give_up_call(error)
        called = CALLED.get((name, async_op), name)
        seen: Exception = self.dispatcher.translated(self._backend, called, number, error)
        return seen


@functools.cache
def set_up() -> bool:
    """Fill the tables of the compiled path; return False if CuPy's arrays are not as expected."""
    import cupy

    places = {op: place for place, op in enumerate(OPS)}
    table = {}
    for dtype, (datatype, width, ops) in rows().items():
        numbers = {places[op]: number for op, number in ops.items()}
        table[dtype] = datatype, width, _number_of(dtype), dlpack_code(dtype), numbers
    try:
        fastpath.set_up_gpu(cupy.ndarray, cupy.cuda.MemoryPointer, device_of_type, table, places)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


def _number_of(dtype: Any) -> int:
    """Return a dtype's number in the ring; -1 for a dtype of another package, whose number is larger."""
    return dtype.num if dtype.num <= LARGEST_NUMBER else -1


def described(dtype: Any, size: int) -> Any:
    """Return an object that describes an array in reports."""
    return SimpleNamespace(dtype=np.dtype(dtype), size=size)


fastpath.set_up_works(IN_FLIGHT, COMPLETED, work_info, Work, REAP_ABOVE, REAP_BYTES)  # mpi/compiled.py does, too
fastpath.set_up_gpu_works(CudaWork, described)
