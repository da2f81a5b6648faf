"""Find the checkpoints in a folder, and check if they are complete: without communication, from any process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..process.stderr import progress
from . import files
from .together import CheckpointError


@dataclass
class Found:
    """One step in one folder."""

    step: int
    folder: Path  # of its manifest
    body: dict[str, Any] | None  # the manifest; None if it is damaged or missing, which `problems` then says
    problems: list[str] = field(default_factory=list)  # known faults

    @property
    def sizes(self) -> dict[str, int]:
        """The files that belong in the folder, with their sizes in bytes; empty without a manifest."""
        if self.body is None:
            return {}
        sizes = files.sizes_of_files(self.body)
        holds = self.body.get("local", {}).get("holds", sizes)  # a node's folder has only a part of the files
        return {file: sizes[file] for file in holds if file in sizes}

    def path_of(self, file: str) -> Path:
        """Return the path of a rank's file; the step must have a manifest."""
        assert self.body is not None
        return self.folder / str(self.body["folder"]) / file

    def files_there(self) -> list[str]:
        """Return the files that exist with the right size."""
        return [file for file, nbytes in self.sizes.items() if files.size_of(self.path_of(file)) == nbytes]

    def verify(self) -> None:
        """Read all files, and add damaged ones to the problems."""
        if self.body is None:
            return
        shards = files.shards_of_files(self.body)
        for file in progress(self.sizes, f"verified files of step {self.step}"):
            if files.size_of(self.path_of(file)) is None:
                continue  # already a problem
            try:
                files.verify_file(self.path_of(file), shards[file], self.body["block"])
            except (CheckpointError, OSError) as error:
                self.problems.append(str(error))


def inspect(folder: Path) -> Iterator[Found]:
    """Yield the steps in a folder, in ascending order, also those without a manifest; read no array."""
    published = set(files.steps_in(folder))
    for step in sorted(published | _unpublished(folder)):
        if step not in published:
            yield Found(step, folder, None, ["it has no manifest: its save has not ended, or was killed"])
            continue
        try:
            found = Found(step, folder, files.read_manifest(folder, step))
        except (CheckpointError, OSError) as error:
            yield Found(step, folder, None, [str(error)])
            continue
        for file, nbytes in found.sizes.items():
            size = files.size_of(found.path_of(file))
            if size is None:
                found.problems.append(f"{found.path_of(file)} is missing")
            elif size != nbytes:
                found.problems.append(f"{found.path_of(file)} has {size} bytes, not {nbytes}")
        yield found


def whole(found: list[Found], step: int | None = None) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the manifest and the files of the last step, or of `step`, collected from all folders.

    CheckpointError if a file is in none of them.
    """
    published = [each for each in found if each.body is not None and step in (None, each.step)]
    if not published:
        raise CheckpointError("there is no manifest that can be read")
    last = max(each.step for each in published)
    of_last = [each for each in published if each.step == last]
    missing: list[str] = []
    for body in (each.body or {} for each in of_last):
        same = [each for each in of_last if each.body and each.body["folder"] == body["folder"]]
        paths = {file: each.path_of(file) for each in same for file in each.files_there()}
        missing = sorted(files.sizes_of_files(body).keys() - paths.keys())
        if not missing:
            return body, paths
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise CheckpointError(f"step {last} is not whole: {missing[0]}{more} is missing; --step names another one")


def _unpublished(folder: Path) -> set[int]:
    with suppress(FileNotFoundError):
        return {int(match[1]) for match in map(files.DATA.fullmatch, os.listdir(folder)) if match}
    return set()
