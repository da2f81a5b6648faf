"""Copies of what is on the nodes to the folder that all ranks share, after the job: each node for itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from . import files
from .inspection import Found
from .together import CheckpointError


def drain(found: Found, folder: Path) -> tuple[int, int]:
    """Copy the files of a step from a node's folder; return how many are there then, of how many.

    Whoever finds that all are there writes the manifest; so no node has to wait for another. CheckpointError if a file
    is damaged, or a job has saved to the folder meanwhile.
    """
    assert found.body is not None
    sizes, data = files.sizes_of_files(found.body), folder / str(found.body["folder"])
    shards = files.shards_of_files(found.body)
    files.make_folder(data)
    for file in found.files_there():
        if not _is_there(data / file, sizes[file]):
            files.verify_file(found.path_of(file), shards[file], found.body["block"])
            _copy(found.path_of(file), data / file)
    there = [file for file, size in sizes.items() if _is_there(data / file, size)]
    if len(there) == len(sizes):
        body = {name: value for name, value in found.body.items() if name != "local"}
        files.write_durably(files.manifest_path(folder, found.step), lambda out: out.write(files.sealed(body)))
        if not all(_is_there(data / file, size) for file, size in sizes.items()):
            raise CheckpointError(f"{data} has been removed meanwhile: a job saves to {folder}; wait for its end")
    return len(there), len(sizes)


def _copy(source: Path, target: Path) -> None:
    def copy(out: Any) -> None:
        with open(source, "rb") as file:
            shutil.copyfileobj(file, out, files.BLOCK)

    try:
        files.write_durably(target, copy)
    except FileNotFoundError:
        raise CheckpointError(
            f"{target.parent} has been removed meanwhile: a job saves there; wait for its end"
        ) from None


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
