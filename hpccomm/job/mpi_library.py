"""The MPI library of this process: load it, and make and free the communicators of groups."""

from __future__ import annotations

import atexit
import functools
import os
from typing import TYPE_CHECKING, Any

from ..errors import DistBackendError
from ..process import forked
from ..process.proc import MAPPED_AT_INIT, take_names_away
from . import failures

if TYPE_CHECKING:
    from mpi4py import MPI

LOOKS = 20  # empty probes after which no message is left
# If so few ranks have met, each has a message from every other, and messages don't overtake each other (MPI-4.1 §3.5).
FEW_LOOKS, FEW_RANKS = 4, 3

ranks_outnumber_cores = False  # on this node, as number_nodes has seen: ranks should sleep while they wait


def prepare() -> None:
    """Set the MPI library's variables before mpi4py.MPI is imported."""
    failures.prepare()
    if not _has_infiniband():
        # Otherwise Open MPI 5.0's osc/ucx finds no device, and prints an error on each rank at its first window.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")


def load() -> Any:
    """Import mpi4py.MPI, which initialises MPI, and return it; DistBackendError with advice if that fails."""
    prepare()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"mpi4py can't load an MPI library: {error}\n"
            "On a cluster: load the site's MPI module (`module load openmpi`, ...) before starting Python, or name the "
            "library with MPI4PY_LIBMPI=/path/to/libmpi.so. On a machine without MPI: pip install 'hpccomm[mpich]' "
            "(or [openmpi]), which carries one."
        ) from None  # the message contains mpi4py's error
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is off: hpccomm initialises MPI and must finalise it
        MPI.Init_thread()
        atexit.register(lambda: None if MPI.Is_finalized() else MPI.Finalize())
    if MPI.Is_finalized():
        raise DistBackendError("MPI has been finalised; a process can't start it again")
    forked.spare_mpi()
    forked.hide_launcher(MPI.COMM_WORLD.Get_rank())
    return MPI


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def is_finalized() -> bool:
    """Return whether the program has finalised MPI."""
    from mpi4py import MPI

    return MPI.Is_finalized()


def membership(comm: Any) -> dict[str, Any]:
    """Return the fields of `Membership` for a new group on a duplicate of `comm`; collective.

    TypeError if `comm` is not an intracommunicator; also the errors of `agreed`.
    """
    from ..process.settings import agreed
    from .tags import LARGEST

    mpi = load()
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise TypeError(f"comm is {comm!r}; expected an mpi4py intracommunicator")
    _take_names_of_init_away()  # before the first wait: another rank may never come
    with failures.translating("making a group", comm):
        # Not comm.Dup: a subclass may override methods, and Dup calls the program's functions that copy attributes.
        comm = private(mpi.Intracomm(comm).Split(0, comm.Get_rank()))
        try:
            failures.keep_spare(comm)
            settings = agreed(comm, _is_cuda_aware)
            nodes, processes = number_nodes(comm)
        except Exception:
            release(comm)
            raise
    rank, size = comm.Get_rank(), comm.Get_size()
    fields = {"rank": rank, "size": size, "comm": comm, "nodes": nodes, "processes": processes}
    return {**fields, "settings": settings, "largest_tag": LARGEST}


@functools.cache
def _take_names_of_init_away() -> None:
    take_names_away(MAPPED_AT_INIT)


@functools.cache
def _is_cuda_aware() -> bool:
    from .cuda_aware import asked_of_the_library

    return asked_of_the_library().is_proven


@functools.cache
def any_thread_may_call() -> bool:
    """Return whether MPI has been initialised with MPI_THREAD_MULTIPLE."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def private(comm: Any, parent: MPI.Intracomm | None = None) -> Any:
    """Set up a new communicator of hpccomm: MPI's errors are exceptions; see `Watched` for `parent`."""
    from mpi4py import MPI

    comm.Set_errhandler(MPI.ERRORS_RETURN)
    failures.watch(comm, parent)
    return comm


