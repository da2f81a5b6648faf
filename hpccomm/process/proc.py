"""The processes of this node in /proc (proc(5)), and their files in /dev/shm."""

from __future__ import annotations

import os
from contextlib import suppress

FOLDER = "/dev/shm/"
# After MPI_Init every rank of the node has mapped MPICH's file. Ranks map Open MPI's files when two of them first
# communicate, so those files keep their names until the end.
MAPPED_AT_INIT = ("mpich_shm_",)
MAPPED_LATER = ("sm_segment.",)
ENDED = "hpccomm-ended"  # the name of a process at the end of its program; at most 15 characters


def say_that_it_ends() -> None:
    """Rename this process, so that others on this node see that its program has ended."""
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(ENDED)


def of_process(pid: int | str) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of its ``stat`` from its state on; OSError if it does not exist."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], after.split()


def take_names_away(beginnings: tuple[str, ...], maps: str = "/proc/self/maps") -> None:
    """Unlink this process's mapped files in /dev/shm whose names begin with one of `beginnings`; never raise.

    MPI libraries leave such files behind when a job is killed. An unlinked file exists as long as a process maps it.
    """
    with suppress(Exception), open(maps, encoding="utf-8", errors="surrogateescape") as file:
        for path in {line.split(maxsplit=5)[5].rstrip("\n") for line in file if FOLDER in line}:
            if path.removeprefix(FOLDER).startswith(beginnings) and not path.endswith("(deleted)"):
                with suppress(OSError):  # another rank has unlinked it
                    os.unlink(path)
