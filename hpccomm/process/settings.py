"""Settings: what the environment variables HPCCOMM_* say, read once and the same on every rank.

Ranks that decide differently do not match, and launchers do not hand every variable to every node (Open MPI's does
not). So rank 0's variables are everybody's; what depends on a rank's own machine is true only if it is on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .tuning import Tuning, tuning

INTRA_NODE_MODES = ("0", "1", "host")


@dataclass(frozen=True)
class Settings:
    """The settings of a job.

    Attributes
    ----------
    tuning : Tuning
        ``HPCCOMM_TUNING``, ``HPCCOMM_SEGMENT_BYTES``: from which sizes on an operation is done in which way.
    cuda_aware : bool
        Whether MPI gets pointers to GPU memory: ``HPCCOMM_CUDA_AWARE`` (0 or 1), or what MPI says of itself on all
        ranks.
    intra_node : str
        ``HPCCOMM_INTRA_NODE``: all_reduce of small GPU arrays by CUDA IPC: ``"0"`` (off), ``"1"``, ``"host"``.
    blocking_wait : bool
        ``HPCCOMM_BLOCKING_WAIT=1``: `Work.wait` of GPU operations blocks the host.
    """

    tuning: Tuning = field(default_factory=Tuning)
    cuda_aware: bool = False
    intra_node: str = "0"
    blocking_wait: bool = False


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return what the environment of this process says; ValueError names the variable that makes no sense."""
    return Settings(
        tuning=tuning(environ),
        cuda_aware=_one_of(environ, "HPCCOMM_CUDA_AWARE", ("0", "1")) == "1",
        intra_node=_one_of(environ, "HPCCOMM_INTRA_NODE", INTRA_NODE_MODES),
        blocking_wait=_one_of(environ, "HPCCOMM_BLOCKING_WAIT", ("0", "1")) == "1",
    )


def agreed(comm: Any, is_cuda_aware: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of the ranks of an MPI communicator; every rank calls it.

    They are those of rank 0, or rank 0's error, raised on every rank. Where ``HPCCOMM_CUDA_AWARE`` is not set there,
    `is_cuda_aware` is asked on every rank.
    """
    found: Settings | Exception | None = None
    if comm.Get_rank() == 0:
        try:
            found = read(environ)
        except Exception as error:  # whatever it is, the others are waiting
            found = error
    agreed_on, asks = comm.bcast((found, not environ.get("HPCCOMM_CUDA_AWARE", "").strip()))
    if isinstance(agreed_on, Exception):
        raise agreed_on
    settings: Settings = agreed_on
    if asks:
        settings = replace(settings, cuda_aware=all(comm.allgather(is_cuda_aware())))
    return settings


def _one_of(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    said = environ.get(name, "").strip() or values[0]
    if said not in values:
        raise ValueError(f"{name} is {said!r}; expected {', '.join(values[:-1])} or {values[-1]}")
    return said
