"""Make, query and destroy the world group."""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from .. import errors
from ..core import checks, observers
from ..core.arrays import instead_of_mpi4pys
from ..core.c10d_names import c10d_names
from ..core.group import ProcessGroup, make_group
from ..core.options import time_limit
from ..core.registry import BackendConfig, is_backend_available
from ..debug import attach
from ..errors import DistBackendError, DistError, RankFailedError, UnsupportedOperationError, on_rank
from ..job import failures, mpi_library
from ..native import fastpath
from ..process.excepthook import AbortOnException
from .world_store import agreed, in_given

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..core.annotations import Integer
    from ..core.non_member import Group, NonMember
    from ..job.peer_failure import PeerFailures
    from ..job.reserve import Reserve
    from ..store import Store
    from ..store.rendezvous import Method

_world: ProcessGroup | None = None
_had_spares = False  # a destroyed world had spares, which have left the program
_abort_on_exception = AbortOnException()
_peer_failures: PeerFailures | None = None


observers.register(
    coming=attach.prepare, made=attach.attach, gone=attach.detach, who_is_late=attach.who_is_late, place=agreed
)


# -- availability ------------------------------------------------------------------------------------


def is_mpi_available() -> bool:
    """Return True if mpi4py finds an MPI library. The call loads the library, which initialises MPI.

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_mpi_available()
    True
    """
    try:
        mpi_library.load()
    except DistBackendError:
        return False
    return True


def is_available() -> bool:
    """Return True if hpccomm can be used here: the same as :func:`is_mpi_available`.

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_available()
    True
    """
    return is_mpi_available()


def is_nccl_available() -> bool:
    """Return True if NCCL can send GPU arrays here (CuPy is installed and finds NCCL).

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_nccl_available() == hc.is_backend_available("nccl")  # True and True, or False and False
    True
    """
    return importlib.util.find_spec("cupy") is not None and is_backend_available("nccl")


def is_gloo_available() -> bool:
    """Return True if gloo can send host arrays here (PyTorch is installed and includes gloo): ``cpu:gloo``.

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_gloo_available() == hc.is_backend_available("gloo")  # True and True, or False and False
    True
    """
    return is_backend_available("gloo")


def is_initialized() -> bool:
    """Return True between :func:`init_process_group` and :func:`destroy_process_group`, while a world group exists.

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_initialized()
    True
    >>> hc.destroy_process_group()
    >>> hc.is_initialized()
    False
    """
    return _world is not None


# -- init and destroy --------------------------------------------------------------------------------


