"""Make groups from the world or from other groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast, overload

from ..core import checks
from ..core.annotations import Integer
from ..core.backend import Backend
from ..core.backends import options_for
from ..core.c10d_names import c10d_names
from ..core.group import ProcessGroup, child_of
from ..core.non_member import Group, NonMember
from ..core.options import time_limit
from ..core.registry import BackendConfig
from ..errors import DistError, on_rank
from ..job import failures, mpi_library
from .world import connect, current_world, member, member_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..core.backends import LazyBackends

_made = 0  # groups made so far; messages number groups by it


@overload
def new_group(
    ranks: None = None,
    timeout: timedelta | float | None = ..., backend: str | None = ..., *, use_local_synchronization: bool = ...,
    group_desc: str | None = ..., sort_ranks: bool = ...,
    comm: None = None, on_timeout: str | None = ...,
) -> ProcessGroup: ...  # fmt: skip
@overload
def new_group(
    ranks: Sequence[Integer] | None = ...,
    timeout: timedelta | float | None = ..., backend: str | None = ..., *, use_local_synchronization: bool = ...,
    group_desc: str | None = ..., sort_ranks: bool = ...,
    comm: MPI.Comm | None = ..., on_timeout: str | None = ...,
) -> Group: ...  # fmt: skip
@c10d_names("device_id", only_none=("pg_options",))
def new_group(
    ranks: Sequence[Integer] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    *,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    sort_ranks: bool = True,
    comm: MPI.Comm | None = None,  # an Intracomm; mpi4py annotates the result of cart.Sub as Comm
    on_timeout: str | None = None,
) -> Group:
    """Make a group of some ranks of the world.

    Every rank of the world calls it with the same arguments, and all ranks make their groups in the same order. With
    `use_local_synchronization` only the members call it.

    Parameters
    ----------
    ranks : list of int, optional
        Global ranks of the members. Default: all.
    timeout : timedelta or float (seconds), optional
        How long an operation may take. Default: the world's.
    backend : str, optional
        As for init_process_group. Default: the world's configuration.
    use_local_synchronization : bool
        True: only the members call `new_group`.
    group_desc : str, optional
        A description for messages.
    sort_ranks : bool
        True: members are ordered by global rank. False: they are ordered as in `ranks`.
    comm : mpi4py.MPI.Intracomm, optional
        Instead of `ranks`: a communicator of some ranks of the world, such as ``cart.Sub(...)``; it is duplicated. Only
        its ranks call `new_group`. If `comm` is ``MPI.COMM_NULL``, the result is a NonMember.
    on_timeout : str, optional
        As for init_process_group. Default: the world's.

    Returns
    -------
    ProcessGroup or NonMember
        A NonMember on ranks that are not in the group: operations on it warn once and return None.

    Raises
    ------
    ValueError
        `ranks` is empty, or has a duplicate or a rank that does not exist; a rank of `comm` is not in the world; or
        both `ranks` and `comm` are given.
    TypeError
        A rank is not an integer, or `comm` is not an intracommunicator.

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
    config = world.config if backend is None else BackendConfig(backend)
    limits = time_limit(timeout, on_timeout)(world)
    if comm is not None:
        return _on_communicator(world, comm, ranks, config, limits, group_desc)
    members = checked_ranks("new_group", world.ranks if ranks is None else ranks, world)
    if sort_ranks:
        members.sort()
    name = next_name(group_desc)
    usable("new_group", world)
    if not use_local_synchronization:
        more = [f"backend {config}"] if world.dispatcher.check is not None else []
        world.agree_on("new_group", f"ranks {', '.join(map(str, members))}", *more)
    created = None
    if failures.is_on() and not use_local_synchronization:
        created = _split_off(world, members)
    if world.rank not in members:
        if not use_local_synchronization:
            _split_backends(world, config, None)
        return NonMember(members, name, config)
    if created is None:
        created = create_group("new_group", world, members)
    group = child_of(world, created, members, config, limits, name, group_desc)
    if not use_local_synchronization:
        _split_backends(world, config, group)
    connect(group)
    return group


