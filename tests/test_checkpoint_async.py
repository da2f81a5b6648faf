"""Checkpoints that are written while the program goes on."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm import checkpoint
from hpccomm.checkpoint import copies, files, saving
from hpccomm.checkpoint.async_saving import AsyncSaves

from .arrays import ALL_DTYPES, LAYOUTS, assert_same, dtype_name, values
from .checkpoints import base, contents, first_ranks, folder, full_disk
from .launch import launch, until
from .test_checkpoint import several, two_steps

__all__ = ["base", "folder"]  # fixtures

pytestmark = pytest.mark.usefixtures("process_group")
Group = hc.ProcessGroup
THREAD = "hpccomm-checkpoint"


@pytest.fixture(autouse=True)
def _finished(the_group_goes_on: None) -> Iterator[None]:
    yield
    with suppress(checkpoint.CheckpointError):
        checkpoint.finish()


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads write nothing until this is set."""
    event, write = threading.Event(), saving.Saving.write

    def write_later(self: saving.Saving) -> None:
        if threading.current_thread().name == THREAD:
            event.wait()
        write(self)

    monkeypatch.setattr(saving.Saving, "write", write_later)
    yield event
    event.set()


def everybodys(mine: Any) -> list[Any]:
    every = [None] * hc.get_world_size()
    hc.all_gather_object(every, mine)
    return every


# -- what is saved -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_what_changes_after_the_call_is_not_in_the_file(folder: Path, dtype: Any, go_on: threading.Event) -> None:
    rank = hc.get_rank()
    given, same = {}, {"0-d": np.array(values(dtype, (), 0)), "empty": np.zeros((2, 0), dtype)}
    for layout in LAYOUTS:
        for shape in ((3, 4), (0, 3)):
            given[f"{layout.__name__} {shape}"] = layout(values(dtype, shape, rank))
        same[layout.__name__] = layout(values(dtype, (2, 3), 0))
    expected = [{name: array.copy() for name, array in each.items()} for each in (given, same)]
    work = checkpoint.save_async(folder, given, 1, replicated=same)
    for array in (*given.values(), *same.values()):
        array[...] = np.zeros((), dtype)
    go_on.set()
    work.wait()
    found = checkpoint.load(folder)
    for before, actual in zip(expected, (found.arrays, found.replicated)):
        assert list(actual) == list(before)
        for name, array in before.items():
            assert_same(actual[name], array, name)


def test_it_is_what_save_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(60.0).reshape(10, 6) + hc.get_rank()
    options: Any = {"replicated": {"w": np.ones(3)}, "metadata": {"rate": 0.1}, "axis": 1}
    checkpoint.save(folder, {"x": x}, 1, **options)
    checkpoint.save_async(folder, {"x": x}, 2, **options).wait()
    hc.barrier()
    of_step = {
        step: {
            name.rpartition("/")[2]: data
            for name, data in contents(folder).items()
            if name.startswith(f"step-{step:010}-")
        }
        for step in (1, 2)
    }
    assert len(of_step[1]) == hc.get_world_size()
    assert of_step[1] == of_step[2]


# -- when ranks agree --------------------------------------------------------------------------------

COMPLETES: dict[str, Callable[[Path, hc.Work, Group], object]] = {
    "wait": lambda folder, work, group: work.wait(),
    "finish": lambda folder, work, group: checkpoint.finish(group),
    "save": lambda folder, work, group: checkpoint.save(folder, {"x": np.zeros(1)}, 4, keep=9, group=group),
    "save_async": lambda folder, work, group: checkpoint.save_async(folder, {"x": np.zeros(1)}, 4, keep=9, group=group),
    "load": lambda folder, work, group: checkpoint.load(folder, group=group),
    "destroy": lambda folder, work, group: group.destroy(),
}


@pytest.mark.parametrize("name", COMPLETES)
def test_what_completes_it(folder: Path, name: str, go_on: threading.Event) -> None:
    group = hc.new_group()
    x = np.full(3, 3.0 + hc.get_rank())
    work = checkpoint.save_async(folder, {"x": x}, 3, keep=9, group=group)
    hc.barrier()
    assert checkpoint.steps(folder) == []
    assert not work.is_completed()
    go_on.set()
    COMPLETES[name](folder, work, group)
    assert work.is_success()
    assert work.sequence_number == 3
    hc.barrier()
    assert_same(checkpoint.load(folder, 3).arrays["x"], x)
    if name != "destroy":
        hc.barrier()
        group.destroy()
        hc.barrier()
    assert checkpoint.steps(folder) == ([3, 4] if name.startswith("save") else [3])
    assert not (folder / ".saving").exists()


