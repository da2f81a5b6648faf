"""Start a torch.distributed job on hpccomm, with rank, size and store from MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch.distributed

from ..api import world
from ..core.group import ProcessGroup
from ..job import mpi_library
from ..process import alone
from ..store.master import address_for

if TYPE_CHECKING:
    from .backend import HPCCommBackend, HPCCommProcessGroup

NAME, METHOD = "hpccomm", "mpi"
TAGS = 32768  # the number of tags in every MPI
THREAD_BYTES = 1 << 10  # from here on operations use the communication thread: DDP's wait in C++ does not drive MPI
dist: Any = torch.distributed


def init_process_group(backend: str | None = NAME, **options: Any) -> None:
    """Call ``torch.distributed.init_process_group`` with rank, size and store from MPI.

    A script under mpiexec or srun needs only this call. It calls :func:`set_environment` first.

    Parameters
    ----------
    backend : str, optional
        As for torch: ``"hpccomm"``, ``"cpu:hpccomm,cuda:nccl"``, ``"gloo"``.
    **options
        Further arguments of ``torch.distributed.init_process_group``: ``timeout``, ``device_id``.

    Raises
    ------
    DistError
        Each process is alone, because torchrun or another MPI's launcher has started it.
    ValueError
        RANK or WORLD_SIZE in the environment differs from MPI's (on every rank).

    Examples
    --------
    >>> import hpccomm.torch, torch.distributed as dist  # doctest: +SKIP
    >>> hpccomm.torch.init_process_group()  # doctest: +SKIP
    >>> dist.get_backend()  # doctest: +SKIP
    'hpccomm'
    """
    register()
    set_environment()
    dist.init_process_group(backend, init_method=f"{METHOD}://", **options)


def set_environment() -> None:
    """Set torchrun's environment variables from MPI.

    It sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. If MASTER_ADDR is not set, it also sets MASTER_ADDR and
    MASTER_PORT to a currently free port of rank 0's host, for libraries that call ``init_process_group`` with
    ``env://``. Every rank of the MPI job calls it.

    Raises
    ------
    DistError
        Each process is alone, because torchrun or another MPI's launcher has started it.
    ValueError
        RANK or WORLD_SIZE is set already and differs from MPI's (on every rank).

    Examples
    --------
    >>> import os, hpccomm.torch  # doctest: +SKIP
    >>> hpccomm.torch.set_environment()  # doctest: +SKIP
    >>> os.environ["RANK"], os.environ["WORLD_SIZE"]  # doctest: +SKIP
    ('0', '1')
    """
    comm, environ = comm_world(), os.environ
    texts = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if name in environ}
    agree(comm, **{name: int(text) if text.isdigit() else text for name, text in texts.items()})
    node = comm.Split_type(mpi_library.load().COMM_TYPE_SHARED)
    found = {
        "RANK": comm.Get_rank(),
        "WORLD_SIZE": comm.Get_size(),
        "LOCAL_RANK": node.Get_rank(),
        "LOCAL_WORLD_SIZE": node.Get_size(),
    }
    node.Free()
    host, port = comm.bcast((address(comm), free_port()))
    if comm.bcast("MASTER_ADDR" not in environ):
        found |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    environ |= {name: str(value) for name, value in found.items()}


def devices() -> list[str]:
    """Return the device types of groups; without a GPU, torch's libraries must not choose "cuda"."""
    return ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]


def register() -> None:
    """Register the backend and the rendezvous with torch. Torch's entry point ``torch.distributed.backends`` calls it.

    Only programs that call ``torch.distributed.init_process_group(init_method="mpi://")`` themselves need to call it.
    For the backend's name alone, torch uses the entry point.

    Examples
    --------
    >>> import hpccomm.torch, torch.distributed as dist  # doctest: +SKIP
    >>> hpccomm.torch.register()  # doctest: +SKIP
    >>> dist.init_process_group("hpccomm", init_method="mpi://")  # doctest: +SKIP
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices())
        dist.register_rendezvous_handler(METHOD, rendezvous)


def rendezvous(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield (store, rank, size); MPI broadcasts the address of rank 0's store."""
    comm = comm_world()
    rank, size = comm.Get_rank(), comm.Get_size()
    host, store = address(comm), None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = comm.bcast((host, store.port) if store is not None else None)
    if store is None:
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, rank, size


