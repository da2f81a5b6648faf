"""The world group and its life: init, destroy, and the groups made from it."""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from . import errors
from .core.backend import Backend, BackendConfig, BackendOptions, create_backend, is_backend_available, is_custom
from .core.group import DEFAULT_TIMEOUT, ProcessGroup
from .core.non_member import NonMember
from .core.tuning import Tuning
from .core.tuning import tuning as tuning_of_environment
from .core.work import as_seconds
from .errors import DistBackendError, DistError, here
from .process.environment import silent_singleton
from .process.excepthook import AbortOnException

if TYPE_CHECKING:
    from mpi4py import MPI

Group: TypeAlias = "ProcessGroup | NonMember"


@dataclass
class _World:
    """The state between init and destroy."""

    group: ProcessGroup
    nodes: list[int]  # the node number of each rank, nodes counted in the order of their lowest rank
    groups: list[ProcessGroup] = field(default_factory=list)  # every other group made, in order
    made: int = 0  # groups made so far: numbers them in messages


_world: _World | None = None
_abort_on_exception = AbortOnException()


# -- availability ------------------------------------------------------------------------------------


def is_mpi_available() -> bool:
    """Say whether mpi4py finds an MPI library. Asking loads the library, and so initialises MPI.

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_mpi_available()
    True
    """
    try:
        _load_mpi()
    except DistBackendError:
        return False
    return True


def is_available() -> bool:
    """Say whether hpccomm can be used here: the same as :func:`is_mpi_available`.

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
    """Say whether GPU arrays can be sent through NCCL here (CuPy is installed, and finds NCCL).

    Returns
    -------
    bool

    Examples
    --------
    >>> hc.is_nccl_available() == hc.is_backend_available("nccl")  # True and True, or False and False
    True
    """
    return importlib.util.find_spec("cupy") is not None and is_backend_available("nccl")


def is_initialized() -> bool:
    """Say whether there is a world group.

    Returns
    -------
    bool
        True between :func:`init_process_group` and :func:`destroy_process_group`.

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


def init_process_group(
    backend: str | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    rank: int = -1,
    world_size: int = -1,
    group_name: str = "",
    device_id: int | Literal["auto"] | None = None,
) -> ProcessGroup:
    """Make the world group, of all ranks that mpirun or srun started. Every rank calls it, once.

    Parameters
    ----------
    backend : str, optional
        Which backend serves the arrays of which device: ``"cpu:mpi,cuda:nccl"``, or one name. Default: every
        known device is mapped. A backend is made when the first array of its device is used, so the default also
        runs where there is no GPU.
    comm : mpi4py.MPI.Intracomm, optional
        The processes that form the world; it is duplicated. Default: ``MPI.COMM_WORLD``.
    timeout : timedelta or float (seconds)
        How long `monitored_barrier` and destroy wait. Default: 30 minutes.
    rank, world_size : int, optional
        For scripts written for torch.distributed: checked against what MPI says.
    group_name : str, optional
        A name for messages.
    device_id : int or "auto", optional
        The number of this rank's GPU (or a ``cupy.cuda.Device``); ``"auto"``: the ranks of a node take turns (local
        rank modulo the GPUs that this process sees). It becomes the current device, and the ranks are connected by
        NCCL now instead of at the first operation on a GPU array. Every rank gives one, or none does. Default: the
        GPU of the first array.

    Returns
    -------
    ProcessGroup
        The world group, which is what ``group=None`` means everywhere. It is a context manager that destroys it.

    Raises
    ------
    DistError
        There is a world group already; or the launcher started several processes and MPI sees only one
        (the message says what to type).
    DistBackendError
        mpi4py finds no MPI library.
    ValueError, TypeError
        `backend` is malformed, `comm` is not an intracommunicator, or `rank` / `world_size` contradict MPI.

    Notes
    -----
    From here on an uncaught exception on one rank prints its traceback and ends the whole job (MPI_Abort),
    instead of leaving the others to hang. ``HPCCOMM_ABORT_ON_EXCEPTION=0`` turns that off.

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
    global _world
    if _world is not None:
        raise DistError(
            f"init_process_group: there is a world group already; call destroy_process_group() first{here()}"
        )
    config = BackendConfig(backend)
    duration = _as_timedelta(timeout)
    device = None if device_id is None else _device_number(device_id, config)
    mpi = _load_mpi()
    if comm is None:
        alone = silent_singleton(mpi.COMM_WORLD.Get_size())
        if alone is not None:
            raise DistError(f"init_process_group: {alone}")
        comm = mpi.COMM_WORLD
    elif not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"init_process_group: comm is {comm!r}; expected an mpi4py intracommunicator")
    for name, said, actual in (("rank", rank, comm.Get_rank()), ("world_size", world_size, comm.Get_size())):
        if said not in (-1, actual):
            raise ValueError(f"init_process_group: {name} is {said}, but MPI says {actual}; leave it out, MPI knows")

    comm = comm.Dup()
    comm.Set_errhandler(mpi.ERRORS_RETURN)  # so that failures are exceptions, whatever the user's communicator does
    try:
        tuning = _agree_on_tuning(comm)
    except Exception:
        comm.Free()
        raise
    group = _make_group(comm, range(comm.Get_size()), config, tuning, duration, group_name or "world", "", device)
    _world = _World(group, _number_nodes(mpi, comm))
    errors.set_rank(group.rank)
    _abort_on_exception.install(group.size)
    _connect(group)
    return group


def destroy_process_group(group: Group | None = None) -> None:
    """Finish what is in flight on `group` and free it; without `group`, on every group, the world last.

    Every rank of the group calls it. The group refuses every operation afterwards. After the world is destroyed,
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
        Something is still in flight after the group's timeout; nothing is destroyed.

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
    global _world
    if group is not None and (_world is None or group is not _world.group):
        group.destroy()
        if _world is not None and group in _world.groups:
            _world.groups.remove(group)  # type: ignore[arg-type]
        return
    world = current_world()
    for each in [*world.groups, world.group]:
        each.destroy()
    _world = None
    errors.set_rank(None)
    _abort_on_exception.remove()


