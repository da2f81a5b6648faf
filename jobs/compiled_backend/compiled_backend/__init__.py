"""CompiledBackend: a backend of hpccomm whose all_reduce, broadcast and barrier are C++ (transport.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpccomm as hc

from .transport import Request, Transport

LARGEST = 2**31 - 1  # bytes; the transport counts in C's int


class CompiledBackend(hc.BackendOverMPI):
    """Runs three operations in C++; hpccomm's MPI backend does all others, and other dtypes, ops and larger arrays."""

    def __init__(self, options: hc.BackendOptions, backend_options: Any = None) -> None:
        super().__init__(options, backend_options)
        self.transport = Transport(options.comm.handle)

    def all_reduce(self, array: Any, op: hc.ReduceOp, async_op: bool) -> hc.Work | None:
        """Reduce `array`, which is contiguous, over the ranks in place."""
        if array.nbytes > LARGEST or not Transport.reduces(array.dtype.char, op.name):
            return super().all_reduce(array, op, async_op)
        return CompiledWork(self.transport.all_reduce(array, op.name))

    def broadcast(self, array: Any, root: int, async_op: bool) -> hc.Work | None:
        """Copy `array`, which may have any layout, from rank `root`."""
        if array.nbytes > LARGEST:
            return super().broadcast(array, root, async_op)
        packed = np.ascontiguousarray(array)

        def unpack() -> None:
            array[...] = packed.reshape(array.shape)

        request = self.transport.broadcast(packed, root)
        return CompiledWork(request, None if packed is array or root == self.rank else unpack)

    def barrier(self, async_op: bool) -> hc.Work | None:
        """Return a Work that ends when every rank has called it."""
        return CompiledWork(self.transport.barrier())


class CompiledWork(hc.Work):
    """An operation that the transport has started; for ``async_op=False``, the group waits for it."""

    def __init__(self, request: Request, finish: Callable[[], None] | None = None) -> None:
        super().__init__(finish)
        self.request = request

    def poll(self) -> bool:
        """Return whether the operation is done."""
        return self.request.poll()