@c10d_names(only_none=("pg_options",))
def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    *,
    comm: MPI.Comm | None = None,
    on_timeout: str | None = None,
    device_id: int | Literal["auto"] | None = None,
    on_peer_failure: Callable[[int | None], object] | None = None,
    spares: Integer = 0,
) -> ProcessGroup:
    """Make the world group of all ranks that mpirun or srun started. Every rank calls it once.

    Parameters
    ----------
    backend : str, optional
        The backend for each device: ``"cpu:mpi,cuda:nccl"``, or one name. Default: all known devices. A backend is made
        when the first array of its device is used, so the default also works without a GPU.
    init_method : str, optional
        For scripts written for torch.distributed: ``"env://"``, ``"tcp://host:port"`` or ``"file:///path"``, the
        address at which rank 0 serves the groups' :attr:`~ProcessGroup.store`. Ranks always come from MPI; those of the
        method (``RANK``, ``WORLD_SIZE``) are only compared with MPI's. Default: rank 0 chooses a free port.
    timeout : timedelta or float (seconds), optional
        The time limit of operations, of `monitored_barrier` and of destroying. Default: ``HPCCOMM_TIMEOUT`` (in
        seconds), or 30 minutes.
    world_size, rank : int, optional
        For scripts written for torch.distributed: only compared with MPI's, which count the spares.
    store : Store, optional
        Instead of `init_method`: the store that holds the groups' stores. Every rank passes a client of the same store.
    group_name : str, optional
        A name for messages.
    comm : mpi4py.MPI.Intracomm, optional
        The processes that form the world; it is duplicated. Default: ``MPI.COMM_WORLD``.
    on_timeout : str, optional
        The action when an operation takes longer. ``"abort"``: a report names the rank to blame, and the job ends with
        status 124. ``"raise"``: waiting for a Work raises DistTimeoutError. ``"warn"``: only the report. Default:
        ``HPCCOMM_ON_TIMEOUT``, or ``"abort"``.
    device_id : int or "auto", optional
        The number of this rank's GPU (or a ``cupy.cuda.Device``). ``"auto"``: the ranks of a node take turns at their
        visible GPUs: if all see the same GPUs, local rank modulo number of GPUs. The GPU becomes the current device,
        and NCCL connects the ranks now instead of at the first operation on a GPU array. Either every rank passes one
        or none does. Default: the GPU of the first array.
    on_peer_failure : callable, optional
        Called with the dead rank (None if unknown) if the launcher reports dead ranks instead of ending the job, as
        MPICH's ``mpiexec -disable-auto-cleanup`` does. It runs in its own thread while the program continues or waits
        forever. It may save data and then call ``os._exit``, but must not communicate. Default: the launcher ends
        the job.
    spares : int
        The number of ranks outside the world. Each waits in this call until :func:`replace_failed` gives it the place
        and rank of a dead rank (:attr:`~ProcessGroup.is_replacement` is True), or until the world ends; then it leaves
        the program (SystemExit with status 0). Spares are the last rank of each node in turn, beginning with the last
        node; the other ranks keep their order. Only under ``mpirun --with-ft ulfm`` (Open MPI).

    Returns
    -------
    ProcessGroup
        The world group, which ``group=None`` means everywhere. As a context manager, it is destroyed at the end.

    Raises
    ------
    DistError
        A world group exists already, or the launcher started several processes but MPI sees only one
        (the message says what to type).
    DistBackendError
        mpi4py finds no MPI library.
    DistNetworkError
        Rank 0 can't listen at the address in `init_method` (on every rank).
    UnsupportedOperationError
        `spares` is not 0, but the job does not survive dead ranks (the message says what to type).
    ValueError, TypeError
        `backend` is malformed, `comm` is not an intracommunicator, `rank` / `world_size` contradict MPI, or `spares`
        leaves no rank for the world.

    Notes
    -----
    From now on an uncaught exception on one rank, also of this call, prints its traceback and ends the whole job
    (MPI_Abort), so the other ranks do not hang. ``HPCCOMM_ABORT_ON_EXCEPTION=0`` turns that off.

    Examples
    --------
    >>> hc.destroy_process_group()  # the one of the examples before
    >>> hc.init_process_group("cpu:mpi,cuda:nccl")  # on rank 1 of 4: ... rank 1 of 4 ...
    <ProcessGroup 'world': rank 0 of 1, cpu:mpi,cuda:nccl>
    >>> hc.destroy_process_group()
    >>> with hc.init_process_group() as world:  # destroyed at the end of the block
    ...     hc.is_initialized()
    True
    >>> hc.is_initialized()
    False
    """
    global _peer_failures
    if on_peer_failure is not None and not callable(on_peer_failure):
        raise TypeError(f"init_process_group: on_peer_failure is {on_peer_failure!r}; expected a function, or None")
    if _world is not None:
        raise DistError(
            f"init_process_group: there is a world group already; call destroy_process_group() first, or, in a "
            f"cell of a notebook that is run again, write world = hc.group.WORLD or hc.init_process_group(){on_rank()}"
        )
    mpi = mpi_library.load()
    if comm is None:
        if mpi.COMM_WORLD.Get_size() == 1:
            from ..process import alone

            alone.check(mpi)
        if _had_spares:
            raise DistError(
                "init_process_group: the spares of the world before have left the program; give a communicator of the "
                "others, made while that world was there: comm=world.comm.Dup()"
            )
        comm = mpi.COMM_WORLD
    elif not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"init_process_group: comm is {comm!r}; expected an mpi4py intracommunicator")
    errors.set_rank(comm.Get_rank())
    _abort_on_exception.install(comm.Get_size())
    config = BackendConfig(backend)
    limit = time_limit(timeout, on_timeout)
    method = _method(init_method, store)
    device = None if device_id is None else _device_number(device_id, config)
    _agree_with_mpi(comm, rank, world_size)
    if method is not None:
        _agree_with_mpi(comm, method.rank, method.world_size, f" (by {init_method!r})")
    spares = _checked_spares(spares, comm)
    observers.group_coming()
    failures.next_step = failures.SHRINK

    def make(fields: dict[str, Any], method: Method | None = None) -> ProcessGroup:
        inside = fields["comm"]
        place = agreed(inside, fields["nodes"], method) if store is None else in_given(store, inside)
        fields |= {**limit(fields["settings"]), "place": place}
        return make_group(**fields, config=config, name=group_name or "world", device_id=device)

    if spares:
        world = _with_spares(comm, spares, make, method)
    else:
        fields = mpi_library.membership(comm)
        fields["comm"].Set_name("hpccomm world")
        world = make(fields, method)
    set_world(world)
    if on_peer_failure is not None:
        ranks = {process: rank for rank, process in enumerate(failures.ranks_in_the_job(world.comm))}
        pids = {process: pid for process, pid in world.processes.items() if process in ranks and pid != os.getpid()}
        local: dict[int | None, int] = {ranks[process]: pid for process, pid in pids.items()}
        from ..job.peer_failure import PeerFailures

        _peer_failures = PeerFailures(on_peer_failure, local)
    keeps = world.settings.keeps_reports or world.settings.trace != "0"
    _abort_on_exception.at_the_end = attach.last_words() if keeps else None
    atexit.register(_leave, os.getpid())
    try:
        connect(world)
    except RankFailedError:
        if not world.is_replacement:  # on a replacement, the first operation raises it, where the program expects it
            raise
    except DistError:
        world.give_up((), "has never been used, because its GPUs could not be connected")
        raise
    return world