# -- new groups --------------------------------------------------------------------------------------


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    sort_ranks: bool = True,
) -> Group:
    """Make a group of some ranks of the world.

    Every rank of the world calls it, with the same arguments and in the same order as its other groups; with
    `use_local_synchronization` only the members need to.

    Parameters
    ----------
    ranks : list of int, optional
        Global ranks of the members. Default: all.
    timeout : timedelta or float (seconds), optional
        Default: the world's.
    backend : str, optional
        As for init_process_group. Default: the world's configuration.
    use_local_synchronization : bool
        True: only the members call, and only they take part.
    group_desc : str, optional
        A description for messages.
    sort_ranks : bool
        True: ranks in the group follow the global ranks. False: they follow the order of `ranks`.

    Returns
    -------
    ProcessGroup or NonMember
        A NonMember on ranks that are not in the group: operations on it warn once and return None.

    Raises
    ------
    ValueError
        `ranks` is empty, has a duplicate, or a rank that does not exist.

    Examples
    --------
    >>> evens = hc.new_group(range(0, hc.get_world_size(), 2))
    >>> x = np.array([1.0])
    >>> if hc.get_rank() in evens.ranks:
    ...     hc.all_reduce(x, group=evens)
    >>> x  # on 4 ranks: array([2.]) on ranks 0 and 2, array([1.]) on the others
    array([1.])
    """
    world = current_world()
    members = list(world.group.ranks if ranks is None else ranks)
    _check_ranks("new_group", members, world.group)
    if sort_ranks:
        members.sort()
    name = _next_name(world, group_desc)
    config = world.group.config if backend is None else BackendConfig(backend)
    if world.group.rank not in members:
        if not use_local_synchronization:
            _split_backends(world.group, config, None)
        return NonMember(members, name)
    # MPI_Comm_create_group is collective over the members only (MPI-4.1 §7.4.2): the others go on at once.
    mpi = _load_mpi()
    everyone = world.group.comm.Get_group()  # type: ignore[union-attr]
    chosen = everyone.Incl(members)
    comm = world.group.comm.Create_group(chosen)  # type: ignore[union-attr]
    chosen.Free()
    everyone.Free()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    duration = world.group.timeout if timeout is None else _as_timedelta(timeout)
    group = _make_group(
        comm, members, config, world.group.tuning, duration, name, group_desc or "", world.group.device_id
    )
    if not use_local_synchronization:
        _split_backends(world.group, config, group)
    _connect(group)
    return _adopt(world, group)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group]]:
    """Split `group` into subgroups of `group_size` consecutive ranks, or into one for each node.

    Every rank of the world calls it.

    Parameters
    ----------
    group_size : int, optional
        Ranks in each subgroup. Default: each node becomes a subgroup, wherever its ranks are.
    group : ProcessGroup, optional
        What to split. Default: the world.
    timeout, backend, group_desc
        As for :func:`new_group`.

    Returns
    -------
    mine : ProcessGroup
        The subgroup of this rank.
    all : list of ProcessGroup or NonMember
        All of them; those that this rank is not in are NonMembers.

    Raises
    ------
    ValueError
        `group_size` does not divide the size of the group.

    Examples
    --------
    >>> node, nodes = hc.new_subgroups()
    >>> node.size == hc.get_local_size(), len(nodes) == hc.get_node_count()
    (True, True)
    >>> alone, everybody = hc.new_subgroups(group_size=1)
    >>> alone.ranks  # on rank 3: (3,)
    (0,)
    """
    parent = member_of(group)
    if group_size is None:
        nodes = current_world().nodes
        rows = [
            [rank for rank in parent.ranks if nodes[rank] == node] for node in sorted({nodes[r] for r in parent.ranks})
        ]
    elif group_size < 1 or parent.size % group_size:
        raise ValueError(
            f"new_subgroups: group_size is {group_size}, "
            f"which does not divide the {parent.size} ranks of the group{here()}"
        )
    else:
        rows = [list(parent.ranks[start : start + group_size]) for start in range(0, parent.size, group_size)]
    return new_subgroups_by_enumeration(rows, timeout, backend, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group]]:
    """Make one group for each list of global ranks.

    Every rank of the world calls it.

    Parameters
    ----------
    ranks_per_subgroup_list : list of lists of int
        The global ranks of each subgroup; the lists must not overlap.
    timeout, backend, group_desc
        As for :func:`new_group`.

    Returns
    -------
    mine : ProcessGroup or NonMember
        The subgroup of this rank; a NonMember if it is in none.
    all : list of ProcessGroup or NonMember
        All of them, in the order of the lists.

    Raises
    ------
    ValueError
        A rank is in two lists, or a list is invalid.

    Examples
    --------
    >>> n = hc.get_world_size()
    >>> evens, odds = range(0, n, 2), range(1, n, 2)
    >>> mine, groups = hc.new_subgroups_by_enumeration([evens, odds] if n > 1 else [evens])
    >>> mine.ranks  # on 4 ranks: (0, 2), (1, 3), (0, 2), (1, 3)
    (0,)
    """
    rows = [list(row) for row in ranks_per_subgroup_list]
    if not rows:
        raise ValueError(f"new_subgroups_by_enumeration: the list of subgroups is empty{here()}")
    _check_ranks("new_subgroups_by_enumeration", [rank for row in rows for rank in row], current_world().group)
    subgroups = [new_group(row, timeout, backend, group_desc=group_desc) for row in rows]
    mine = next((subgroup for subgroup in subgroups if isinstance(subgroup, ProcessGroup)), subgroups[0])
    return mine, subgroups


