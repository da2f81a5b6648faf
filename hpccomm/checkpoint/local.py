"""The local level: a folder on each node, with the files of its ranks, and copies of files of another node.

The folder has the usual form, but each node has the manifest and only some of the files. A step is complete if every
file that its manifest names is on some node.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import files
from .destination import Destination, file_of
from .together import CheckpointError

NOT_SHARED = "local= has to be a folder of each node alone"
NOTHING_HERE = {"last": -1, "undrained": 0}


def local_folder(local: str | os.PathLike[str], folder: Path) -> Path:
    """Return the folder in the node-local storage `local` for the checkpoints of `folder`."""
    path = os.path.realpath(folder)
    name = f"{os.path.basename(path)}-{hashlib.blake2b(path.encode(), digest_size=8).hexdigest()}"
    return Path(local).absolute() / name


def check_owner(path: Path) -> None:
    """Raise CheckpointError if a folder is another user's: anybody can create folders in /tmp and fill them."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CheckpointError(f"{path} is not a folder of this user; remove it, or give another local=")


@dataclass
class LocalLevel(Destination):
    """This node's folder, to which one step is being saved; its `leader` is the first rank of the node."""

    partners: Sequence[int | None] = ()  # of each rank: the rank that holds a copy of its file
    undrained: int = 0  # the number of saves since the last one to the shared folder, including this one
    copies: list[int] = field(default_factory=list)  # the ranks whose files this rank holds copies of
    own: tuple[int, ...] = ()  # the ranks of this node

    needs = "local= has to be one folder for all ranks of a node"

    def describe(self) -> dict[str, Any]:
        """Return the last step on this node, and how many saves were not drained then: all ranks need both."""
        check_owner(self.folder)
        last = max(files.steps_in(self.folder), default=-1)
        with suppress(CheckpointError, OSError, KeyError):
            return {"last": last, "undrained": files.read_manifest(self.folder, last)["local"]["undrained"]}
        return {**NOTHING_HERE, "last": last}

    def take(self, overwrite: bool) -> None:
        """Take the lock of this node's folder, which is closed to other users."""
        files.make_folder(self.folder.parent)
        with suppress(FileExistsError):
            os.mkdir(self.folder, mode=0o700)
        check_owner(self.folder)
        files.fsync_folder(self.folder.parent)
        try:
            super().take(overwrite)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. If that is a rank of this job: {NOT_SHARED}") from None

    def undo(self, rank: int) -> None:
        """Remove this rank's file, and the copies that it holds."""
        for each in (*self.copies, rank):
            super().undo(each)

    def described(self, sizes: Sequence[int | None]) -> dict[str, Any]:
        """Return the manifest's entries for this node alone; `sizes` has the file sizes of all ranks."""
        holds = [file_of(rank) for rank in self._holds() if sizes[rank] is not None]
        return {"holds": holds, "undrained": self.undrained}

    def see_all(self, ranks: tuple[int, ...], sizes: list[int | None]) -> None:
        """Raise unless the files that belong on this node have the right sizes."""
        holds = set(self._holds())
        super().see_all(ranks, [size if rank in holds else None for rank, size in enumerate(sizes)])

    def _holds(self) -> list[int]:
        """Return the ranks whose files belong on this node: its own, and those copied to it."""
        return [rank for rank, partner in enumerate(self.partners) if rank in self.own or partner in self.own]