def create_group(operation: str, group: ProcessGroup, members: list[int]) -> Any:
    """Return a communicator of some ranks of a group; only these ranks call it."""
    from ..job.tags import NEW_GROUP  # importing it calls MPI

    with failures.translating(operation, group.comm):
        return mpi_library.part_of(group.comm, members, NEW_GROUP)


def _split_off(world: ProcessGroup, members: list[int]) -> Any:
    """Make the communicator with MPI_Comm_split; Open MPI 5.0's MPI_Comm_create_group hangs if a member dies."""
    mpi = mpi_library.load()
    is_member = world.rank in members
    with failures.translating("new_group", world.comm):
        comm: Any = world.comm
        return comm.Split(0 if is_member else mpi.UNDEFINED, members.index(world.rank) if is_member else 0)


def _on_communicator(
    world: ProcessGroup,
    comm: Any,
    ranks: Sequence[Integer] | None,
    config: BackendConfig,
    limits: dict[str, Any],
    description: str | None,
) -> Group:
    mpi = mpi_library.load()
    if ranks is not None:
        raise ValueError(f"new_group: both ranks and comm are given; choose one{on_rank()}")
    name = next_name(description)
    if comm == mpi.COMM_NULL:
        return NonMember((), name, config)
    if not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"new_group: comm is {comm!r}; expected an mpi4py intracommunicator{on_rank()}")
    usable("new_group", world)
    members = failures.ranks_in(world.comm, comm)
    if mpi.UNDEFINED in members:
        raise ValueError(f"new_group: rank {members.index(mpi.UNDEFINED)} of comm is not in the world group{on_rank()}")
    with failures.translating("new_group", world.comm):
        own = comm.Dup()
    group = child_of(world, own, members, config, limits, name, description)
    connect(group)
    return group