def split_group(
    parent: ProcessGroup | None = None,
    color: int | None = None,
    key: int = 0,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    group_desc: str | None = None,
) -> Group:
    """Split `parent` into one group for each `color`, as MPI_Comm_split.

    Every rank of `parent` calls it.

    Parameters
    ----------
    parent : ProcessGroup, optional
        What to split. Default: the world.
    color : int, optional
        Ranks with the same color, 0 or more, form a group. Default: this rank is in no group.
    key : int
        The ranks of a group are ordered by `key`, then by their rank in `parent`.
    timeout, backend, group_desc
        As for :func:`new_group`; the default is what `parent` has.

    Returns
    -------
    ProcessGroup or NonMember
        The group of this rank's color; a NonMember with ``color=None``.

    Raises
    ------
    ValueError
        `color` is negative.

    Notes
    -----
    Semantics: MPI_Comm_split (MPI-4.1 §7.4.2).

    Examples
    --------
    >>> half = hc.split_group(color=hc.get_rank() % 2, group_desc="half")
    >>> half.ranks  # on 4 ranks: (0, 2), (1, 3), (0, 2), (1, 3)
    (0,)
    >>> reverse = hc.split_group(color=0, key=-hc.get_rank())
    >>> reverse.ranks  # on 4 ranks: (3, 2, 1, 0)
    (0,)
    """
    world = current_world()
    group = member_of(parent)
    if color is not None and color < 0:
        raise ValueError(f"split_group: color is {color}; expected 0 or more, or None for no group{here()}")
    mpi = _load_mpi()
    if group.comm is None:
        raise DistError(f"split_group: {group!r} has no MPI communicator to split{here()}")
    comm: Any = group.comm.Split(mpi.UNDEFINED if color is None else color, key)
    name = _next_name(world, group_desc)
    config = group.config if backend is None else BackendConfig(backend)
    if comm == mpi.COMM_NULL:
        _split_backends(group, config, None)
        return NonMember((), name)
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    members = comm.allgather(world.group.rank)
    duration = group.timeout if timeout is None else _as_timedelta(timeout)
    subgroup = _make_group(comm, members, config, world.group.tuning, duration, name, group_desc or "", group.device_id)
    _split_backends(group, config, subgroup, color or 0)
    _connect(subgroup)
    return _adopt(world, subgroup)


