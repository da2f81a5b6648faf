"""Copy a node's checkpoint files to the shared folder after the job, on each node independently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..process.stderr import progress
from . import files
from .inspection import Found
from .together import CheckpointError


def drain(found: Found, folder: Path) -> tuple[int, int]:
    """Copy the files of a step from a node's folder; return the number of files now in `folder`, and of all files.

    The node that completes the set writes the manifest, so no node waits for another. CheckpointError if a file is
    damaged, or a job has saved to the folder meanwhile.
    """
    assert found.body is not None
    sizes, data = files.sizes_of_files(found.body), folder / str(found.body["folder"])
    shards = files.shards_of_files(found.body)
    files.make_folder(data)
    for file in progress(found.files_there(), "drained files"):
        contents = shards[file], found.body["block"]
        if files.size_of(data / file) != sizes[file] or _is_damaged(data / file, *contents):
            files.verify_file(found.path_of(file), *contents)
            _copy(found.path_of(file), data / file)
    there = [file for file, size in sizes.items() if files.size_of(data / file) == size]
    if len(there) == len(sizes):
        body = {name: value for name, value in found.body.items() if name != "local"}
        manifest = files.manifest_path(folder, found.step)
        files.write_durably(manifest, lambda out: out.write(files.sealed(body)))
        if not all(files.size_of(data / file) == size for file, size in sizes.items()):
            if files.data_of(folder, found.step) == data.name:  # a job may have saved the same step
                manifest.unlink()
            raise CheckpointError(f"{data} has been removed meanwhile: a job saves to {folder}; wait for its end")
    return len(there), len(sizes)


def _is_damaged(file: Path, *contents: Any) -> bool:
    try:
        files.verify_file(file, *contents)
    except CheckpointError:
        return True
    return False


def _copy(source: Path, target: Path) -> None:
    try:
        files.write_durably(target, files.contents_of(source))
    except FileNotFoundError:
        raise CheckpointError(
            f"{target.parent} has been removed meanwhile: a job saves there; wait for its end"
        ) from None
