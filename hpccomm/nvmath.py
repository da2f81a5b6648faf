"""A group as the process group of ``nvmath.distributed``, NVIDIA's Fourier transforms and linear algebra on many GPUs.

nvmath.distributed uses it only for its set-up, with small host arrays and objects; its libraries then communicate by
their own NCCL or NVSHMEM::

    group = hc.init_process_group(device_id="auto")
    nvmath.distributed.initialize(group.device_id, hpccomm.nvmath.ProcessGroup(group), backends=["nccl"])
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from nvmath.distributed import process_group

from .api.world import member_of
from .core import group as core_group
from .core.reduce_op import ReduceOp

T = TypeVar("T")
Op = process_group.ReductionOp
OPS = {Op.SUM: ReduceOp.SUM, Op.MIN: ReduceOp.MIN, Op.MAX: ReduceOp.MAX}


class ProcessGroup(process_group.ProcessGroup):
    """A group of hpccomm with the methods that nvmath.distributed (1.0) calls.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.
    """

    def __init__(self, group: core_group.ProcessGroup | None = None) -> None:
        self.group = member_of("hpccomm.nvmath.ProcessGroup", group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank

    @property
    def nranks(self) -> int:
        """The number of ranks."""
        return self.group.size

    def broadcast_buffer(self, array: np.ndarray, *, root: int = 0) -> None:
        """Copy `array` of rank `root` to every rank."""
        self.group.broadcast(array, root)

    def allreduce_buffer(self, array: np.ndarray, *, op: process_group.ReductionOp) -> None:
        """Reduce `array` over all ranks, in place."""
        self.group.all_reduce(array, OPS[op])

    def allreduce_object(self, obj: T, *, op: Callable[[T, T], T]) -> T:
        """Return the reduction of every rank's `obj`, in rank order, on every rank."""
        objects: list[T] = [obj] * self.group.size
        self.group.all_gather_object(objects, obj)
        return functools.reduce(op, objects)