# -- c10d's names -------------------------------------------------------------------------------------


class _WorldAttribute(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The world group, or None before init."""
        return None if _world is None else _world.group


class GroupMember(metaclass=_WorldAttribute):
    """c10d's names: ``GroupMember.WORLD`` is the world group, ``NON_GROUP_MEMBER`` equals every NonMember.

    Examples
    --------
    >>> hc.GroupMember.WORLD.ranks  # on 4 ranks: (0, 1, 2, 3)
    (0,)
    >>> hc.GroupMember.WORLD == hc.GroupMember.NON_GROUP_MEMBER
    False
    """

    NON_GROUP_MEMBER = NonMember()


# -- inside ------------------------------------------------------------------------------------------


def member(group: Group | None) -> ProcessGroup:
    """Return the group to call: the world for None. A NonMember is returned too: it answers every operation."""
    if group is None:
        return _world.group if _world is not None else current_world().group
    if type(group) is not ProcessGroup and not isinstance(group, (ProcessGroup, NonMember)):
        raise TypeError(f"group is {group!r}; expected what new_group returns, or None for the world{here()}")
    return group  # type: ignore[return-value]


def member_of(group: Group | None) -> ProcessGroup:
    """Return the group (the world for None); ValueError if this process is not a member of it."""
    found = member(group)
    if isinstance(found, NonMember):
        raise ValueError(f"this process is not a member of {found!r}{here()}")
    return found


def current_world() -> _World:
    """Return the state made by init_process_group; DistError before it."""
    if _world is None:
        raise DistError("there is no process group: call hpccomm.init_process_group() first")
    return _world


def _agree_on_tuning(comm: MPI.Intracomm) -> Tuning:
    """Return rank 0's table on every rank, or raise rank 0's error on every rank."""
    found: Tuning | Exception | None = None
    if comm.Get_rank() == 0:
        try:
            found = tuning_of_environment()
        except Exception as error:  # whatever it is, the others are waiting
            found = error
    agreed: Tuning | Exception = comm.bcast(found)
    if isinstance(agreed, Exception):
        raise agreed
    return agreed


def _make_group(
    comm: MPI.Intracomm,
    ranks: Sequence[int],
    config: BackendConfig,
    tuning: Tuning,
    timeout: timedelta,
    name: str,
    description: str,
    device_id: int | Literal["auto"] | None,
) -> ProcessGroup:
    """Make the group over `comm`; a custom backend that is alone in `config` may bring a group of its own class."""
    comm.Set_name(f"hpccomm {name}")
    rank, size = comm.Get_rank(), comm.Get_size()
    group = ProcessGroup.__new__(ProcessGroup)
    backends: dict[str, Backend] = {}
    names = set(config.device_map.values())
    if len(names) == 1 and is_custom(*names):
        device, only = next(iter(config.device_map.items()))
        made = create_backend(
            only, BackendOptions(None, rank, size, timeout, tuple(ranks), name, device, comm, tuning, device_id)
        )
        if isinstance(made, ProcessGroup):
            group = made
        else:
            backends = {device: made}
    group.attach(
        rank,
        size,
        ranks=ranks,
        comm=comm,
        config=config,
        tuning=tuning,
        timeout=timeout,
        name=name,
        description=description,
        device_id=device_id,
    )
    if type(group) is not ProcessGroup:
        backends = {device: _NotOverridden(group, *names) for device in config.device_map}
    group._backends.update(backends)
    return group


class _NotOverridden(Backend):
    """Serves the operations that a ProcessGroup class of the program's own does not override: it refuses them."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        super().__init__(group.rank, group.size)
        self.name = name
        self._group = group

    @property
    def implementation(self) -> str:
        return type(self._group).__name__


def _split_backends(parent: ProcessGroup, config: BackendConfig, subgroup: ProcessGroup | None, color: int = 0) -> None:
    """Give a new group the connections that its parent already has; every rank of the parent calls it."""
    for device, backend in list(parent._backends.items()):
        if config.device_map.get(device) == parent.config.device_map.get(device):
            options = None if subgroup is None else subgroup._options_for(device)
            split = backend.split(options, color)
            if subgroup is not None and split is not None:
                subgroup._backends[device] = split


def _connect(group: ProcessGroup) -> None:
    """Connect the GPUs of a new group now, if the program gave ``device_id`` at init."""
    if group.device_id is not None and "cuda" in group.config.device_map and "cuda" not in group._backends:
        group._backends["cuda"].connect()


def _device_number(device_id: Any, config: BackendConfig) -> int | Literal["auto"]:
    if "cuda" not in config.device_map:
        raise ValueError(f"init_process_group: device_id is {device_id}, but backend {str(config)!r} has no 'cuda'")
    if device_id == "auto":
        return "auto"
    number = int(device_id)
    if number < 0:
        raise ValueError(f"init_process_group: device_id is {number}; expected 0 or more, or 'auto'")
    return number


def _adopt(world: _World, group: ProcessGroup) -> ProcessGroup:
    world.groups.append(group)
    return group


def _next_name(world: _World, description: str | None) -> str:
    world.made += 1
    return description or f"group {world.made}"


def _check_ranks(operation: str, ranks: Sequence[int], world: ProcessGroup) -> None:
    if not ranks:
        raise ValueError(f"{operation}: the list of ranks is empty{here()}")
    for rank in ranks:
        if not 0 <= rank < world.size:
            raise ValueError(f"{operation}: there is no rank {rank}; expected 0 to {world.size - 1}{here()}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{operation}: a rank is listed twice in {list(ranks)}{here()}")


def _number_nodes(mpi: Any, comm: MPI.Intracomm) -> list[int]:
    """Return the node number of every rank: a node is a set of ranks that share memory (MPI_COMM_TYPE_SHARED)."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    lowest = node.bcast(comm.Get_rank())
    node.Free()
    lowest_of_rank = comm.allgather(lowest)
    numbers = {first: number for number, first in enumerate(sorted(set(lowest_of_rank)))}
    return [numbers[first] for first in lowest_of_rank]


def _as_timedelta(timeout: timedelta | float) -> timedelta:
    seconds = as_seconds(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout is {timeout}; expected a positive timedelta or number of seconds{here()}")
    return timedelta(seconds=seconds)


def _load_mpi() -> Any:
    """Import mpi4py.MPI (which initialises MPI) and return it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"mpi4py can't load an MPI library: {error}\n"
            "On a cluster: load the site's MPI module (`module load openmpi`, ...) before starting Python, or name the "
            "library with MPI4PY_LIBMPI=/path/to/libmpi.so. On a machine without MPI: pip install 'hpccomm[mpich]' "
            "(or [openmpi]), which carries one."
        ) from error
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is off: who initialises MPI finalises it
        MPI.Init_thread()
        atexit.register(lambda: None if MPI.Is_finalized() else MPI.Finalize())
    if MPI.Is_finalized():
        raise DistBackendError("MPI has been finalised; a process can't start it again")
    return MPI
