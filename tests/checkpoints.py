"""What the tests of checkpoints share: folders of all ranks, damage, and warnings of one rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpccomm as hc


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder that all ranks share."""
    shared = [tmp_path]
    hc.broadcast_object_list(shared)
    return shared[0]


@pytest.fixture
def folder(base: Path) -> Path:
    """A folder that all ranks share, which is not there yet."""
    return base / "run" / "checkpoints"


def first_ranks(count: int) -> hc.ProcessGroup | hc.NonMember:
    return hc.new_group(range(count))


def on_first(act: Callable[[], Any]) -> None:
    """Do something to the files, while the other ranks wait."""
    hc.barrier()
    if hc.get_rank() == 0:
        act()
    hc.barrier()


@contextmanager
def first_rank_warns(pattern: str, times: int = 1) -> Iterator[list[warnings.WarningMessage]]:
    """Require that the first rank warns so many times, and the others never; collect these warnings."""
    said: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [each for each in caught if each.category is hc.CheckpointWarning and re.search(pattern, str(each.message))]
    assert len(said) == (times if hc.get_rank() == 0 else 0), said


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def part(x: Any, rank: int, size: int, axis: int = 0) -> Any:
    return np.array_split(x, size, axis)[rank]


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "/the/file")
