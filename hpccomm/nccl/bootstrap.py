"""How the ranks of a group find together in one NCCL communicator: over MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from ..cuda.seam import NCCL, Communicator, Runtime, on_device
from ..errors import DistBackendError, here

if TYPE_CHECKING:
    from mpi4py import MPI

SHARING = 23000  # the first version of NCCL that lets ranks share a GPU
MAY_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


def connect(
    nccl: NCCL,
    runtime: Runtime,
    comm: MPI.Intracomm,
    ranks: Sequence[int],
    choose_device: Callable[[], int],
    may_do_without: bool = False,
) -> tuple[Communicator, int]:
    """Make the communicator of the ranks of `comm`, whose global ranks are `ranks`; return it and this rank's GPU.

    Raises
    ------
    DistBackendError
        On every rank: two ranks have the same GPU, or one of them finds no GPU, or NCCL gives no unique id.
    """
    mine = _gpu(nccl, runtime, choose_device)
    device = mine.number
    shared = _check_gpus(comm.allgather(mine), ranks)
    if shared is not None:
        if not may_do_without:
            raise DistBackendError(shared)
        return cast("Communicator", Unavailable(shared)), device
    # One broadcast carries (what went wrong, the id), so that nobody waits for an id that never comes.
    error, unique_id = comm.bcast(_unique_id(nccl) if comm.Get_rank() == 0 else None)
    if error is not None:
        raise DistBackendError(f"NCCL on rank {ranks[0]} can't make a unique id: {error}{here()}")
    comm.Barrier()
    with on_device(runtime, device):
        return nccl.connect(comm.Get_size(), unique_id, comm.Get_rank()), device


class _GPU(NamedTuple):
    """What a rank says about its GPU."""

    number: int = -1
    identity: str = ""
    may_be_shared: bool = False
    error: str | None = None


def _unique_id(nccl: NCCL) -> tuple[str | None, Any]:
    try:
        return None, nccl.unique_id()
    except Exception as error:  # the others have to learn of whatever it is
        return nccl.explain(error) or repr(error), None


def _gpu(nccl: NCCL, runtime: Runtime, choose_device: Callable[[], int]) -> _GPU:
    try:
        device = choose_device()
        may_be_shared = nccl.version() >= SHARING and os.environ.get(MAY_SHARE) == "1"
        return _GPU(device, runtime.identity(device), may_be_shared)
    except Exception as error:  # the others have to learn of whatever it is
        return _GPU(error=runtime.explain(error) or str(error))


def _check_gpus(gpus: list[_GPU], ranks: Sequence[int]) -> str | None:
    """Raise if a rank has no GPU; return the error text if ranks share one without permission, else None."""
    ranks_of: dict[str, list[int]] = {}
    for rank, gpu in zip(ranks, gpus, strict=True):
        if gpu.error is not None:
            raise DistBackendError(f"rank {rank} has no usable GPU: {gpu.error}{here()}")
        ranks_of.setdefault(gpu.identity, []).append(rank)
    shared = [together for together in ranks_of.values() if len(together) > 1]
    if shared and not all(gpu.may_be_shared for gpu in gpus):
        return (
            f"ranks {'; '.join(', '.join(map(str, together)) for together in shared)} have the same GPU. Give each "
            f"rank one of its own: init_process_group(device_id='auto'), or a number, before it makes arrays. To share "
            f"one on purpose: {MAY_SHARE}=1 with NCCL 2.30 or newer, or 'cuda:mpi'{here()}"
        )
    return None


class Unavailable:
    """Stands for NCCL's communicator where ranks share a GPU and only ``HPCCOMM_INTRA_NODE=host`` can be used."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, operation: str) -> NoReturn:
        raise DistBackendError(
            f"{operation} needs NCCL; HPCCOMM_INTRA_NODE=host has only all_reduce (SUM) of small arrays. {self._reason}"
        )

    def split(self, color: int, key: int) -> Unavailable | None:
        """Return itself: the new group can't use NCCL either."""
        return None if color < 0 else self

    def async_error(self) -> None:
        """Return None."""

    def abort(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""
