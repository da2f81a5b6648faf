"""The processes of this node in /proc (proc(5)), and the files of theirs in /dev/shm."""

from __future__ import annotations

import os
from contextlib import suppress

FOLDER = "/dev/shm/"
# Once MPI_Init is through, every rank of the node has mapped MPICH's file. Those of Open MPI are mapped when two ranks
# first speak to each other, so they keep their names until the end.
MAPPED_AT_INIT = ("mpich_shm_",)
MAPPED_LATER = ("sm_segment.",)
ENDED = "hpccomm-ended"  # the name of a process at the end of its program; 15 characters at most


def say_that_it_ends() -> None:
    """Give this process a name by which others of this node see that its program has ended."""
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(ENDED)


def of_process(pid: int | str) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of its ``stat`` from its state on; OSError where there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], after.split()


def take_names_away(beginnings: tuple[str, ...], maps: str = "/proc/self/maps") -> None:
    """Unlink the files in /dev/shm that this process has mapped and whose names begin so; it never raises.

    MPI libraries leave them there when a job is killed. An unlinked file lives as long as a process has it mapped.
    """
    with suppress(Exception), open(maps, encoding="utf-8", errors="surrogateescape") as file:
        for path in {line.split(maxsplit=5)[5].rstrip("\n") for line in file if FOLDER in line}:
            if path.removeprefix(FOLDER).startswith(beginnings) and not path.endswith("(deleted)"):
                with suppress(OSError):  # another rank has done it
                    os.unlink(path)
