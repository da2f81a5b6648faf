"""What every new group gets: a place in the watchdog's table, and the hooks that the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.members import abridged
from ..process.stderr import tell
from . import groups_seen, watchdog
from .trace import files as trace_file

if TYPE_CHECKING:
    from ..core.group import ProcessGroup


def watch(group: ProcessGroup | None = None) -> None:
    """Start the watchdog, if it has not been; tell it of a group's processes and settings."""
    from mpi4py import MPI

    said = None if group is None else group.settings
    folder, is_wanted = (said.debug_dir, said.watchdog) if said else ("", None)
    watchdog.watch(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), folder, is_wanted)
    if group is not None:
        watchdog.tell_of(group.settings, group.processes)


def attach(group: ProcessGroup) -> None:
    """Register what the settings ask for on a new group; every rank of it calls this."""
    groups_seen.see(group)
    if group.processes:
        watch(group)
    if group.settings.debug != "OFF" and group.rank == 0:
        _say(group)
    if group.settings.debug == "DETAIL" and group.comm is not None:
        from .mismatch.check import watch as compare  # which loads MPI

        compare(group)
    groups_seen.register_on(group)
    if group.settings.trace != "0":
        trace_file.attach(group)


def detach(group: ProcessGroup) -> None:
    """Write what was recorded of a group that ends. Its ranks have met, and its communicator is still there."""
    if group.settings.trace != "0":
        trace_file.detach(group)


def _say(group: ProcessGroup) -> None:
    """Print what a new group is; its first rank does."""
    nodes = f"{len(set(group.nodes))} node{'s' if len(set(group.nodes)) > 1 else ''}"
    limit = f"timeout {group.timeout.total_seconds():g} s, then {group.on_timeout}"
    tell(f"hpccomm: made {group.name!r}: ranks {abridged(group.ranks)} on {nodes}, {group.config}, {limit}")
