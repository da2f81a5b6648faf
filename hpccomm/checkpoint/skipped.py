"""Damaged steps that a load has skipped: the next save ignores and removes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from . import files

Identity = tuple[int, int, int]  # of a manifest; a newer manifest has another one


class SkippedSteps:
    """The steps of one folder that this process has skipped; kept on the first rank of the loading group."""

    _of_folders: ClassVar[dict[str, dict[int, Identity]]] = {}

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = os.path.realpath(folder)

    def add(self, step: int) -> None:
        """Note that `step` is damaged."""
        if identity := self._identity(step):
            self._of_folders.setdefault(self._key, {})[step] = identity

    def steps(self) -> set[int]:
        """Return the skipped steps that have not been saved again."""
        skipped = self._of_folders.get(self._key, {})
        return {step for step, identity in skipped.items() if self._identity(step) == identity}

    def forget(self) -> None:
        """Clear the list."""
        self._of_folders.pop(self._key, None)

    def _identity(self, step: int) -> Identity | None:
        try:
            found = os.stat(files.manifest_path(self._folder, step))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
