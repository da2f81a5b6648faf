"""Two writers of one folder: the second is refused by name; where there are no locks, nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpccomm import checkpoint
from hpccomm.checkpoint import destination, files, writer

from .arrays import assert_same
from .faults.killed_while_saving import Alone
from .launch import ROOT, clean_environment

pytestmark = pytest.mark.serial

HOLD = "import sys; from pathlib import Path; from hpccomm.checkpoint.writer import WriterLock; "
HOLD += "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
HOST = os.uname().nodename


def save(folder: Path, step: int, keep: int = 2) -> None:
    checkpoint.save(folder, {"x": np.full(3, float(step))}, step, keep=keep, group=Alone())


def check(folder: Path, *steps: int) -> None:
    """There are these steps, each whole."""
    assert checkpoint.steps(folder) == [*steps]
    for step in steps:
        assert_same(checkpoint.load(folder, step, group=Alone()).arrays["x"], np.full(3, float(step)))


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def another_writer(folder: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is saving to the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT), **environ}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        kill(process)


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def while_publishing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], when: str = "before") -> None:
    """Let `act` come between the arrays of a save and its manifest, or after that."""
    publish, write = destination.Destination.publish, files.write_durably

    def patched(self: Any, *more: Any) -> None:
        monkeypatch.setattr(destination.Destination, "publish", publish)
        act()
        publish(self, *more)

    def written(path: Path, *more: Any) -> int:
        nbytes = write(path, *more)
        if path.suffix == ".json":
            act()
        return nbytes

    if when == "before":
        monkeypatch.setattr(destination.Destination, "publish", patched)
    else:
        monkeypatch.setattr(files, "write_durably", written)


def test_the_second_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with another_writer(tmp_path, SLURM_JOB_ID="4711") as first:
        refused = rf"process {first.pid} on {HOST} of job 4711 is saving to {tmp_path}, since \d+-.*; one job at a time"
        with pytest.raises(checkpoint.CheckpointError, match=refused):
            save(tmp_path, 2)
        check(tmp_path, 1)
        kill(first)
        save(tmp_path, 2)
    check(tmp_path, 1, 2)
    assert len(os.listdir(tmp_path)) == 4


def test_one_save_within_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    while_publishing(monkeypatch, lambda: save(tmp_path, 2))
    with pytest.raises(checkpoint.CheckpointError, match=f"process {os.getpid()} on {HOST} is saving"):
        save(tmp_path, 3)
    save(tmp_path, 3)
    check(tmp_path, 3)
    assert len(os.listdir(tmp_path)) == 2


def test_a_save_of_another_user_refuses_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = os.open

    def refuse(path: Any, *arguments: Any) -> int:  # root may open every file
        if os.fspath(path).endswith(writer.NAME):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return wrapped(path, *arguments)

    monkeypatch.setattr(writer.os, "open", refuse)
    save(tmp_path, 1)  # there is no such file: it may not be made
    (tmp_path / writer.NAME).write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match=r"another user is saving to .*, remove .*\.saving"):
        save(tmp_path, 2)
    check(tmp_path, 1)


def test_a_folder_whose_file_was_removed_has_another_lock(tmp_path: Path) -> None:
    with another_writer(tmp_path):
        os.unlink(tmp_path / writer.NAME)  # what the message says, where the process is gone for certain
        save(tmp_path, 1)
    check(tmp_path, 1)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_requeued_job_goes_on_where_the_lock_of_its_former_life_is_left(
    tmp_path: Path, restarts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    unfinished = tmp_path / "step-0000000007-01234567"
    with another_writer(tmp_path, SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="0"):
        unfinished.mkdir()
        if restarts == "0":  # another step of the same life
            with pytest.raises(checkpoint.CheckpointError, match="of job 4711 is saving"):
                save(tmp_path, 8)
            return
        save(tmp_path, 8)
        assert unfinished.is_dir()  # that life may still be about to publish it
    save(tmp_path, 9)
    assert not unfinished.exists()
    check(tmp_path, 8, 9)


@pytest.mark.parametrize(("step", "left"), [(2, [2, 3]), (3, [1, 3]), (4, [1, 3, 4])])
def test_without_locks_both_are_whole(
    tmp_path: Path, step: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.fcntl, "flock", no_locks)
    save(tmp_path, 1)
    while_publishing(monkeypatch, lambda: save(tmp_path, step))
    save(tmp_path, 3)
    check(tmp_path, *left)
    save(tmp_path, 5, keep=1)
    save(tmp_path, 6, keep=1)
    check(tmp_path, 6)
    assert len(os.listdir(tmp_path)) == 2, "litter stays longer than until the save after the next"


def test_without_locks_arrays_that_another_has_removed_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.fcntl, "flock", no_locks)
    save(tmp_path, 1)
    while_publishing(monkeypatch, lambda: shutil.rmtree(next(tmp_path.glob("step-0000000002-*"))), "after")
    with pytest.raises(checkpoint.CheckpointError, match="no other job may write to it"):
        save(tmp_path, 2)
    check(tmp_path, 1)


def test_a_lock_that_another_node_has_left_proves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = {"host": "elsewhere", "pid": 1, "job": "1", "restarts": 0, "since": "then"}
    (tmp_path / writer.NAME).write_text(json.dumps(left))  # it is dead, or its locks do not come here
    unfinished = tmp_path / "step-0000000002-01234567"
    unfinished.mkdir()
    save(tmp_path, 3)
    assert unfinished.is_dir()
    save(tmp_path, 4)
    assert not unfinished.exists()
    check(tmp_path, 3, 4)


def test_a_writer_who_comes_later_and_sees_no_lock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = tmp_path / "step-0000000004-01234567"

    def begin_elsewhere() -> None:
        (tmp_path / writer.NAME).write_text(json.dumps({**writer.writer(), "host": "elsewhere"}))
        unfinished.mkdir()

    save(tmp_path, 1)
    while_publishing(monkeypatch, begin_elsewhere)
    save(tmp_path, 2)
    assert unfinished.is_dir()
    save(tmp_path, 3)
    assert not unfinished.exists()
    check(tmp_path, 2, 3)


def test_a_file_of_that_name_that_is_no_lock_is_no_obstacle(tmp_path: Path) -> None:
    for make in (
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b"\xff" * 99),
        lambda path: path.write_text("7"),
    ):
        path = tmp_path / writer.NAME
        make(path)
        save(tmp_path, 1)
        if path.is_dir():
            path.rmdir()
        assert not path.exists()
    check(tmp_path, 1)


@pytest.mark.parametrize("advice", ["taken", "refused", "unknown"])
def test_the_disk_begins_while_blocks_follow(advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []

    def advise(number: int, begin: int, length: int, what: int) -> None:
        assert what == os.POSIX_FADV_DONTNEED
        assert os.fstat(number).st_size >= begin + length, "what is not written yet can't go to the disk"
        advised.append((begin, length))
        if advice == "refused":
            raise OSError(errno.ENOSYS, "not by this file system")

    if advice == "unknown":
        monkeypatch.delattr(os, "posix_fadvise")
    else:
        monkeypatch.setattr(os, "posix_fadvise", advise)
    arrays = {"large": np.arange(9 << 20, dtype=np.uint8), "small": np.ones(5)}
    checkpoint.save(tmp_path / "saved", arrays, 1, group=Alone())
    found = checkpoint.load(tmp_path / "saved", group=Alone()).arrays
    for name, array in arrays.items():
        assert_same(found[name], array)
    begins = [begin for begin, _ in advised]
    assert [length for _, length in advised] == ([] if advice == "unknown" else [4 << 20, 4 << 20, 1 << 20])
    assert np.diff(begins).tolist() == [4 << 20] * (2 * bool(begins))
