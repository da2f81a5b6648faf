"""Destination: the folder of one checkpoint, and how the files in it are published at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from . import files
from .pruning import prune
from .skipped import SkippedSteps
from .together import CheckpointError
from .writer import WriterLock, in_words


@dataclass
class Destination:
    """A folder that all ranks share, to which one step is being saved.

    Each rank writes and may remove its own file; the `leader` holds the lock and does the rest.
    """

    folder: Path
    leader: int = 0  # the rank of the group that takes the lock and writes the manifest
    step: int = -1
    data: Path = Path()  # the step's folder, with the files of the ranks
    lock: WriterLock | None = None
    last_published: float = 0.0

    needs: ClassVar[str] = "the folder has to be on a file system that all ranks share"

    def name(self, step: int, token: str) -> None:
        """Set the name of the step's folder; every rank gives the same token."""
        self.step = step
        self.data = self.folder / f"{files.name_of(step)}-{token}"

    # -- each rank -------------------------------------------------------------------------------

    def write(self, rank: int, write: Callable[[Any], object]) -> int:
        """Write the file of a rank durably, by calling `write`; return its size in bytes."""
        files.make_folder(self.data)
        return files.write_durably(self.data / file_of(rank), write)

    def undo(self, rank: int) -> None:
        """Remove the file of a rank, after the checkpoint has failed on every rank."""
        with suppress(OSError):
            os.unlink(self.data / file_of(rank))
        with suppress(OSError):
            os.rmdir(self.data)  # succeeds on the last rank

    # -- the leader ------------------------------------------------------------------------------

    def refuse_later_steps(self, step: int, overwrite: bool) -> None:
        """Raise if the folder has a later step that will not be removed and that no load has skipped as damaged."""
        there = max(set(files.steps_in(self.folder)) - SkippedSteps(self.folder).steps(), default=-1)
        if there > step and not overwrite:
            by = ""
            with suppress(CheckpointError, OSError):
                by = f", saved by {in_words(files.read_manifest(self.folder, there).get('writer', {}))}"
            raise ValueError(
                f"step is {step}, but {self.folder} has step {there} already{by}; use another folder, or "
                f"overwrite=True, which removes the later steps when this one is complete"
            )

    def take(self, overwrite: bool) -> None:
        """Take the folder's lock."""
        files.make_folder(self.folder)
        self.lock = WriterLock(self.folder)
        self.refuse_later_steps(self.step, overwrite)  # again: another process may have saved it since
        manifests = (files.manifest_path(self.folder, step) for step in files.steps_in(self.folder))
        self.last_published = max((each.stat().st_mtime for each in manifests), default=0.0)

    def release(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()

    def see_all(self, ranks: tuple[int, ...], sizes: list[int | None]) -> None:
        """Raise unless the file of each rank has its size (None: no file). `ranks` are the global ranks."""
        for rank, expected in enumerate(sizes):
            if expected is None:
                continue
            path = self.data / file_of(rank)
            try:
                with open(path, "rb") as file:  # on NFS, open asks the server
                    nbytes = os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                raise CheckpointError(
                    f"rank {ranks[self.leader]} can't see {path}, which rank {ranks[rank]} has written; "
                    f"{self.needs}, and no other job may write to it"
                ) from None
            if nbytes != expected:
                raise CheckpointError(f"{path} has {nbytes} bytes, but rank {ranks[rank]} has written {expected}")

    def publish(self, body: dict[str, Any], see_all: Callable[[], None]) -> None:
        """Write the manifest, which makes the checkpoint exist."""
        path, is_undone = files.manifest_path(self.folder, self.step), False

        def undo() -> None:
            nonlocal is_undone
            is_undone = True
            shutil.rmtree(self.data, ignore_errors=True)

        try:
            files.write_durably(path, lambda out: out.write(files.sealed(body)), undo)
        except OSError as error:
            if is_undone:
                raise
            raise CheckpointError(f"{error}; step {self.step} may be published or not, and its arrays stay") from error
        if not self._is_alone():  # another writer may have removed the arrays
            try:
                see_all()
            except CheckpointError:
                if files.data_of(self.folder, self.step) == self.data.name:
                    os.unlink(path)
                raise

    def prune(self, keep: int | None, overwrite: bool) -> list[OSError]:
        """Remove the steps that are no longer kept; return the errors of files that can't be removed."""
        skipped = SkippedSteps(self.folder)
        there = files.steps_in(self.folder)
        unwanted = skipped.steps() | ({each for each in there if each > self.step} if overwrite else set())
        if keep is not None:
            earlier = [each for each in there if each < self.step and each not in unwanted]
            unwanted |= set(earlier[: max(0, len(earlier) - (keep - 1))])
        # Younger files may belong to another writer, unless the lock proves that there is none.
        oldest_spared = None if self._is_alone() else self.last_published
        left = prune(self.folder, unwanted - {self.step}, self.step, self.data.name, oldest_spared)
        skipped.forget()
        return left

    def _is_alone(self) -> bool:
        return self.lock is not None and self.lock.is_alone()


def file_of(rank: int) -> str:
    """Return the name of the file of `rank`, a rank of the group."""
    return f"rank-{rank}.npy"