def test_asking_is_enough_where_all_ranks_do(folder: Path) -> None:
    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 1)
    until(work.is_completed, "completion")
    assert work.is_success()
    assert checkpoint.steps(folder) == [1]


def test_ranks_may_complete_it_in_different_calls(folder: Path) -> None:
    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 1)
    if hc.get_rank() == 0:
        work.wait()
    checkpoint.finish()
    assert checkpoint.steps(folder) == [1]


def test_the_program_uses_the_group_while_it_is_under_way(folder: Path, go_on: threading.Event) -> None:
    rank, size = hc.get_rank(), hc.get_world_size()
    x = np.full(3, float(rank))
    checkpoint.save_async(folder, {"x": x}, 1)
    for number in range(3):
        hc.all_reduce(x)
        assert everybodys(number) == [number] * size
        with hc.new_group() as group:
            hc.barrier(group)
        if number == 1:
            go_on.set()
    checkpoint.finish()
    assert_same(checkpoint.load(folder).arrays["x"], np.full(3, float(rank)))


def test_a_work_that_is_dropped_is_completed(folder: Path) -> None:
    for step in range(1, 4):
        checkpoint.save_async(folder, {"x": np.full(3, step)}, step)
        gc.collect()
    assert_same(checkpoint.load(folder).arrays["x"], np.full(3, 3))
    hc.barrier()
    assert checkpoint.steps(folder) == [2, 3]
    assert len(os.listdir(folder)) == 4


def test_a_wait_with_a_timeout_can_be_called_again(folder: Path, go_on: threading.Event) -> None:
    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 1)
    with pytest.raises(hc.DistTimeoutError, match=r"checkpoint.save_async #1: not done after 0\.01 s"):
        work.wait(0.01)
    go_on.set()
    work.wait()
    assert checkpoint.steps(folder) == [1]


def test_a_wait_that_a_signals_handler_ends_can_be_called_again(folder: Path, go_on: threading.Event) -> None:
    def stop(number: int, frame: object) -> None:
        raise InterruptedError("stop")

    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 1)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(InterruptedError, match="stop"):
            work.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    go_on.set()
    assert work.wait()
    assert checkpoint.steps(folder) == [1]


def test_saves_of_two_groups_are_under_way_at_once(folder: Path, go_on: threading.Event) -> None:
    groups = [hc.new_group(), hc.new_group()]
    works = []
    for step, group in enumerate(groups):
        x = np.full(3, step)
        works.append(checkpoint.save_async(folder.with_name(f"of-group-{step}"), {"x": x}, step, group=group))
    same = folder.with_name("of-group-0")
    with pytest.raises(
        checkpoint.CheckpointError, match=f"process [0-9]+ on {os.uname().nodename} is saving to {same}"
    ):
        checkpoint.save(same, {"x": np.ones(3)}, 7)
    go_on.set()
    for work in reversed(works):
        work.wait()
    for step in (0, 1):
        assert_same(checkpoint.load(folder.with_name(f"of-group-{step}")).arrays["x"], np.full(3, step))


# -- the thread --------------------------------------------------------------------------------------


def test_the_thread_never_communicates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and threading.current_thread().name == THREAD:
            entered.add(frame.f_code.co_filename)

    group = hc.new_group()
    replicated = {"r": np.ones(1)}
    threading.setprofile(note)  # of threads that begin from here on
    try:
        for step in (1, 2):
            checkpoint.save_async(folder, {"x": np.ones((3, 2))}, step, replicated=replicated, group=group).wait()
    finally:
        threading.setprofile(None)
    package = os.path.dirname(hc.__file__) + os.sep
    ours = {name.removeprefix(package) for name in entered if name.startswith(package)}
    rooms = {name.partition(os.sep)[0] for name in ours}
    assert os.path.join("checkpoint", "saving.py") in ours
    assert rooms <= {"checkpoint", "core"}
    of_the_core = {name for name in ours if name.startswith("core")}
    assert of_the_core <= {os.path.join("core", name) for name in ("arrays.py", "wakes.py")}
    assert not [name for name in entered if "mpi4py" in name]


