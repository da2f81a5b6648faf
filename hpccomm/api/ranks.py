"""Query ranks and sizes of groups and nodes, and the device map of a group.

`group` is a ProcessGroup, or None for the world. A process outside the group gets -1 for its rank and for sizes.
"""

from __future__ import annotations

from ..core.annotations import Integer
from ..core.non_member import Group
from .world import is_initialized, member, member_of


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in `group` (default: the world), from 0; -1 if this process is not a member.

    Returns
    -------
    int

    Examples
    --------
    >>> hc.get_rank()  # another one on each rank
    0
    """
    return member(group).rank


def get_world_size(group: Group | None = None) -> int:
    """Return the number of ranks of `group` (default: the world); -1 if this process is not a member.

    Returns
    -------
    int

    Examples
    --------
    >>> hc.get_world_size()
    1
    """
    return member(group).size


def get_group_rank(group: Group | None, global_rank: Integer) -> int:
    """Convert a global rank into the rank in `group`.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        The rank or this process is not a member of `group`.

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

    Returns
    -------
    int

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
    """Return the global ranks of the members of `group` (default: the world), ordered by their ranks in the group.

    Returns
    -------
    list of int

    Examples
    --------
    >>> hc.get_process_group_ranks()  # on 4 ranks: [0, 1, 2, 3]
    [0]
    """
    return list(member(group).ranks)


def get_local_rank(group: Group | None = None) -> int:
    """Return this process's rank among the members of `group` on its node, usually also the number of its GPU.

    Returns
    -------
    int
        From 0; -1 if this process is not a member.

    Examples
    --------
    >>> hc.get_local_rank()  # on 2 nodes with 4 ranks each: 0, 1, 2, 3, 0, 1, 2, 3
    0
    """
    return member(group).local_rank


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among the world's ranks on its node: c10d's name for :func:`get_local_rank`.

    Parameters
    ----------
    fallback_rank : int, optional
        The result before :func:`init_process_group`. Default: raise DistError.

    Returns
    -------
    int

    Examples
    --------
    >>> hc.get_node_local_rank()  # on 2 nodes with 4 ranks each: 0, 1, 2, 3, 0, 1, 2, 3
    0
    """
    return get_local_rank() if fallback_rank is None or is_initialized() else fallback_rank


def get_local_size(group: Group | None = None) -> int:
    """Return the number of members of `group` (default: the world) on this node; -1 if this process is not a member.

    Returns
    -------
    int

    Examples
    --------
    >>> hc.get_local_size()  # on 2 nodes with 4 ranks each: 4
    1
    """
    group = member(group)
    return len(group.local_ranks) if group.rank >= 0 else -1


def get_node_rank(group: Group | None = None) -> int:
    """Return the number of this node among the nodes of `group` (default: the world).

    Returns
    -------
    int
        Counted from 0, in the order of the nodes' lowest ranks; -1 if this process is not a member.

    Examples
    --------
    >>> hc.get_node_rank()  # on 2 nodes with 4 ranks each: 0, 0, 0, 0, 1, 1, 1, 1
    0
    """
    group = member(group)
    return sorted(set(group.nodes)).index(group.nodes[group.rank]) if group.rank >= 0 else -1


def get_node_count(group: Group | None = None) -> int:
    """Return the number of nodes of the members of `group` (default: the world); -1 if this process is not a member.

    Returns
    -------
    int

    Examples
    --------
    >>> hc.get_node_count()  # on 2 nodes with 4 ranks each: 2
    1
    """
    group = member(group)
    return len(set(group.nodes)) if group.rank >= 0 else -1


def get_backend_config(group: Group | None = None) -> str:
    """Return the device map of `group` (default: the world): ``"device:backend"`` pairs, separated by commas.

    Returns
    -------
    str

    Examples
    --------
    >>> group = hc.new_group(backend="cpu:mpi,cuda:nccl")
    >>> hc.get_backend_config(group)
    'cpu:mpi,cuda:nccl'
    """
    return str(member(group).config)


def get_backend(group: Group | None = None) -> str:
    """Return the name of the host backend, or of the only backend; :func:`get_backend_config` returns all.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        This process is not a member of `group`.

    Examples
    --------
    >>> hc.get_backend()
    'mpi'
    """
    device_map = member_of("get_backend", group).config.device_map
    return device_map.get("cpu", next(iter(device_map.values())))
