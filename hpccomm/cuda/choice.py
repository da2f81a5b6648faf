"""Which GPU each rank takes where the program leaves that to hpccomm (``device_id="auto"``, or no array to go by).

By identity, not by number: each rank says which GPUs it sees, and takes one that the fewest have taken. Local ranks are
wrong where ``--gpu-bind`` or containers show ranks different GPUs. An array that is there already says more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import DistBackendError, here
from .seam import Runtime


class Sight(NamedTuple):
    """The GPUs that a rank may take: their identities in CUDA's order, from number `first` on."""

    gpus: tuple[str, ...] = ()
    first: int = 0
    mig_instances: int = 0  # that CUDA_VISIBLE_DEVICES names
    error: str | None = None


def look(runtime: Runtime, number: int | None, environ: Mapping[str, str] = os.environ) -> Sight:
    """Return the GPUs that this rank sees: all that CUDA shows, or only the one of this number; never raises."""
    instances = mig_instances(environ)
    try:
        if number is not None:
            return Sight((runtime.identity(number),), number, instances)
        count = runtime.device_count()
        if count == 0:
            variable = environ.get("CUDA_VISIBLE_DEVICES")
            because = "" if variable is None else f" (CUDA_VISIBLE_DEVICES is {variable!r})"
            raise DistBackendError(f"CUDA shows no GPU{because}")
        return Sight(tuple(runtime.identity(each) for each in range(count)), 0, instances)
    except Exception as error:  # the other ranks have to learn of whatever it is
        return Sight(error=runtime.explain(error) or str(error))


def choose(sights: Sequence[Sight], ranks: Sequence[int]) -> list[int]:
    """Return the number of each rank's GPU, given what all see; `ranks` are their names. Every rank computes the same.

    DistBackendError if a rank has none.
    """
    for rank, sight in zip(ranks, sights, strict=True):
        if sight.error is not None:
            raise DistBackendError(f"rank {rank} has no usable GPU: {sight.error}{here()}")
    return [sight.first + index for sight, index in zip(sights, take_turns([s.gpus for s in sights]), strict=True)]


def take_turns(visible: Sequence[Sequence[str]]) -> list[int]:
    """Return for each rank the index, in what it sees, of the GPU that it takes.

    Each takes the GPU that the fewest have taken before; those that see the fewest come first, then by rank. On a node
    where all ranks see all GPUs that is the local rank modulo their number. It is not where they see different ones,
    and there the local rank would be wrong:

    * ``srun --gpus-per-task=1`` (which implies ``--gpu-bind=per_task:1``) and ``--gpu-bind=single:N``, ``map:`` show
      each task its own GPU. With cgroups (ConstrainDevices) CUDA_VISIBLE_DEVICES is then 0 in every task, without them
      the GPU's number (Slurm's "GRES" page); CUDA numbers the GPUs of that list from 0 (CUDA programming guide,
      "CUDA_VISIBLE_DEVICES"), be they numbers, ``GPU-`` UUIDs or ``MIG-`` instances. So it is 0 for every rank.
    * ``--gpu-bind=closest`` shows each task the GPUs of its socket, and Slurm deals tasks to sockets in turn (``-m
      block:cyclic``): ranks 0 and 2 see one half, 1 and 3 the other. By their local ranks 0 and 2 would both take the
      first of theirs.
    * Containers that share a machine but no memory are several nodes for MPI: all would begin with the first GPU.
    * Of several MIG instances CUDA shows a process the first only (MIG user guide, "CUDA Device Enumeration"): index 0.

    So GPUs are told apart by their identity, which is unique among all machines, and not by number. More ranks than
    GPUs share them evenly.
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
