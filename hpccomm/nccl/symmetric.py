"""Symmetric memory: arrays that all GPUs of a group access directly (NCCL's user guide, "Window Registration")."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from ..core import checks
from ..cuda.seam import NCCL, on_device
from ..errors import DistBackendError, on_rank
from .bootstrap import tried
from .plan import refuse_capture

if TYPE_CHECKING:
    from mpi4py import MPI

    from .connection import Connection


class Memory:
    """The owner of symmetric memory: its array and all views keep a reference."""


class SymmetricArrays:
    """The arrays that ``empty_symmetric`` has made in a group."""

    def __init__(self, nccl: NCCL, mpi: MPI.Intracomm, connection: Connection) -> None:
        self._nccl = nccl
        self._mpi = mpi
        self._connection = connection
        self._made: list[tuple[int, weakref.ref[Memory]]] = []  # addresses, and the owners, which die with their arrays

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make an array on each rank; every rank of the group calls it."""
        runtime, device = self._connection.runtime, self._connection.device
        refuse_capture(runtime, runtime.current_stream(device), "making symmetric memory")
        nbytes = max(math.prod(shape) * dtype.itemsize, 1)  # NCCL registers no empty memory
        memory = Memory()
        with on_device(runtime, device):
            address = self._allocate(shape, dtype, nbytes)
            self._made.append((address, weakref.ref(memory)))
            self._connection.register_window(address, nbytes)
            return runtime.view(address, nbytes, shape, dtype, device, memory)

    def _allocate(self, shape: tuple[int, ...], dtype: Any, nbytes: int) -> int:
        """Return the address of new memory; raise on every rank if a rank gets none, or the arrays differ."""
        failure, address = tried(self._nccl, self._nccl.allocate, nbytes)
        wishes = self._mpi.allgather((shape, dtype, failure))
        try:
            checks.same_new_array("empty_symmetric", [wish[:2] for wish in wishes])
            for rank, (*_, failed) in enumerate(wishes):
                if failed is not None:
                    raise DistBackendError(
                        f"rank {rank} of the group gets no {nbytes} bytes of NCCL: {failed}{on_rank()}",
                        "empty_symmetric",
                    )
        except Exception:
            if failure is None:
                self._nccl.free(address)
            raise
        return address  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the memory that has no array any more; no operation uses it.

        The rest stays until the process ends; so does all of it if NCCL has failed, because NCCL may still use it.
        """
        if self._connection.failure is None:
            with on_device(self._connection.runtime, self._connection.device):
                for address, memory in self._made:
                    if memory() is None:
                        self._nccl.free(address)
