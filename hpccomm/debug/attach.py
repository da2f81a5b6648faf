"""What every new group gets: a key, a place in the watchdog's table, and the hooks that the settings ask for."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.hooks import Hook, RemovableHandle
from ..core.members import some
from ..job.failures import ranks_in_the_job
from ..process.stderr import tell

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

GROUPS: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # those that are there, for the watchdog and the reports
_made: Counter[tuple[int, ...]] = Counter()
_on_new_groups: list[Callable[[ProcessGroup], None]] = []


def groups() -> list[ProcessGroup]:
    """Return the groups that there are; any thread may ask."""
    while True:
        try:
            return list(GROUPS)
        except RuntimeError:  # another thread has just made one
            continue


def attach(group: ProcessGroup) -> None:
    """Take a new group; called by every rank of it."""
    members = process_ranks(group)
    group._process_ranks = members  # type: ignore[attr-defined]
    _made[members] += 1
    text = f"{members} {_made[members]}"
    group._debug_key = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()  # type: ignore[attr-defined]
    GROUPS.add(group)
    if group.processes:
        watch(group)
    if group.settings.debug != "OFF" and group.rank == 0:
        _say(group)
    if group.settings.debug == "DETAIL" and group.comm is not None:
        from .mismatch import check

        check.watch(group)
    for register in _on_new_groups:
        register(group)
    if group.settings.trace != "0":
        from .trace import files as trace_file

        trace_file.attach(group)


def detach(group: ProcessGroup) -> None:
    """See a group go: its ranks have met, and its communicator is still there; called by every rank of it."""
    if group.settings.trace != "0":
        from .trace import files as trace_file

        trace_file.detach(group)


def everywhere(hook_of: Callable[[ProcessGroup], Hook]) -> RemovableHandle:
    """Register a hook on every group that is there, and on those that are made later: ``hook_of(group)`` returns it."""
    key = object()

    def register(group: ProcessGroup) -> None:
        # A group keeps its own handles: a table of them would keep groups alive that are gone.
        group.__dict__.setdefault("_everywhere", {})[key] = group.register_hook(hook_of(group))

    def remove() -> None:
        _on_new_groups.remove(register)
        for group in groups():
            if key in group.__dict__.get("_everywhere", {}):
                group.__dict__["_everywhere"].pop(key).remove()

    for group in groups():
        register(group)
    _on_new_groups.append(register)
    return RemovableHandle(remove)


def process_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group's members in MPI.COMM_WORLD: what one process is called throughout its job."""
    if group.comm is None:
        return group.ranks
    from mpi4py import MPI

    members = group.comm.Get_group()
    translated = ranks_in_the_job(members)
    members.Free()
    return translated if MPI.UNDEFINED not in translated else group.ranks


def watch(group: ProcessGroup | None = None) -> None:
    """Start the watchdog, if it has not been; tell it of a group's processes and settings."""
    from mpi4py import MPI

    from . import watchdog

    said = None if group is None else group.settings
    folder, is_wanted = (said.debug_dir, said.watchdog) if said else ("", None)
    watchdog.watch(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), folder, is_wanted)
    if group is not None:
        watchdog.tell_of(group.settings, group.processes)


def _say(group: ProcessGroup) -> None:
    """Print what a new group is; its first rank does."""
    nodes = f"{len(set(group.nodes))} node{'s' if len(set(group.nodes)) > 1 else ''}"
    limit = f"timeout {group.timeout.total_seconds():g} s, then {group.on_timeout}"
    tell(f"hpccomm: made {group.name!r}: ranks {some(group.ranks)} on {nodes}, {group.config}, {limit}")
