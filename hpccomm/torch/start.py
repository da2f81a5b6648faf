"""How a torch.distributed job begins on hpccomm: rank, size and a store by MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch.distributed

from ..errors import DistError, here

if TYPE_CHECKING:
    from .backend import HPCCommBackend

NAME, METHOD = "hpccomm", "mpi"
dist: Any = torch.distributed


def init_process_group(backend: str | None = NAME, **options: Any) -> None:
    """Call ``torch.distributed.init_process_group`` with rank, size and store from MPI."""
    register()
    set_environment()
    dist.init_process_group(backend, init_method=f"{METHOD}://", **options)


def set_environment() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which libraries read, as MPI has them."""
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = {
        "RANK": MPI.COMM_WORLD.Get_rank(),
        "WORLD_SIZE": MPI.COMM_WORLD.Get_size(),
        "LOCAL_RANK": node.Get_rank(),
        "LOCAL_WORLD_SIZE": node.Get_size(),
    }
    node.Free()
    os.environ |= {name: str(value) for name, value in found.items()}


def register() -> None:
    """Make the backend and the rendezvous known to torch; also its entry point ``torch.distributed.backends``."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler(METHOD, rendezvous)


def rendezvous(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield (store, rank, size): rank 0 listens, and tells the others where over MPI."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    host, store = socket.gethostname(), None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = comm.bcast((host, store.port) if store is not None else None)
    if store is None:
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, rank, size


def create(options: Any, _: Any) -> HPCCommBackend:
    """Make the backend of one group of torch's; its members call it."""
    from mpi4py import MPI

    from ..core.group import ProcessGroup
    from .backend import HPCCommBackend

    world = MPI.COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if len(ranks) > world.Get_size() or ranks[options.group_rank] != world.Get_rank():
        raise DistError(
            f"torch.distributed says that this is rank {options.group_rank} of {options.group_size}, MPI says that it "
            f"is rank {world.Get_rank()} of {world.Get_size()}; start with mpiexec or srun, not torchrun, and with "
            f"init_method='mpi://' or hpccomm.torch.init_process_group(){here()}"
        )
    tag = crc32(options.group_id.encode()) % 32768
    comm = world.Create_group(world.Get_group().Incl(ranks), tag)
    group = ProcessGroup.on(comm, timeout=options.timeout, name=options.group_id)
    comm.Free()
    return HPCCommBackend(group)