# -- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["mkdir", "fsync", "replace"])
@pytest.mark.parametrize("name", COMPLETES)
def test_an_error_of_one_ranks_thread_is_one_on_all_and_changes_nothing(
    folder: Path, name: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps(folder)
    group = hc.new_group()
    last = hc.get_world_size() - 1
    before = contents(folder)
    hc.barrier()
    if hc.get_rank() == last or failing == "mkdir":  # whichever rank makes the folder
        monkeypatch.setattr(files.os, failing, full_disk)
    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 3, group=group)
    with pytest.raises(checkpoint.CheckpointError, match="No space left on device: '/the/file'") as caught:
        COMPLETES[name](folder, work, group)
    monkeypatch.undo()
    said = everybodys(str(caught.value))
    assert said == said[:1] * len(said)
    assert said[0].startswith("checkpoint.save_async of step 3: ")
    if hc.get_world_size() > 1 and failing != "mkdir":
        assert said[0].endswith(f"(on rank {last})")
    assert contents(folder) == before
    assert work.exception() is not None
    assert not group.is_destroyed
    hc.barrier()
    checkpoint.save_async(folder, {"x": np.full(3, 3.0)}, 3, group=group)
    assert_same(checkpoint.load(folder, group=group).arrays["x"], np.full(3, 3.0))
    group.destroy()


@several
@pytest.mark.parametrize("name", ["finish", "save", "load"])
def test_an_error_that_some_ranks_have_seen_is_raised_again_on_all(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps(folder)
    group = hc.new_group()
    if hc.get_rank() == 0:
        monkeypatch.setattr(files.os, "fsync", full_disk)
    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 3, group=group)
    if hc.get_rank() == 0:
        with pytest.raises(checkpoint.CheckpointError, match="No space left"):
            work.wait()
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        COMPLETES[name](folder, work, group)
    monkeypatch.undo()
    checkpoint.finish(group)
    checkpoint.save(folder, {"x": np.ones(3)}, 3, group=group)


def test_an_error_that_all_have_seen_is_not_raised_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_steps(folder)
    monkeypatch.setattr(files.os, "fsync", full_disk)
    work = checkpoint.save_async(folder, {"x": np.ones(3)}, 3)
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        work.wait()
    monkeypatch.undo()
    checkpoint.save(folder, {"x": np.ones(3)}, 4)
    hc.barrier()
    assert checkpoint.steps(folder) == [2, 4]


@several
def test_replicated_arrays_that_differ_are_refused(folder: Path) -> None:
    work = checkpoint.save_async(folder, {}, 1, replicated={"w": np.full(3, hc.get_rank())})
    with pytest.raises(ValueError, match=r"of step 1: replicated\['w'\] is not the same on rank 1 as on rank 0"):
        work.wait()
    hc.barrier()
    assert os.listdir(folder) == []


def test_no_memory_for_the_copies_of_one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 7 TiB")

    if hc.get_rank() == hc.get_world_size() - 1:
        monkeypatch.setattr(copies.Copies, "of", none_left)
    with pytest.raises(MemoryError, match=r"allocate 7 TiB; checkpoint\.save needs no memory for copies"):
        checkpoint.save_async(folder, {"x": np.ones(3)}, 1)
    monkeypatch.undo()
    hc.barrier()
    assert os.listdir(folder) == []
    checkpoint.save(folder, {"x": np.ones(3)}, 1)


def test_wrong_arguments_are_refused_at_once_and_leave_nothing_under_way(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"^checkpoint.save_async: arrays\['x'\] is a list"):
        checkpoint.save_async(folder, {"x": [1, 2]}, 1)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="keep_memory is '1 GiB'; expected an integer"):
        checkpoint.save_async(folder, {"x": np.ones(3)}, 1, keep_memory="1 GiB")  # type: ignore[arg-type]
    checkpoint.finish()
    assert not folder.exists()


def test_a_rank_outside_the_group(folder: Path) -> None:
    group = first_ranks(1)
    if isinstance(group, Group):
        checkpoint.save_async(folder, {"x": np.ones(3)}, 1, group=group).wait()
    else:
        with pytest.warns(RuntimeWarning, match="checkpoint.save_async"):
            assert checkpoint.save_async(folder, {"x": np.ones(3)}, 1, group=group).wait()
        checkpoint.finish(group)
    hc.barrier()
    assert checkpoint.steps(folder) == [1]