def _checked_spares(spares: Integer, comm: Any) -> int:
    spares, size = checks.integer("init_process_group: spares", spares), comm.Get_size()
    if spares and not failures.is_on():
        raise UnsupportedOperationError(
            f"init_process_group: spares is {spares}, but this job does not survive dead ranks; {failures.HOW_TO_START}"
        )
    if not 0 <= spares < size:
        raise ValueError(f"init_process_group: spares is {spares}; expected 0 to {size - 1}, for MPI has {size} ranks")
    return spares


def _with_spares(comm: Any, count: int, make: Callable[..., ProcessGroup], method: Method | None) -> ProcessGroup:
    """Make the world without the spares; a spare waits until it has a place in a world, or leaves the program."""
    from ..job.reserve import Reserve

    reserve = Reserve(comm, count)
    fields, error = reserve.begin(), None
    if not fields:
        attach.prepare_spare(reserve.settings, reserve.processes)
        errors.set_rank(f"{reserve.comm.Get_rank()}, a spare")
    try:
        world = make(fields, method) if fields else None
    except Exception as raised:
        error = raised
    if not failures.agree(reserve.comm, error is None):
        raise error or DistError(f"init_process_group failed on ranks that are no spares: see their error{on_rank()}")
    if world is None:
        world = _called(reserve, make)
        world.is_replacement = True
    failures.reserves[world] = reserve
    return world


def _called(reserve: Reserve, make: Callable[..., ProcessGroup]) -> ProcessGroup:
    """Wait as a spare; return the world in which this rank replaces a dead one, or leave the program."""
    world = None
    while world is None and (status := reserve.wait()) is None:
        world = reserve.fill(None, 0, make)
    if world is not None:
        return world
    _abort_on_exception.remove()
    if status:
        from ..process.stderr import log

        log("all ranks of the world have died; the spares end")
    raise SystemExit(status)


def destroy_process_group(group: Group | None = None) -> None:
    """Finish the operations in flight on `group` and free it; without `group`, do so for all, the world last.

    Every rank of the group calls it. Afterwards the group refuses every operation. Once the world is destroyed,
    init_process_group may be called again. The end of a ``with`` block of a group does the same.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: all groups.

    Returns
    -------
    None

    Raises
    ------
    DistError
        There is no world group.
    DistTimeoutError
        An operation is still in flight after the group's timeout; nothing is destroyed.

    Examples
    --------
    >>> group = hc.new_group()
    >>> hc.destroy_process_group(group)
    >>> group.is_destroyed, hc.is_initialized()
    (True, True)
    >>> hc.destroy_process_group()
    >>> hc.is_initialized()
    False
    """
    (current_world() if group is None else member(group)).destroy()


def _forget(world: ProcessGroup) -> None:
    """Forget the world, which has been destroyed, and destroy the larger one from which it was shrunk."""
    global _world, _peer_failures, _had_spares
    if (larger := world.shrunk_from) is not None:
        set_world(larger)  # also if it can't be destroyed
        larger.destroy()
        return
    _world = None
    errors.set_rank(None)
    _abort_on_exception.remove()
    if _peer_failures is not None:
        _peer_failures.stop()
        _peer_failures = None
    atexit.unregister(_leave)
    if (reserve := failures.reserves.get(world)) is not None:
        _had_spares = True
        reserve.dismiss(world.rank == 0)


def set_world(world: ProcessGroup) -> None:
    """Make a group the world; its ranks become the global ranks."""
    global _world
    world.on_destroy = _forget
    _world = world
    errors.set_rank(world.rank)


