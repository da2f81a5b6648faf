"""Choose a GPU for each rank if the program does not: ``device_id="auto"``, or no array to infer it from."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import DistBackendError, on_rank
from .seam import Runtime


class VisibleGPUs(NamedTuple):
    """The identities of the GPUs that CUDA shows a rank, the first of which is GPU `first`; or CUDA's error."""

    gpus: tuple[str, ...] = ()
    first: int = 0
    mig_instances: int = 0  # in CUDA_VISIBLE_DEVICES
    error: str | None = None


def visible_gpus(runtime: Runtime, device: int | None, environ: Mapping[str, str] = os.environ) -> VisibleGPUs:
    """Return the GPUs that CUDA shows this rank, or only GPU `device`; never raise."""
    instances = mig_instances(environ)
    try:
        if device is not None:
            return VisibleGPUs((runtime.identity(device),), device, instances)
        count = runtime.device_count()
        if count == 0:
            variable = environ.get("CUDA_VISIBLE_DEVICES")
            because = "" if variable is None else f" (CUDA_VISIBLE_DEVICES is {variable!r})"
            raise DistBackendError(f"CUDA shows no GPU{because}")
        return VisibleGPUs(tuple(runtime.identity(each) for each in range(count)), 0, instances)
    except Exception as error:  # any error: the other ranks must learn of it
        return VisibleGPUs(error=runtime.explain(error) or str(error))


def choose(visible: Sequence[VisibleGPUs], ranks: Sequence[int]) -> list[int]:
    """Return each rank's GPU number, the same list on every rank; DistBackendError names a rank without a GPU."""
    for rank, gpus in zip(ranks, visible, strict=True):
        if gpus.error is not None:
            raise DistBackendError(f"rank {rank} has no usable GPU: {gpus.error}{on_rank()}")
    return [each.first + index for each, index in zip(visible, take_turns([each.gpus for each in visible]))]


def take_turns(visible: Sequence[Sequence[str]]) -> list[int]:
    """Return the index of each rank's GPU among those visible to it.

    Each rank takes the GPU with the fewest ranks so far; ranks with fewer visible GPUs choose first, then lower ranks.
    If all ranks of a node see all its GPUs, the result is the local rank modulo the number of GPUs. If they see
    different GPUs, the local rank would be wrong:

    * ``srun --gpus-per-task=1`` and ``--gpu-bind=single:N``, ``map:`` show each task its own GPU, and CUDA numbers the
      visible GPUs from 0 (CUDA programming guide, "CUDA_VISIBLE_DEVICES"): index 0 for every rank.
    * ``--gpu-bind=closest`` shows each task the GPUs of its socket, and Slurm deals tasks to sockets in turn (``-m
      block:cyclic``): local ranks 0 and 2 would both take the first GPU of the same socket.
    * Containers that share a machine but no memory are several nodes for MPI: all would start with the first GPU.
    * CUDA shows a process only the first of several MIG instances (MIG user guide, "CUDA Device Enumeration"): index 0.

    So GPUs are compared by an identity that is unique among all machines. If ranks outnumber GPUs, they share evenly.
    """
    taken: Counter[str] = Counter()
    indices = [0] * len(visible)
    for rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):
        index = min(range(len(visible[rank])), key=lambda index: taken[visible[rank][index]])
        taken[visible[rank][index]] += 1
        indices[rank] = index
    return indices


def mig_instances(environ: Mapping[str, str]) -> int:
    """Return the number of MIG instances in CUDA_VISIBLE_DEVICES (``MIG-UUID``; before R470 ``MIG-GPU-UUID/1/0``)."""
    return sum(name.strip().startswith("MIG-") for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
