"""A rank that is killed while it saves, at each of the calls that change files, leaves a checkpoint that is whole."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from hpccomm import checkpoint

from ..arrays import assert_same
from ..launch import launch
from . import killed_while_saving as program

pytestmark = [
    pytest.mark.serial,
    # Python 3.12 and later warn of fork beside the threads of MPI, which the child does not use
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


both_ways = pytest.mark.parametrize("how", ["save", "save_async"])
Made = list[tuple[str, str]]


KILLS = [
    (2, 1, program.HALF, "rank-1.npy.tmp"),
    (2, 1, "replace", "rank-1.npy"),
    (3, 0, "fsync", "rank-0.npy.tmp"),
    (3, 0, "replace", "step-0000000003.json"),
    (4, 0, "unlink", ".json"),
]


def in_a_child(how: str, folder: Path, step: int, content: int, kill_at: int = 0) -> Made:
    """Save in a forked process, which is killed before its call of this number; return the calls it made, if not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            calls = program.save(how, folder, step, content, lambda made: len(made) == kill_at, program.Alone())
            os.write(write, pickle.dumps(calls.made))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if kill_at == 0:
        assert status == 0
        return pickle.loads(said)  # type: ignore[no-any-return]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return []


def check(folder: Path, content: int, ranks: int = 1) -> None:
    """Check that the last checkpoint is the one of `content`, bit for bit."""
    found = checkpoint.load(folder, group=program.Alone())
    parts = [program.state(content, rank) for rank in range(ranks)]
    assert list(found.arrays) == list(parts[0])
    for name, array in found.arrays.items():
        assert_same(array, np.concatenate([part[name] for part in parts]), name)
    assert_same(found.replicated["both"], np.arange(content, content + 3))


def manifest_replaced(calls: Made) -> int:
    """The index of the call at which the new checkpoint begins to exist."""
    (found,) = (i for i, (name, path) in enumerate(calls) if name == "replace" and path.endswith(".json"))
    return found


@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
@both_ways
def test_killed_at_every_call(tmp_path: Path, how: str, step: int) -> None:
    base = tmp_path / "base"
    in_a_child(how, base, 1, content=1)
    calls = in_a_child(how, shutil.copytree(base, tmp_path / "whole"), step, content=2)
    check(tmp_path / "whole", 2)
    names = [name for name, _ in calls]
    assert {"mkdir", "open", "write", program.HALF, "fsync", "replace", "unlink", "rmdir"} == set(names)
    exists = manifest_replaced(calls)
    for number in range(1, len(calls) + 1):
        folder = shutil.copytree(base, tmp_path / f"killed-{number}")
        in_a_child(how, folder, step, content=2, kill_at=number)  # before the call
        check(folder, 2 if number > exists + 1 else 1)
        in_a_child(how, folder, 3, content=3)
        check(folder, 3)
        assert checkpoint.steps(folder) == [3]
        assert len(os.listdir(folder)) == 2, "litter is left"


@both_ways
def test_what_is_renamed_or_named_is_on_the_disk_first(tmp_path: Path, how: str) -> None:
    # a kill leaves the data that the operating system has; this is for a node that loses its power
    folder = tmp_path / "new" / "folder"
    in_a_child(how, folder, 1, content=1)
    calls = in_a_child(how, folder, 2, content=2)
    first = in_a_child(how, tmp_path / "made" / "now", 1, content=1)
    for made in (calls, first):
        for i, (name, path) in enumerate(made):
            parent = str(Path(path).parent)
            if name == "replace":
                written = [each for each in made[:i] if each[1] == f"{path}.tmp"]
                assert written[-1] == ("fsync", f"{path}.tmp"), "a file is renamed before all of it is on the disk"
            if name in ("replace", "mkdir"):
                following = next(each for each in made[i + 1 :] if each[0] == "fsync" or each[0] == "unlink")
                assert following == ("fsync", parent), "a name is not brought to the disk"
        exists = manifest_replaced(made)
        assert not [each for each in made[:exists] if each[0] in ("unlink", "rmdir")]
        assert not [each for each in made[exists + 1 :] if each[0] in ("replace", "open", "write")]
    removals = [i for i, (name, _) in enumerate(calls) if name in ("unlink", "rmdir")]
    assert calls[removals[0]][1].endswith("step-0000000001.json"), "arrays are removed before their manifest"
    assert calls[removals[0] + 1] == ("fsync", str(folder))


@both_ways
def test_ranks_of_jobs_are_killed_one_job_after_the_other(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "checkpoints"
    command = (sys.executable, "-m", program.__name__, how, folder)
    assert launch(2, *command, "1").returncode == 0
    whole = 1
    for step, rank, call, path in KILLS[:: 2 if how == "save_async" else 1]:
        ended = launch(2, *command, str(step), str(rank), call, path)
        assert ended.returncode not in (0, 124), ended.stderr
        whole = 4 if step == 4 else whole
        check(folder, whole, ranks=2)
    assert launch(2, *command, "5").returncode == 0
    check(folder, 5, ranks=2)
    assert len(os.listdir(folder)) == 2, "litter is left"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
@both_ways
@pytest.mark.parametrize("remainder", range(4))  # of the lines' numbers
def test_killed_before_every_line(tmp_path: Path, remainder: int, how: str, step: int) -> None:
    # the lines of all threads are counted together, as they come
    base, folder = tmp_path / "base", tmp_path / "folder"
    in_a_child(how, base, 1, content=1)
    found = []
    for number in count(4 + remainder, 4):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        if not is_killed_before_line(number, how, folder, step):
            break
        found.append(int(checkpoint.load(folder, group=program.Alone()).replicated["both"][0]))
        check(folder, found[-1])
        in_a_child(how, folder, 3, content=3)
        check(folder, 3)
        assert len(os.listdir(folder)) == 2, "litter is left"
    check(folder, 2)
    assert found == sorted(found)
    assert {*found} == {1, 2}


def is_killed_before_line(number: int, how: str, folder: Path, step: int) -> bool:
    """Save in a forked process that is killed before the line of this number in hpccomm.checkpoint."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if "hpccomm/checkpoint" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    child = os.fork()
    if child == 0:
        try:
            threading.settrace(trace)
            sys.settrace(trace)
            program.save_all(how, folder, step, 2, program.Alone())
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)
