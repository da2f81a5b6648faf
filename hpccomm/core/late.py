"""The core's late imports: transports and CUDA, as text, all in this one table."""

from __future__ import annotations

import importlib
from typing import Any

MPI = "hpccomm.mpi.create:create"
MPI_IN_RANK_ORDER = "hpccomm.mpi.create:create_ordered"
OBJECT_TRANSPORT = "hpccomm.mpi.objects:create"
NCCL = "hpccomm.nccl.backend:create"
NCCL_NEEDS = "hpccomm.cuda.seam:nccl"
GLOO = "hpccomm.gloo.backend:create"
GLOO_NEEDS = "hpccomm.gloo:needs"
GPU_RUNTIME = "hpccomm.cuda.seam:runtime"
SPARSE_SUMS_ON_GPUS = "hpccomm.cuda.sparse:all_reduce"


def late(name: str) -> Any:
    """Return the attribute of ``"module:attribute"``; the module is imported now.

    >>> late("math:floor")(2.5)
    2
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
