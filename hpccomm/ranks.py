"""Who is where: ranks in groups, on nodes, and the device map of a group."""

from __future__ import annotations

import warnings

from .core.group import ProcessGroup
from .world import Group, current_world, member, member_of


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in `group` (default: the world); -1 if it is no member."""
    return member(group).rank


def get_world_size(group: Group | None = None) -> int:
    """Return how many ranks `group` (default: the world) has; -1 if this process is no member."""
    return member(group).size


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in `group` of a global rank; ValueError if it is no member."""
    return member_of(group).group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank of `group`; ValueError if there is no such rank."""
    return member_of(group).global_rank(group_rank)


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """Return the global ranks of the members of `group` (default: the world), in the order of their ranks in it."""
    return list(member(group).ranks)


def get_local_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank among the members of `group` on its node: the usual number of its GPU."""
    return _local_ranks(member_of(group)).index(get_rank())


def get_local_size(group: ProcessGroup | None = None) -> int:
    """Return how many members of `group` run on this node."""
    return len(_local_ranks(member_of(group)))


def get_node_rank(group: ProcessGroup | None = None) -> int:
    """Return the number of this node among the nodes of `group`, counted in the order of their lowest ranks."""
    nodes = _nodes(member_of(group))
    return nodes.index(current_world().nodes[get_rank()])


def get_node_count(group: ProcessGroup | None = None) -> int:
    """Return on how many nodes the members of `group` run."""
    return len(_nodes(member_of(group)))


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return the device map of `group` as text: ``"cpu:mpi,cuda:nccl"``."""
    return str(member_of(group).config)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of the backend for host arrays (or of the only one). Deprecated: use get_backend_config."""
    warnings.warn("get_backend is deprecated: a group has one backend per device; use get_backend_config",
                  DeprecationWarning, stacklevel=2)  # fmt: skip
    device_map = member_of(group).config.device_map
    return device_map.get("cpu", next(iter(device_map.values())))


def _local_ranks(group: ProcessGroup) -> list[int]:
    """Return the global ranks of the members of `group` on this node, in group order."""
    nodes = current_world().nodes
    here_ = nodes[get_rank()]
    return [rank for rank in group.ranks if nodes[rank] == here_]


def _nodes(group: ProcessGroup) -> list[int]:
    nodes = current_world().nodes
    return sorted({nodes[rank] for rank in group.ranks})