# -- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep_memory", "allocations"), [(None, 2), (1 << 20, 2), (100, 3), (0, 3)])
def test_memory_is_kept_from_save_to_save(
    folder: Path, keep_memory: int | None, allocations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, allocate = [], copies._allocated

    def note(nbytes: int, is_page_locked: bool) -> Any:
        allocated.append(nbytes)
        return allocate(nbytes, is_page_locked)

    monkeypatch.setattr(copies, "_allocated", note)
    group = hc.new_group()
    for step, count in enumerate((100, 50, 200)):  # the last one needs more
        x = np.arange(float(count))
        checkpoint.save_async(folder, {"x": x}, step, keep_memory=keep_memory, group=group)
        assert_same(checkpoint.load(folder, group=group).arrays["x"], x)
    assert len([nbytes for nbytes in allocated if nbytes]) == allocations


@pytest.mark.parametrize("keep_memory", [None, 0])
def test_memory_that_is_not_kept_is_free_when_the_work_has_ended(
    folder: Path, keep_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, allocate = [], copies._allocated

    def note(nbytes: int, is_page_locked: bool) -> Any:
        memory = allocate(nbytes, is_page_locked)
        allocated.extend([weakref.ref(memory)] if nbytes else [])
        return memory

    monkeypatch.setattr(copies, "_allocated", note)
    group = hc.new_group()
    work = checkpoint.save_async(folder, {"x": np.ones(100)}, 1, keep_memory=keep_memory, group=group)
    work.wait()
    gc.collect()
    (memory,) = allocated
    assert (memory() is None) == (keep_memory == 0)


def test_the_memory_and_the_thread_of_a_group_end_with_it(folder: Path) -> None:
    group = hc.new_group()
    checkpoint.save_async(folder, {"x": np.ones(100)}, 1, group=group).wait()
    memory = weakref.ref(group.attachments[AsyncSaves]._copies._memory[False])
    before = sum(thread.name == "hpccomm-checkpoint" for thread in threading.enumerate())
    group.destroy()
    del group

    def are_gone() -> bool:
        gc.collect()
        now = sum(thread.name == "hpccomm-checkpoint" for thread in threading.enumerate())
        return memory() is None and now < before

    until(are_gone, "end of the group's memory and thread")


@pytest.mark.parametrize("keep_memory", [None, 0])
def test_memory_for_copies_that_were_not_all_made_is_kept_or_free(
    folder: Path, keep_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = hc.new_group()
    known = copies.Copies.of

    def fail_then(self: Any, arrays: Any) -> Any:
        known(self, arrays)
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr(copies.Copies, "of", fail_then)
    with pytest.raises(MemoryError, match="allocate 7 TiB"):
        checkpoint.save_async(folder, {"x": np.ones(100)}, 1, keep_memory=keep_memory, group=group)
    assert bool(group.attachments[AsyncSaves]._copies._memory) == (keep_memory is None)


# -- the end of the program --------------------------------------------------------------------------

PROGRAM = """\
import os, sys, pathlib
import numpy as np
import hpccomm as hc
from hpccomm.checkpoint import files
folder = pathlib.Path(sys.argv[1])
world = hc.init_process_group()
if sys.argv[2] == "full" and world.rank == 1:
    def full_disk(_): raise OSError(28, "No space left on device")
    files.os.fsync = full_disk
hc.checkpoint.save_async(folder, {"x": np.full(1 << 16, world.rank)}, 5)
if sys.argv[3] == "exit": sys.exit(0)
if sys.argv[3] == "destroy": hc.destroy_process_group()
"""


@pytest.mark.serial
@pytest.mark.parametrize("end", ["nothing", "exit", "destroy"])
def test_the_end_of_the_program_completes_it(tmp_path: Path, end: str) -> None:
    finished = launch(2, sys.executable, "-c", PROGRAM, tmp_path, "well", end)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert_same(checkpoint.load(tmp_path, parts={"x": slice(0, None)}).arrays["x"], np.repeat([0, 1], 1 << 16))


@pytest.mark.serial
@pytest.mark.parametrize("end", ["nothing", "destroy"])
def test_an_error_at_the_end_of_the_program_ends_the_job(tmp_path: Path, end: str) -> None:
    finished = launch(2, sys.executable, "-c", PROGRAM, tmp_path, "full", end)
    assert finished.returncode not in (0, 124), finished.stderr
    assert "CheckpointError: checkpoint.save_async of step 5: " in finished.stderr
    named = rf"No space left on device: '{tmp_path}(/\S*/rank-1\.npy)?' \(on rank 1\)"  # its file, or what it makes
    assert re.search(named, finished.stderr), finished.stderr
    assert "CheckpointError on rank" in finished.stderr
    assert checkpoint.steps(tmp_path) == []


def test_a_relative_folder_is_that_of_the_call(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    checkpoint.save_async("here", {"x": np.ones(3)}, 2)
    monkeypatch.chdir(tmp_path)
    checkpoint.finish()
    assert checkpoint.load(folder / "here").step == 2