@c10d_names(only_none=("pg_options",))
def new_subgroups(
    group_size: Integer | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    *,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[Group]]:
    """Split `group` into subgroups of `group_size` consecutive ranks, or into one for each node.

    Every rank of the world calls it.

    Parameters
    ----------
    group_size : int, optional
        Ranks in each subgroup. Default: the ranks of each node form a subgroup, even if they are not consecutive.
    group : ProcessGroup, optional
        The group to split. Default: the world.
    timeout, backend, group_desc
        As for :func:`new_group`.

    Returns
    -------
    mine : ProcessGroup
        The subgroup of this rank; a NonMember if `group` is without this rank.
    all : list of ProcessGroup or NonMember
        All subgroups; a subgroup without this rank is a NonMember.

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
    ranks = member(group).ranks or member_of("new_subgroups", group).ranks  # which raises
    if group_size is None:
        node_of = dict(zip(current_world().ranks, current_world().nodes))
        rows = [[rank for rank in ranks if node_of[rank] == node] for node in sorted({node_of[rank] for rank in ranks})]
    else:
        size = checks.integer("new_subgroups: group_size", group_size)
        if size < 1 or len(ranks) % size:
            raise ValueError(
                f"new_subgroups: group_size is {size}, "
                f"which does not divide the {len(ranks)} ranks of the group{on_rank()}"
            )
        rows = [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    mine, subgroups = new_subgroups_by_enumeration(rows, timeout, backend, group_desc=group_desc)
    return cast("ProcessGroup", mine), subgroups  # every rank of `group` is in one of them


@c10d_names(only_none=("pg_options",))
def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    *,
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
        The subgroup of this rank; a NonMember if this rank is in no list.
    all : list of ProcessGroup or NonMember
        All subgroups, in the order of the lists.

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
        raise ValueError(f"new_subgroups_by_enumeration: the list of subgroups is empty{on_rank()}")
    checked_ranks("new_subgroups_by_enumeration", [rank for row in rows for rank in row], current_world())
    subgroups = [new_group(row, timeout, backend, group_desc=group_desc) for row in rows]
    mine = next((subgroup for subgroup in subgroups if isinstance(subgroup, ProcessGroup)), subgroups[0])
    return mine, subgroups


@overload
def split_group(
    parent: ProcessGroup | None, color: Integer, *, key: Integer = ...,
    timeout: timedelta | float | None = ..., backend: str | None = ..., group_desc: str | None = ...,
) -> ProcessGroup: ...  # fmt: skip
@overload
def split_group(
    *, parent: ProcessGroup | None = ..., color: Integer, key: Integer = ...,
    timeout: timedelta | float | None = ..., backend: str | None = ..., group_desc: str | None = ...,
) -> ProcessGroup: ...  # fmt: skip
@overload
def split_group(
    parent: ProcessGroup | None = ..., color: Integer | Sequence[Sequence[int]] | None = ..., *, key: Integer = ...,
    timeout: timedelta | float | None = ..., backend: str | None = ..., group_desc: str | None = ...,
    split_ranks: Sequence[Sequence[int]] | None = ...,
) -> Group: ...  # fmt: skip
@c10d_names(only_none=("pg_options",), parent_pg="parent")
def split_group(
    parent: ProcessGroup | None = None,
    color: Integer | Sequence[Sequence[int]] | None = None,
    *,
    key: Integer = 0,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    group_desc: str | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
) -> Group:
    """Split `parent` into one group for each `color`: MPI_Comm_split (MPI-4.1 §7.4.2). Every rank of `parent` calls it.

    Parameters
    ----------
    parent : ProcessGroup, optional
        The group to split. Default: the world.
    color : int, optional
        Ranks with the same color, 0 or more, form a group. Default: this rank is in no group.
    key : int
        The ranks of a group are ordered by `key`, then by their rank in `parent`.
    timeout, backend, group_desc
        As for :func:`new_group`; the default is that of `parent`.
    split_ranks : list of lists of int, optional
        Instead of `color` and `key`, as in c10d: for each group its ranks in `parent`, in the order of the new group.
        The lists are the same on every rank. A rank in no list gets a NonMember. `color` accepts such lists too.

    Returns
    -------
    ProcessGroup or NonMember
        The group of this rank's color; a NonMember if ``color=None``.

    Raises
    ------
    ValueError
        `color` or `key` is out of range, a rank in `split_ranks` is listed twice or not in `parent`, or both are given.
    TypeError
        `color` or `key` is not an integer.
    DistError
        `parent` has been destroyed.

    Examples
    --------
    >>> half = hc.split_group(color=hc.get_rank() % 2, group_desc="half")
    >>> half.ranks  # on 4 ranks: (0, 2), (1, 3), (0, 2), (1, 3)
    (0,)
    >>> reverse = hc.split_group(color=0, key=-hc.get_rank())
    >>> reverse.ranks  # on 4 ranks: (3, 2, 1, 0)
    (0,)
    >>> alone = hc.split_group(split_ranks=[[0]])  # on 4 ranks: a NonMember on ranks 1, 2, 3
    >>> alone.ranks
    (0,)
    """
    group = member_of("split_group", parent)
    if split_ranks is None and isinstance(color, Sequence) and not isinstance(color, str) and _are_lists(color):
        color, split_ranks = None, color
    if split_ranks is not None:
        if color is not None:
            raise ValueError(f"split_group: both color and split_ranks are given; choose one{on_rank()}")
        color, key = _place_in(split_ranks, group)
    if color is not None:
        color = checks.integer("split_group: color", color)
        if not 0 <= color < 1 << 31:
            raise ValueError(f"split_group: color is {color}; expected 0 to 2**31 - 1, or None for no group{on_rank()}")
    key = checks.integer("split_group: key", key)
    if not -(1 << 31) <= key < 1 << 31:
        raise ValueError(f"split_group: key is {key}; expected -2**31 to 2**31 - 1{on_rank()}")
    config = group.config if backend is None else BackendConfig(backend)
    limits = time_limit(timeout)(group)
    usable("split_group", group)
    group.agree_on("split_group")
    mpi = mpi_library.load()
    with failures.translating("split_group", group.comm):
        comm: Any = group.comm.Split(mpi.UNDEFINED if color is None else color, key)
    name = next_name(group_desc)
    if comm == mpi.COMM_NULL:
        _split_backends(group, config, None)
        return NonMember((), name, config)
    mpi_library.private(comm, group.owner.comm)
    with failures.translating("split_group", comm):
        members = comm.allgather(group.ranks[group.rank])
    subgroup = child_of(group.owner, comm, members, config, limits, name, group_desc)
    _split_backends(group, config, subgroup, color or 0)
    connect(subgroup)
    return subgroup


def _are_lists(rows: Sequence[Any]) -> bool:
    return all(isinstance(row, Sequence) for row in rows)


def _place_in(split_ranks: Sequence[Sequence[int]], group: ProcessGroup) -> tuple[int | None, int]:
    """Return this rank's color and key; None and 0 if it is in no list."""
    if isinstance(split_ranks, str) or not isinstance(split_ranks, Sequence) or not _are_lists(split_ranks):
        raise TypeError(f"split_group: split_ranks is {split_ranks!r}; expected a list of lists of ranks{on_rank()}")
    rows = [list(row) for row in split_ranks]
    checked_ranks("split_group", [rank for row in rows for rank in row], group)
    found = next((color for color, row in enumerate(rows) if group.rank in row), None)
    return found, 0 if found is None else rows[found].index(group.rank)


