"""Who is where: ranks in groups, on nodes, and the device map of a group."""

from __future__ import annotations

import warnings

from .core.non_member import Group, NonMember
from .world import member


def get_rank(group: Group | None = None) -> int:
    """Return this process's rank in `group` (default: the world); -1 if it is no member."""
    return member(group).rank


def get_world_size(group: Group | None = None) -> int:
    """Return how many ranks `group` (default: the world) has; -1 if this process is no member."""
    return member(group).size


def get_group_rank(group: Group | None, global_rank: int) -> int:
    """Return the rank in `group` of a global rank; ValueError if it is no member."""
    return member(group).group_rank(global_rank)


def get_global_rank(group: Group | None, group_rank: int) -> int:
    """Return the global rank of a rank of `group`; ValueError if there is no such rank."""
    return member(group).global_rank(group_rank)


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """Return the global ranks of the members of `group` (default: the world), in the order of their ranks in it."""
    return list(member(group).ranks)


def get_local_rank(group: Group | None = None) -> int:
    """Return this process's rank among the members of `group` on its node: the usual number of its GPU.

    -1 if it is no member.
    """
    found = member(group)
    return found.rank if isinstance(found, NonMember) else found.local_rank


def get_local_size(group: Group | None = None) -> int:
    """Return how many members of `group` run on this node; -1 if this process is no member."""
    found = member(group)
    return found.size if isinstance(found, NonMember) else len(found.local_ranks)


def get_node_rank(group: Group | None = None) -> int:
    """Return the number of this node among the nodes of `group`, counted in the order of their lowest ranks.

    -1 if this process is no member.
    """
    found = member(group)
    return found.rank if isinstance(found, NonMember) else sorted(set(found.nodes)).index(found.nodes[found.rank])


def get_node_count(group: Group | None = None) -> int:
    """Return on how many nodes the members of `group` run; -1 if this process is no member."""
    found = member(group)
    return found.size if isinstance(found, NonMember) else len(set(found.nodes))


def get_backend_config(group: Group | None = None) -> str:
    """Return the device map of `group` as text: ``"cpu:mpi,cuda:nccl"``."""
    return str(member(group).config)


def get_backend(group: Group | None = None) -> str:
    """Return the name of the backend for host arrays (or of the only one). Deprecated: use get_backend_config."""
    warnings.warn("get_backend is deprecated: a group has one backend per device; use get_backend_config",
                  DeprecationWarning, stacklevel=2)  # fmt: skip
    device_map = member(group).config.device_map
    return device_map.get("cpu", next(iter(device_map.values())))
