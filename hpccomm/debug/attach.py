"""Start watching a new group: add it to the table of groups, and register the hooks that the settings select."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import groups_seen, start

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.group import ProcessGroup
    from ..process.settings import Settings


def prepare(group: ProcessGroup | None = None) -> None:
    """Start the watchdog if it is not running; give it a group's processes and settings."""
    from mpi4py import MPI

    if group is None:
        start.begin(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), "")
    else:
        prepare_spare(group.settings, group.processes)


def prepare_spare(settings: Settings, processes: dict[int, int]) -> None:
    """Start the watchdog, and give it the settings and the processes of its job; a spare has no group yet."""
    from mpi4py import MPI

    start.begin(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), settings.debug_dir, settings.watchdog)
    start.configure(settings, processes)


def attach(group: ProcessGroup) -> None:
    """Give a new group the hooks and checks that the settings select; collective."""
    groups_seen.add(group)
    if group.processes:
        prepare(group)
    if group.settings.debug != "OFF" and group.rank == 0:
        _announce(group)
    if group.settings.debug == "DETAIL" and group.comm is not None:
        from .mismatch.check import compare_calls  # imports MPI

        compare_calls(group)
    groups_seen.register_on(group)
    if group.settings.trace != "0":
        from .trace import files as trace_file

        trace_file.attach(group)


def detach(group: ProcessGroup, all_come: bool) -> None:
    """Write the recording of a group that is being destroyed, by all ranks if `all_come`; its communicator exists."""
    if group.settings.trace != "0":
        from .trace import files as trace_file

        trace_file.detach(group, all_come)


def _announce(group: ProcessGroup) -> None:
    """Log a line about a new group, on its first rank."""
    from ..core.members import abridged
    from ..process.stderr import INFO, log

    nodes = f"{len(set(group.nodes))} node{'s' if len(set(group.nodes)) > 1 else ''}"
    limit = f"timeout {group.timeout.total_seconds():g} s, then {group.on_timeout}"
    log(f"made {group.name!r}: ranks {abridged(group.ranks)} on {nodes}, {group.config}, {limit}", INFO)


def who_is_late() -> str:
    """Return the verdict or "": see `watchdog.who_is_late`."""
    from . import watchdog

    return watchdog.who_is_late()


def last_words() -> Callable[[str], None]:
    """Return the function that writes this rank's report and recording when the job is about to end."""
    from . import watchdog

    return watchdog.last_words
