"""Bootstrap of NCCL over MPI: the ranks of a group agree on their GPUs, and connect one communicator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from ..cuda.choice import VisibleGPUs, choose, visible_gpus
from ..cuda.seam import NCCL, Communicator, Runtime, on_device
from ..cuda.time_limit import TimeLimit
from ..errors import DistBackendError, DistError, DistTimeoutError, on_rank
from ..job.tags import NOT_CONNECTED

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..core.options import BackendOptions
    from .connection import Connection

C = TypeVar("C", bound="Communicator | Connection")
T = TypeVar("T", bound="Communicator | Connection | None")

SHARING = 23000  # the first version of NCCL that lets ranks share a GPU
# Environment variables: the value that hpccomm refuses, and the error message.
REFUSED = {
    "NCCL_COMM_BLOCKING": ("0", "NCCL_COMM_BLOCKING=0 is set, and hpccomm chooses itself what blocks; unset it"),
    "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": (
        "1",
        "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1 is set, and that stream is another one in NCCL's own threads; unset it",
    ),
}
MAY_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
HOST_ID = "NCCL_HOSTID"  # NCCL's identity of a host: ranks of the same host may not share a GPU (src/init.cc)


def connect(
    nccl: NCCL,
    runtime: Runtime,
    options: BackendOptions,
    device: int | None,
    time_limit: TimeLimit | None,
    use: Callable[[Communicator, int, TimeLimit | None], C],
) -> C:
    """Connect a group's ranks, each on its GPU: `device`, or a chosen one if that is None.

    Return the result of `use(communicator, device, time_limit)`, which has a method `abort`. If ranks share a GPU and
    ``HPCCOMM_INTRA_NODE=host`` can work without NCCL, the communicator is `Unavailable`.
    DistBackendError on every rank, if one has no GPU, two have the same, NCCL can't connect one, or `use` fails.
    """
    comm: Any = options.comm
    rank, ranks = options.rank, options.ranks
    visible = visible_gpus(runtime, device)
    for name, (value, why) in REFUSED.items():
        if os.environ.get(name) == value:
            visible = VisibleGPUs(error=why)
    visible_to, may_share = zip(*comm.allgather((visible, _may_share(nccl))))
    devices = choose(visible_to, ranks)
    device = devices[rank]
    shared = None if all(may_share) else _shared_gpus(visible_to, devices, ranks)
    if shared is not None:
        if options.settings.intra_node != "host":
            raise DistBackendError(shared)
        return use(cast("Communicator", Unavailable(shared)), device, time_limit)
    # One broadcast carries (error, id), so no rank waits for an id that never comes.
    error, unique_id = comm.bcast(tried(nccl, nccl.unique_id) if rank == 0 else None)
    if error is not None:
        raise DistBackendError(f"NCCL on rank {ranks[0]} can't make a unique id: {error}{on_rank()}")
    if options.device_id is not None:  # first: `on_device` returns to the previous GPU, and would make a context there
        runtime.use_device(device)
    with on_device(runtime, device):
        make = partial(nccl.connect, len(ranks), unique_id, rank, time_limit)
        return all_or_none(nccl, comm, ranks, lambda: used(make(), device, time_limit, use), time_limit)


def used(
    made: Communicator,
    device: int,
    time_limit: TimeLimit | None,
    use: Callable[[Communicator, int, TimeLimit | None], C],
) -> C:
    """Return `use(made, device, time_limit)`; abort the communicator if that raises."""
    try:
        return use(made, device, time_limit)
    except BaseException:
        made.abort()
        raise


def all_or_none(
    nccl: NCCL,
    comm: MPI.Intracomm,
    ranks: Sequence[int],
    make: Callable[[], T],
    time_limit: TimeLimit | None,
) -> T:
    """Return the result of `make`; raise on every rank of `comm` if it raises on one, and abort it on the others.

    With a time limit no rank waits in NCCL's bootstrap for a rank that has failed there.
    """
    made: T | None = None
    failed: tuple[type[DistError], str] | None = None
    tells: list[MPI.Request] = []
    if time_limit is not None:
        time_limit.failure = lambda: OtherRankError("") if comm.Iprobe(tag=NOT_CONNECTED) else None
    try:
        made = make()
    except (DistTimeoutError, OtherRankError) as error:
        failed = type(error), str(error)
    except Exception as error:  # any error: the other ranks must learn of it
        failed = DistBackendError, f"NCCL reports {nccl.explain(error) or repr(error)}{on_rank()}"
    if time_limit is not None and failed is not None and failed[0] is not OtherRankError:
        tells = [comm.isend(None, rank, NOT_CONNECTED) for rank in range(comm.size) if rank != comm.rank]
    everybody = [(rank, *each) for rank, each in zip(ranks, comm.allgather(failed), strict=True) if each is not None]
    firsts = [each for each in everybody if each[1] is not OtherRankError]
    if time_limit is not None:
        for rank, *_ in firsts:
            if rank != ranks[comm.rank]:
                comm.recv(source=ranks.index(rank), tag=NOT_CONNECTED)
        for each in tells:
            each.wait()
    if firsts:
        if made is not None:
            made.abort()
        rank, kind, text = min(firsts, key=lambda each: each[1] is DistTimeoutError)  # a timeout may be a consequence
        raise kind(f"rank {rank} could not be connected: {text}")
    return made  # type: ignore[return-value]


class OtherRankError(DistError):
    """Another rank has failed, and has notified this one."""


def tried(nccl: NCCL, function: Callable[..., Any], *arguments: Any) -> tuple[str | None, Any]:
    """Return (None, result) or (error, None); other ranks wait for this one, and must learn of the error."""
    try:
        return None, function(*arguments)
    except Exception as error:
        return nccl.explain(error) or repr(error), None


def _may_share(nccl: NCCL) -> bool:
    _, version = tried(nccl, nccl.version)  # NCCL's first use will raise the error
    return HOST_ID in os.environ or ((version or 0) >= SHARING and os.environ.get(MAY_SHARE) == "1")


def _shared_gpus(visible: Sequence[VisibleGPUs], devices: Sequence[int], ranks: Sequence[int]) -> str | None:
    """Return the error text for ranks that share a GPU; None if there are none."""
    ranks_of: dict[str, list[int]] = {}
    for rank, gpus, device in zip(ranks, visible, devices, strict=True):
        ranks_of.setdefault(gpus.gpus[device - gpus.first], []).append(rank)
    shared = [together for together in ranks_of.values() if len(together) > 1]
    if not shared:
        return None
    # NCCL issue 1716: no two instances of one GPU.
    mig = (
        " CUDA shows a process one MIG instance, the first that CUDA_VISIBLE_DEVICES names; srun --gpus-per-task=1 "
        "gives each rank its own. NCCL does not work between instances of one GPU, 'cuda:mpi' does."
    )
    return (
        f"ranks {'; '.join(', '.join(map(str, together)) for together in shared)} have the same GPU. Give each "
        f"rank one of its own: init_process_group(device_id='auto'), or a number, before it makes arrays."
        f"{mig if any(gpus.mig_instances for gpus in visible) else ''} To share "
        f"one on purpose: {MAY_SHARE}=1 with NCCL 2.30 or newer, or 'cuda:mpi'{on_rank()}"
    )


class Unavailable:
    """The communicator of ranks that share a GPU, with which only ``HPCCOMM_INTRA_NODE=host`` works."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, operation: str) -> NoReturn:
        raise DistBackendError(
            f"{operation} needs NCCL; HPCCOMM_INTRA_NODE=host has only all_reduce (SUM) of small arrays. {self._reason}"
        )

    def split(self, color: int, key: int, time_limit: TimeLimit | None) -> Unavailable | None:
        """Return this object: the new group can't use NCCL either."""
        return None if color < 0 else self

    def _do_nothing(self) -> None:
        """Do nothing: there is no communicator."""

    async_error = abort = destroy = _do_nothing
