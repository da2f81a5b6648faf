"""Files that MPI libraries leave in /dev/shm when a job is killed: they are unlinked early, or at the end.

An unlinked file lives as long as a process has it mapped.
"""

from __future__ import annotations

import contextlib
import os

FOLDER = "/dev/shm/"
# Once MPI_Init is through, every rank of the node has mapped MPICH's file. Those of Open MPI are mapped when two ranks
# first speak to each other, so they keep their names until the end.
MAPPED_AT_INIT = ("mpich_shm_",)
MAPPED_LATER = ("sm_segment.",)


def take_names_away(beginnings: tuple[str, ...], maps: str = "/proc/self/maps") -> None:
    """Unlink the files in /dev/shm that this process has mapped and whose names begin so; it never raises."""
    with contextlib.suppress(Exception), open(maps, encoding="utf-8", errors="surrogateescape") as file:
        for path in {line.split(maxsplit=5)[5].rstrip("\n") for line in file if FOLDER in line}:
            if path.removeprefix(FOLDER).startswith(beginnings) and not path.endswith("(deleted)"):
                with contextlib.suppress(OSError):  # another rank has done it
                    os.unlink(path)