def comm_world() -> Any:
    """Return the world's communicator, or else MPI_COMM_WORLD; raise DistError if each process is alone in it."""
    if world.is_initialized():
        return world.current_world().comm
    mpi = mpi_library.load()
    alone.check(mpi)
    return mpi.COMM_WORLD


def address(comm: Any) -> str:
    """Return the address at which other ranks reach this host; every rank calls it."""
    elsewhere = [host for host in comm.allgather(socket.gethostname()) if host != socket.gethostname()]
    return address_for(elsewhere[0] if elsewhere else None)


def free_port() -> int:
    """Return a port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def agree(comm: Any, **said: Any) -> None:
    """Raise ValueError on every rank of `comm` if RANK or WORLD_SIZE differs from MPI's on one rank."""
    actual = {"RANK": comm.Get_rank(), "WORLD_SIZE": comm.Get_size()}
    wrong = [f"{name} is {value}, MPI says {actual[name]}" for name, value in said.items() if value != actual[name]]
    for rank, lines in enumerate(comm.allgather(wrong)):
        if lines:
            raise ValueError(
                f"torch.distributed: on rank {rank} of MPI {'; '.join(lines)}. Let MPI number the ranks: "
                f"hpccomm.torch.init_process_group(), or init_method='mpi://', with RANK and WORLD_SIZE unset"
            )


def create(options: Any, _: Any) -> HPCCommBackend | HPCCommProcessGroup:
    """Make an hpccomm group for a new torch group; return it as a torch group, or as the backend of some devices."""
    from .backend import HPCCommBackend, HPCCommProcessGroup

    group = with_thread(group_of(options))
    theirs = options.process_group  # with one backend for each device; "custom" if hpccomm is the only backend
    if theirs.name() != "custom" or theirs._device_types:
        return HPCCommBackend(group)
    return HPCCommProcessGroup(options.store, group)


def with_thread(group: ProcessGroup) -> ProcessGroup:
    """Let a thread do small operations of a new group, too."""
    group.tuning = group.tuning._replace(thread_bytes=min(group.tuning.thread_bytes, THREAD_BYTES))
    return group


def group_of(options: Any) -> ProcessGroup:
    """Return an hpccomm group with the ranks of a new torch group; its members call it."""
    comm = comm_world()
    if options.global_ranks_in_group:
        rank = options.global_ranks_in_group[options.group_rank]
        if rank != comm.Get_rank():  # torch's ranks would be taken for MPI's
            raise ValueError(
                f"torch.distributed: rank {rank} is rank {comm.Get_rank()} of MPI. Let MPI number the ranks, also of "
                "another backend: hpccomm.torch.init_process_group('gloo')"
            )
        return subgroup(comm, options.global_ranks_in_group, options.group_id, options.timeout)
    agree(comm, RANK=options.group_rank, WORLD_SIZE=options.group_size)
    if world.is_initialized():  # the program initialized it
        return subgroup(comm, range(options.group_size), NAME, options.timeout)
    return world.init_process_group(timeout=options.timeout)


def subgroup(comm: Any, ranks: Sequence[int], name: str, timeout: timedelta) -> ProcessGroup:
    """Return a group of some ranks of a communicator; only these ranks call it."""
    members = list(ranks)
    tag = crc32(repr(members).encode()) % TAGS  # not of the name, which differs if some ranks have made more groups
    part = mpi_library.part_of(comm, members, tag)
    group: ProcessGroup = ProcessGroup.from_comm(part, timeout=timeout, name=name)
    part.Free()
    return group