def part_of(comm: Any, ranks: list[int], tag: int) -> Any:
    """Return a communicator of some ranks of another one; only these ranks call it (MPI-4.1 §7.4.2).

    If ranks may die, it does not use `comm`: Open MPI's MPI_Comm_create_group hangs if another rank of `comm` dies.
    """
    everyone = comm.Get_group()
    chosen = everyone if ranks == list(range(comm.Get_size())) else everyone.Incl(ranks)
    if failures.is_on():
        everybody = failures.ranks_in_the_job(comm)
        name = f"hpccomm {tag} {hash(tuple(everybody[rank] for rank in ranks))}"
        created = type(comm).Create_from_group(chosen, name)
    else:
        created = comm.Create_group(chosen, tag)
    if chosen is not everyone:
        chosen.Free()
    everyone.Free()
    return created


def release(comm: MPI.Intracomm) -> None:
    """Free a `private` communicator; collective."""
    failures.forget(comm)
    comm.Free()


def number_nodes(comm: MPI.Intracomm) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the node number of every rank, and the process id of each rank on this node.

    The ranks of a node share memory (MPI_COMM_TYPE_SHARED). Processes in another PID namespace are left out. Also note
    whether ranks outnumber the cores; each rank may be bound to its own.
    """
    global ranks_outnumber_cores
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = node.bcast(comm.Get_rank())
    mine = MPI.COMM_WORLD.Get_rank(), os.getpid(), namespace("pid"), cores()
    ranks = node.allgather(mine)
    processes = {rank: pid for rank, pid, namespace, _ in ranks if namespace == mine[2]}
    ranks_outnumber_cores |= len(ranks) > len(set().union(*(cores for *_, cores in ranks)))
    if failures.is_on():
        from ..process.abort import note_those_left_alive

        note_those_left_alive(processes.values(), MPI.COMM_WORLD.Get_size())
    node.Free()
    lowest_of_rank = comm.allgather(lowest)
    numbers = {first: number for number, first in enumerate(sorted(set(lowest_of_rank)))}
    return tuple(numbers[first] for first in lowest_of_rank), processes


def cores() -> set[int]:
    """Return the cores on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def namespace(kind: str) -> str:
    """Return this process's Linux namespace of a kind: each container of a node may have its own."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # only Linux has it
        return ""


def free(comm: MPI.Intracomm, group: object, largest_tag: int, have_met: bool = False) -> list[str]:
    """Free the communicator of `group`; collective. Return warnings for dropped messages.

    `have_met`: all ranks have just met by messages on `comm`. MPI reuses the context of a freed communicator: a message
    left on it would be received on a later one.
    """
    from mpi4py import MPI

    left: list[str] = []
    status, misses = MPI.Status(), 0
    looks = FEW_LOOKS if have_met and comm.Get_size() <= FEW_RANKS else LOOKS
    while misses < looks:  # a probe may miss a message, but makes progress
        message = comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            misses += 1
            continue
        from .tags import OBJECTS

        message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        size, source, tag = status.Get_count(MPI.BYTE), status.Get_source(), status.Get_tag()
        if tag <= largest_tag:  # the program's: hpccomm's own tags are above
            left.append(f"{size} bytes from rank {source} with tag {tag}")
        elif OBJECTS <= tag <= OBJECTS + largest_tag:
            left.append(f"{size} bytes of objects from rank {source} with tag {tag - OBJECTS}")
    spare = failures.take_spare(comm)
    if spare is not None:
        release(spare)
    release(comm)
    if not left:
        return []
    shown = "; ".join(left[:5]) + (" ..." if len(left) > 5 else "")
    return [
        f"destroy of {group}: {len(left)} message{'s were' if len(left) > 1 else ' was'} sent to this rank and never "
        f"received ({shown}; ranks of the group)"
    ]


def path_of_library(name: str, maps: str = "/proc/self/maps") -> str | None:
    """Return the path of the loaded library `name` ("libmpi"); None if unknown."""
    try:
        with open(maps, encoding="utf-8") as file:
            paths = [line.split(maxsplit=5)[5].strip() for line in file if "/" in line]
    except OSError:  # only Linux has it
        return None
    return next((path for path in paths if os.path.basename(path).startswith((f"{name}.so", f"{name}_"))), None)