def _leave(pid: int) -> None:
    """Wait for the other ranks when a program ends without destroying its groups, as MPI_Finalize would."""
    if _world is not None and os.getpid() == pid and not mpi_library.is_finalized():
        _world.leave()
        if (reserve := failures.reserves.get(_world)) is not None:
            reserve.dismiss(_world.rank == 0)
        larger = _world.shrunk_from
        while larger is not None:
            larger.leave(tells=False)
            larger = larger.shrunk_from


def connect(group: ProcessGroup) -> None:
    """Connect the GPUs of a new group now if init_process_group got a device_id."""
    if group.device_id is not None and "cuda" in group.config.device_map and "cuda" not in group.dispatcher.backends:
        device = group.dispatcher.backends["cuda"].connect()
        if group.device_id == "auto" and isinstance(device, int):  # groups made from this one use the same GPU
            group.device_id = device


def _agree_with_mpi(comm: MPI.Comm, rank: int, world_size: int, by: str = "") -> None:
    for name, said, actual in (("rank", rank, comm.Get_rank()), ("world_size", world_size, comm.Get_size())):
        if said not in (-1, actual):
            from ..process.alone import start_more

            hint = start_more(max(2, world_size, rank + 1)) if comm.Get_size() == 1 else ""
            raise ValueError(
                f"init_process_group: {name} is {said}{by}, but MPI says {actual}"
                f"{hint or '; leave it out, MPI knows'}{on_rank()}"
            )


def _method(init_method: str | None, store: Store | None) -> Method | None:
    if init_method is not None and store is not None:
        raise ValueError("init_process_group: both init_method and store are given; choose one")
    if store is not None:
        from ..store.store import Store

        if not isinstance(store, Store):
            raise TypeError(f"init_process_group: store is {store!r}; expected a Store, such as hpccomm.TCPStore")
    if init_method is None:
        return None
    from ..store.rendezvous import parsed  # takes 5 ms

    return parsed(init_method)


def _device_number(device_id: Any, config: BackendConfig) -> int | Literal["auto"]:
    if "cuda" not in config.device_map:
        raise ValueError(f"init_process_group: device_id is {device_id}, but backend {str(config)!r} has no 'cuda'")
    if device_id == "auto":
        return "auto"
    number = -1 if isinstance(device_id, str) else int(device_id)
    if number < 0:
        raise ValueError(f"init_process_group: device_id is {device_id}; expected 0 or more, or 'auto'")
    return number


# -- the group of a call -----------------------------------------------------------------------------


def current_world() -> ProcessGroup:
    """Return the world group; raise DistError before init_process_group."""
    if _world is None:
        raise DistError("there is no process group: call hpccomm.init_process_group() first")
    return _world


def member(group: Group | None) -> ProcessGroup:
    """Return the group to call; None means the world. A NonMember is returned too, because it has every operation."""
    if group is None:
        return _world or current_world()
    if type(group) is not ProcessGroup and not isinstance(group, ProcessGroup):
        from ..core.non_member import NonMember

        if not isinstance(group, NonMember):
            hint = instead_of_mpi4pys(group)
            what = f"expected what new_group returns, or None for the world{hint and '; '}{hint}"
            raise TypeError(f"group is {group!r}; {what}{on_rank()}")
    return group  # type: ignore[return-value]


if fastpath is not None:
    member = fastpath.compiled_member(globals(), ProcessGroup, member)


def member_of(operation: str, group: Group | None) -> ProcessGroup:
    """Return the group to call; raise ValueError if this process is not a member."""
    group = member(group)
    if not isinstance(group, ProcessGroup):  # a NonMember
        raise ValueError(f"{operation}: this process is not a member of {group!r}{on_rank()}")
    return group


class _WorldAttribute(type):
    @property
    def WORLD(cls) -> ProcessGroup | Any:  # annotated without None, so that programs need no check for it
        """The world group, or None before init."""
        return _world

    @property
    def NON_GROUP_MEMBER(cls) -> NonMember:
        """Equal to the result of new_group on ranks outside the group."""
        from ..core.non_member import NonMember

        return NonMember()


class GroupMember(metaclass=_WorldAttribute):
    """c10d's names: ``GroupMember.WORLD`` is the world group, ``NON_GROUP_MEMBER`` equals every NonMember.

    Also called ``hpccomm.group``: ``hc.group.WORLD``.

    Examples
    --------
    >>> hc.GroupMember.WORLD.ranks  # on 4 ranks: (0, 1, 2, 3)
    (0,)
    >>> hc.GroupMember.WORLD == hc.GroupMember.NON_GROUP_MEMBER
    False
    """
