"""What every new group gets: a key, a place in the watchdog's table, and the hooks that the settings ask for."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from typing import TYPE_CHECKING

from ..core.group import some

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

GROUPS: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # those that are there, for the watchdog and the reports
_made: Counter[tuple[int, ...]] = Counter()


def attach(group: ProcessGroup) -> None:
    """Take a new group; called by every rank of it."""
    members = process_ranks(group)
    group._process_ranks = members  # type: ignore[attr-defined]
    _made[members] += 1
    text = f"{members} {_made[members]}"
    group._debug_key = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()  # type: ignore[attr-defined]
    GROUPS.add(group)
    if group.processes:
        _watch(group)
    if group.settings.debug != "OFF" and group.rank == 0:
        _say(group)
    if group.settings.debug == "DETAIL" and group.comm is not None:
        from .mismatch import watch

        watch(group)


def process_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group's members in MPI.COMM_WORLD: what one process is called throughout its job."""
    if group.comm is None:
        return group.ranks
    from mpi4py import MPI

    members, everyone = group.comm.Get_group(), MPI.COMM_WORLD.Get_group()
    translated = tuple(MPI.Group.Translate_ranks(members, None, everyone))
    members.Free()
    everyone.Free()
    return translated if MPI.UNDEFINED not in translated else group.ranks


def _watch(group: ProcessGroup) -> None:
    from mpi4py import MPI

    from . import watchdog

    watchdog.watch(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), group.settings.debug_dir)
    watchdog.tell_of(group.settings, group.processes)


def _say(group: ProcessGroup) -> None:
    """Print what a new group is; its first rank does."""
    from .report import tell

    nodes = f"{len(set(group.nodes))} node{'s' if len(set(group.nodes)) > 1 else ''}"
    limit = f"timeout {group.timeout.total_seconds():g} s, then {group.on_timeout}"
    tell(f"hpccomm: made {group.name!r}: ranks {some(group.ranks)} on {nodes}, {group.config}, {limit}")
