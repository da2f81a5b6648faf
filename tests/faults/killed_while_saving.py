"""Save a checkpoint, and be killed just before one of the calls that change files: a program of the tests.

    killed_while_saving.py HOW FOLDER STEP [RANK CALL PATH]

saves STEP on all ranks, by HOW ("save", "save_async"), with keep=1; RANK is killed before the first CALL ("replace") of
a path that ends in PATH.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hpccomm as hc
from hpccomm.checkpoint import files

HALF = "half of write"
IsTheEnd = Callable[[list[tuple[str, str]]], bool]  # of the calls made so far, with the one that comes now


def state(step: int, rank: int) -> dict[str, Any]:
    """The state that `rank` saves at a step: two arrays, so that the file is written piece by piece."""
    random = np.random.default_rng([step, rank])
    return {"weights": random.random((rank + 3, 5)), "labels": random.integers(0, 9, 7, dtype=np.int8)}


class Calls:
    """Counts this process's calls that change files, or bring them to the disk, and kills it before one of them."""

    def __init__(self, is_the_end: IsTheEnd) -> None:
        self.made: list[tuple[str, str]] = []
        self.is_the_end = is_the_end

    def note(self, name: str, path: object) -> None:
        """One more call is about to be made."""
        self.made.append((name, re.sub(r"\.[0-9a-f]{8}\.tmp$", ".tmp", str(path))))
        if self.is_the_end(self.made):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Look at every call from here on."""
        for name in ("mkdir", "replace", "unlink", "rmdir"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        fsync = os.fsync

        def counted_fsync(number: int) -> None:
            self.note("fsync", os.readlink(f"/proc/self/fd/{number}"))
            fsync(number)

        os.fsync = counted_fsync
        files.open = self._open  # type: ignore[attr-defined]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.note(name, arguments[-1])
            return function(*arguments, **options)

        return call

    def _open(self, path: Any, mode: str, **options: Any) -> Any:
        if mode != "xb":
            return open(path, mode, **options)
        self.note("open", path)
        # unbuffered: written data are there when the process is killed
        return Written(self, open(path, mode, buffering=0), path)


class Written:
    """A file whose writes are counted, and come in two halves."""

    def __init__(self, calls: Calls, file: Any, path: Any) -> None:
        self.calls = calls
        self.file = file
        self.path = path

    def write(self, data: Any) -> int:
        """Write the first half, and then the second."""
        middle = len(data) // 2
        self.calls.note("write", self.path)
        self.file.write(data[:middle])
        self.calls.note(HALF, self.path)
        return middle + int(self.file.write(data[middle:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


class Alone(hc.ProcessGroup):
    """A group of one rank, which needs no MPI: so that a process that is killed costs milliseconds."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.all_gather_object: Any = self._hand_back  # the dispatcher would call one of the class

    def _hand_back(self, object_list: list[Any], obj: Any) -> None:
        object_list[:] = [obj]


def save(
    how: str, folder: Path, step: int, content: int, is_the_end: IsTheEnd, group: hc.ProcessGroup, **options: Any
) -> Calls:
    """Save the state of `content` as `step`; `how` is the name of a function."""
    calls = Calls(is_the_end)
    calls.watch()
    save_all(how, folder, step, content, group, **options)
    return calls


def save_all(how: str, folder: Path, step: int, content: int, group: hc.ProcessGroup, **options: Any) -> None:
    """Do the same, unwatched."""
    arrays, both = state(content, group.rank), {"both": np.arange(content, content + 3)}
    getattr(hc.checkpoint, how)(folder, arrays, step, replicated=both, keep=1, group=group, **options)
    for array in (*arrays.values(), *both.values()):  # the program goes on
        array[...] = 0
    hc.checkpoint.finish(group)


if __name__ == "__main__":
    how, folder, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    rank, call, path = sys.argv[4:] or ("-1", "", "")

    def is_the_end(made: list[tuple[str, str]]) -> bool:
        return world.rank == int(rank) and made[-1][0] == call and made[-1][1].endswith(path)

    with hc.init_process_group() as world:
        save(how, folder, step, step, is_the_end, world)
