"""Removal of old checkpoints, and of files left by killed programs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import files


def prune(folder: Path, unwanted: set[int], step: int, data: str, oldest_spared: float | None) -> list[OSError]:
    """Remove the checkpoints of `unwanted`, manifests first, and files of killed saves; return the errors.

    `data` is the folder of `step`, the newest. Left files that have changed after `oldest_spared` stay.
    """
    in_the_way: list[OSError] = []

    def remove(path: Path, how: Callable[[Path], object]) -> bool:
        try:
            how(path)
        except FileNotFoundError:
            return True
        except OSError as error:  # other files can still be removed
            in_the_way.append(error)
            return False
        return True

    there = files.steps_in(folder)
    gone = {each for each in unwanted & set(there) if remove(files.manifest_path(folder, each), os.unlink)}
    if gone and not remove(folder, files.fsync_folder):
        return in_the_way  # manifests have to be gone before their arrays are removed
    remaining = set(there) - gone
    found: dict[int, list[str]] = {}
    litter: list[str] = []
    for name in os.listdir(folder):
        if match := files.DATA.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
        elif files.UNFINISHED.fullmatch(name):
            litter.append(name)
    for each, names in found.items():
        if each == step:
            litter += [name for name in names if name != data]
        elif each not in remaining:
            litter += names
        elif len(names) > 1 and (named := files.data_of(folder, each)) is not None:
            litter += [name for name in names if name != named]
    for name in litter:
        path = folder / name
        of_whom = files.DATA.fullmatch(name)
        if (of_whom and int(of_whom[1]) in gone) or not _is_spared(path, oldest_spared):
            remove(path, _remove_folder if of_whom else os.unlink)
    return in_the_way


def _is_spared(path: Path, oldest: float | None) -> bool:
    try:
        return oldest is not None and os.lstat(path).st_mtime >= oldest
    except OSError:  # it has been removed
        return False


def _remove_folder(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)  # removes the rest
        raise
