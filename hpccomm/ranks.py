"""Who is where: ranks in groups, on nodes, and the device map of a group."""

from __future__ import annotations

from .core.annotations import Integer
from .core.non_member import Group, NonMember
from .errors import here
from .world import is_initialized, member


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in `group`.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    int
        From 0; -1 if this process is not a member.

    Examples
    --------
    >>> hc.get_rank()  # another one on each rank
    0
    """
    return member(group).rank


def get_world_size(group: Group | None = None) -> int:
    """Return the number of ranks of `group`.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    int
        -1 if this process is not a member.

    Examples
    --------
    >>> hc.get_world_size()
    1
    """
    return member(group).size


def get_group_rank(group: Group | None, global_rank: Integer) -> int:
    """Convert a global rank into the rank in `group`.

    Parameters
    ----------
    group : ProcessGroup
    global_rank : int
        The rank in the world.

    Returns
    -------
    int
        The rank in `group`.

    Raises
    ------
    ValueError
        The rank, or this process, is not a member of `group`.

    Examples
    --------
    >>> last = hc.get_world_size() - 1
    >>> group = hc.new_group([last])
    >>> if hc.get_rank() == last:
    ...     print(hc.get_group_rank(group, last))
    0
    """
    return member(group).group_rank(global_rank)


def get_global_rank(group: Group | None, group_rank: Integer) -> int:
    """Convert a rank in `group` into the global rank.

    Parameters
    ----------
    group : ProcessGroup
    group_rank : int
        The rank in `group`.

    Returns
    -------
    int
        The rank in the world.

    Raises
    ------
    ValueError
        There is no such rank, or this process is not a member of `group`.

    Examples
    --------
    >>> last = hc.get_world_size() - 1
    >>> group = hc.new_group([last])
    >>> if hc.get_rank() == last:
    ...     print(hc.get_global_rank(group, 0))  # on 4 ranks: 3
    0
    """
    return member(group).global_rank(group_rank)


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """Return the global ranks of the members of `group`.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    list of int
        In the order of their ranks in `group`.

    Examples
    --------
    >>> hc.get_process_group_ranks()  # on 4 ranks: [0, 1, 2, 3]
    [0]
    """
    return list(member(group).ranks)


def get_local_rank(group: Group | None = None) -> int:
    """Return this process's rank among the members of `group` on its node: the usual number of its GPU.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    int
        -1 if this process is no member; otherwise from 0.

    Examples
    --------
    >>> hc.get_local_rank()  # on 2 nodes with 4 ranks each: 0, 1, 2, 3, 0, 1, 2, 3
    0
    """
    found = member(group)
    return found.rank if isinstance(found, NonMember) else found.local_rank


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among the ranks of the world on its node: c10d's name of :func:`get_local_rank`.

    Parameters
    ----------
    fallback_rank : int, optional
        What to return before :func:`init_process_group`.

    Returns
    -------
    int
        From 0.

    Raises
    ------
    DistError
        There is no process group, and no `fallback_rank`.

    Examples
    --------
    >>> hc.get_node_local_rank()  # on 2 nodes with 4 ranks each: 0, 1, 2, 3, 0, 1, 2, 3
    0
    """
    return get_local_rank() if fallback_rank is None or is_initialized() else fallback_rank


def get_local_size(group: Group | None = None) -> int:
    """Return the number of members of `group` on this node.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    int
        -1 if this process is no member.

    Examples
    --------
    >>> hc.get_local_size()  # on 2 nodes with 4 ranks each: 4
    1
    """
    found = member(group)
    return found.size if isinstance(found, NonMember) else len(found.local_ranks)


def get_node_rank(group: Group | None = None) -> int:
    """Return the number of this node among the nodes of `group`.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    int
        -1 if this process is no member; otherwise from 0; the nodes are counted in the order of their lowest ranks.

    Examples
    --------
    >>> hc.get_node_rank()  # on 2 nodes with 4 ranks each: 0, 0, 0, 0, 1, 1, 1, 1
    0
    """
    found = member(group)
    return found.rank if isinstance(found, NonMember) else sorted(set(found.nodes)).index(found.nodes[found.rank])


def get_node_count(group: Group | None = None) -> int:
    """Return the number of nodes on which the members of `group` run.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    int
        -1 if this process is no member.

    Examples
    --------
    >>> hc.get_node_count()  # on 2 nodes with 4 ranks each: 2
    1
    """
    found = member(group)
    return found.size if isinstance(found, NonMember) else len(set(found.nodes))


def get_backend_config(group: Group | None = None) -> str:
    """Return the device map of `group` as text.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    str
        ``"device:backend"`` for each device, with commas between.

    Examples
    --------
    >>> group = hc.new_group(backend="cpu:mpi,cuda:nccl")
    >>> hc.get_backend_config(group)
    'cpu:mpi,cuda:nccl'
    """
    return str(member(group).config)


def get_backend(group: Group | None = None) -> str:
    """Return the name of the backend for host arrays, or of the only one; :func:`get_backend_config` has all.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        This rank is not in the group.

    Examples
    --------
    >>> hc.get_backend()
    'mpi'
    """
    found = member(group)
    if found.rank < 0:  # a NonMember
        raise ValueError(f"get_backend: this rank is not in the group ({found!r}){here()}")
    device_map = found.config.device_map
    return device_map.get("cpu", next(iter(device_map.values())))