def _split_backends(parent: ProcessGroup, config: BackendConfig, subgroup: ProcessGroup | None, color: int = 0) -> None:
    """Split the parent's existing connections for a new group; every rank of the parent calls it."""
    for device, backend in list(parent.dispatcher.backends.items()):
        name = parent.config.device_map.get(device)
        can_split = type(backend).split is not Backend.split
        if can_split and name is not None and name == config.device_map.get(device):
            split = backend.split(None if subgroup is None else options_for(subgroup, device), color)
            if subgroup is not None and split is not None:
                cast("LazyBackends", subgroup.dispatcher.backends).put(device, split)


def next_name(description: str | None) -> str:
    """Return the name of a new group: its description, or a number."""
    global _made
    try:
        (description or "").encode()
    except UnicodeEncodeError:  # MPI takes names as UTF-8
        raise ValueError(f"group_desc is {description!r}, which has half a character{on_rank()}") from None
    _made += 1
    return description or f"group {_made}"


def count_names_anew() -> None:
    """Number groups from 1 again, as a replacement rank does."""
    global _made
    _made = 0


def usable(operation: str, group: ProcessGroup) -> None:
    """Raise DistError if no group can be made from `group`."""
    if group.is_destroyed:
        raise DistError(f"{operation}: {group.refusal}")
    if group.comm is None:
        raise DistError(f"{operation}: {group!r} has no MPI communicator to make a group of{on_rank()}")


def checked_ranks(operation: str, given: Sequence[Integer], world: ProcessGroup) -> list[int]:
    """Return ranks of a group as ints; raise if one is missing in the group or listed twice."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{operation}: ranks is {given!r}; expected a list of ranks, such as [0, 1]{on_rank()}")
    ranks = [checks.integer(f"{operation}: a rank", rank) for rank in given]
    if not ranks:
        raise ValueError(f"{operation}: the list of ranks is empty{on_rank()}")
    for rank in ranks:
        if not 0 <= rank < world.size:
            raise ValueError(f"{operation}: there is no rank {rank}; expected 0 to {world.size - 1}{on_rank()}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{operation}: a rank is listed twice in {ranks}{on_rank()}")
    return ranks
