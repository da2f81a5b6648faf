"""How the ranks of a group find together in one NCCL communicator: over MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from ..cuda.choice import Sight, choose, look
from ..cuda.patience import Patience
from ..cuda.seam import NCCL, Communicator, Runtime, on_device
from ..errors import DistBackendError, DistError, DistTimeoutError, here

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T", bound="Communicator | None")

SHARING = 23000  # the first version of NCCL that lets ranks share a GPU
MAY_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


def connect(
    nccl: NCCL,
    runtime: Runtime,
    comm: MPI.Intracomm,
    ranks: Sequence[int],
    device: int | None,
    becomes_current: bool = False,
    may_do_without: bool = False,
    patience: Patience | None = None,
) -> tuple[Communicator, int]:
    """Make the communicator of the ranks of `comm`, whose global ranks are `ranks`; return it and this rank's GPU.

    `device` is that GPU if it has been decided; otherwise the ranks that have None take turns.

    Raises
    ------
    DistBackendError
        On every rank: two ranks have the same GPU, or one of them finds no GPU, or NCCL gives no unique id or does not
        connect one.
    """
    sight = look(runtime, device)
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        sight = Sight(error="NCCL_COMM_BLOCKING=0 is set, and hpccomm chooses itself what blocks; unset it")
    sights: list[tuple[Sight, bool]] = comm.allgather((sight, _may_share(nccl)))
    seen = [sight for sight, _ in sights]
    devices = choose(seen, ranks)
    device = devices[comm.Get_rank()]
    shared = _check_gpus(seen, devices, ranks, all(may_share for _, may_share in sights))
    if shared is not None:
        if not may_do_without:
            raise DistBackendError(shared)
        return cast("Communicator", Unavailable(shared)), device
    # One broadcast carries (what went wrong, the id), so that nobody waits for an id that never comes.
    error, unique_id = comm.bcast(_unique_id(nccl) if comm.Get_rank() == 0 else None)
    if error is not None:
        raise DistBackendError(f"NCCL on rank {ranks[0]} can't make a unique id: {error}{here()}")
    if becomes_current:  # before NCCL is called: going back from there would make a context on the GPU of before
        runtime.use_device(device)
    with on_device(runtime, device):
        made = agreed(nccl, comm, ranks, lambda: nccl.connect(comm.Get_size(), unique_id, comm.Get_rank(), patience))
    return made, device


def agreed(nccl: NCCL, comm: MPI.Intracomm, ranks: Sequence[int], make: Callable[[], T]) -> T:
    """Return the outcome of `make`; raise on every rank of `comm` if it raises on one."""
    made: T | None = None
    error: tuple[type[DistError], str] | None = None
    try:
        made = make()
    except DistTimeoutError as raised:
        error = DistTimeoutError, str(raised)
    except Exception as raised:  # the others have to learn of whatever it is
        error = DistBackendError, f"NCCL reports {nccl.explain(raised) or repr(raised)}{here()}"
    errors = [(rank, *told) for rank, told in zip(ranks, comm.allgather(error), strict=True) if told is not None]
    if errors:
        if made is not None:
            made.abort()
        rank, kind, text = min(errors, key=lambda each: each[1] is DistTimeoutError)  # those may come of the others
        raise kind(f"rank {rank} could not be connected: {text}")
    return made  # type: ignore[return-value]


def _unique_id(nccl: NCCL) -> tuple[str | None, Any]:
    try:
        return None, nccl.unique_id()
    except Exception as error:  # the others have to learn of whatever it is
        return nccl.explain(error) or repr(error), None


def _may_share(nccl: NCCL) -> bool:
    try:
        return nccl.version() >= SHARING and os.environ.get(MAY_SHARE) == "1"
    except Exception:  # what is wrong with NCCL shows when it is used; the others must not wait for this rank
        return False


def _check_gpus(sights: Sequence[Sight], devices: Sequence[int], ranks: Sequence[int], may_share: bool) -> str | None:
    """Return the error text if ranks have the same GPU without permission, else None."""
    ranks_of: dict[str, list[int]] = {}
    for rank, sight, device in zip(ranks, sights, devices, strict=True):
        ranks_of.setdefault(sight.gpus[device - sight.first], []).append(rank)
    shared = [together for together in ranks_of.values() if len(together) > 1]
    if not shared or may_share:
        return None
    # NCCL issue 1716: no two instances of one GPU.
    mig = (
        " CUDA shows a process one MIG instance, the first that CUDA_VISIBLE_DEVICES names; srun --gpus-per-task=1 "
        "gives each rank its own. NCCL does not work between instances of one GPU, 'cuda:mpi' does."
    )
    return (
        f"ranks {'; '.join(', '.join(map(str, together)) for together in shared)} have the same GPU. Give each "
        f"rank one of its own: init_process_group(device_id='auto'), or a number, before it makes arrays."
        f"{mig if any(sight.mig_instances for sight in sights) else ''} To share "
        f"one on purpose: {MAY_SHARE}=1 with NCCL 2.30 or newer, or 'cuda:mpi'{here()}"
    )


class Unavailable:
    """Stands for NCCL's communicator where ranks share a GPU and only ``HPCCOMM_INTRA_NODE=host`` can be used."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, operation: str) -> NoReturn:
        raise DistBackendError(
            f"{operation} needs NCCL; HPCCOMM_INTRA_NODE=host has only all_reduce (SUM) of small arrays. {self._reason}"
        )

    def split(self, color: int, key: int, patience: Patience | None) -> Unavailable | None:
        """Return itself: the new group can't use NCCL either."""
        return None if color < 0 else self

    def async_error(self) -> None:
        """Return None."""

    def abort(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""
