"""Checkpoints on two levels: the nodes' own storage, copies on other nodes, and the folder that all ranks share.

Nodes are pretended: a group is told that its ranks are on several, and each of these has a folder of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc
from hpccomm import checkpoint
from hpccomm.checkpoint import files, nodes, partners, writer
from hpccomm.checkpoint.local import local_folder

from .arrays import assert_same
from .checkpoints import base, first_rank_warns, flip, on_first

__all__ = ["base"]  # a fixture
pytestmark = pytest.mark.usefixtures("process_group")
several = pytest.mark.mpi(min_size=2)

KINDS = {  # of pretended nodes: the node of each rank
    "each rank on a node": lambda size: range(size),
    "two nodes": lambda size: (rank * 2 // size for rank in range(size)),
    "two nodes, ranks in turns": lambda size: (rank % 2 for rank in range(size)),
    "the first alone": lambda size: (min(rank, 1) for rank in range(size)),
    "the last alone": lambda size: (int(rank == size - 1) for rank in range(size)),
}


class Job:
    """A job on pretended nodes, and its two levels."""

    def __init__(self, base: Path, node_of: Callable[[int], Any], ranks: int = 0) -> None:
        ranks = ranks or hc.get_world_size()
        self.group: Any = hc.new_group(range(ranks))
        self.is_member = isinstance(self.group, hc.ProcessGroup)
        self.folder = base / "shared"
        self.nodes = tuple(node_of(ranks))
        self.base = base
        if self.is_member:
            self.group.nodes = self.nodes
            self.local = self.storage(self.nodes[self.group.rank])

    def storage(self, node: int) -> Path:
        return self.base / f"node-{node}"

    def of_node(self, node: int) -> Path:
        return local_folder(self.storage(node), self.folder)

    def save(self, step: int, **options: Any) -> None:
        if self.is_member:
            options = {"keep": 2, "flush_every": None, **options}
            checkpoint.save(
                self.folder, part(step, self.group.rank), step, replicated=replicated(step),
                metadata={"step": step}, axis={"second": 1}, local=self.local, group=self.group, **options,
            )  # fmt: skip
        hc.barrier()

    def load(self, **options: Any) -> Any:
        return checkpoint.load(self.folder, local=self.local, group=self.group, **options) if self.is_member else None

    def check(self, step: int, writers: int) -> None:
        """What is loaded is what so many ranks have saved at this step."""
        found = self.load()
        if found is not None:
            assert (found.step, found.ranks, found.metadata) == (step, writers, {"step": step})
            parts = [part(step, rank) for rank in range(writers)]
            for name, array in found.arrays.items():
                axis = int(name == "second")
                whole = np.concatenate([each[name] for each in parts], axis)
                expected = parts[self.group.rank][name]
                if self.group.size != writers:
                    expected = np.array_split(whole, self.group.size, axis)[self.group.rank]
                assert_same(array, expected, name)
            for name, array in replicated(step).items():
                assert_same(found.replicated[name], array, name)
        hc.barrier()


def part(step: int, rank: int) -> dict[str, Any]:
    random = np.random.default_rng([step, rank])
    return {
        "first": random.random((rank + 3, 5)),
        "second": random.integers(0, 9, (4, rank * 2, 3)).astype(ml_dtypes.bfloat16),
        "none": np.empty((0, 2)),
        "bytes": random.integers(0, 99, 1000, dtype=np.uint8),
    }


def replicated(step: int) -> dict[str, Any]:
    return {"time": np.array(step / 4), "table": np.arange(300) * step}


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def job(request: pytest.FixtureRequest, base: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(partners, "PIECE", 100)  # many messages
    monkeypatch.setattr(files, "BLOCK", 64)
    monkeypatch.setattr(nodes, "PIECE", 256)
    return Job(base, KINDS[request.param])


@several
def test_the_loss_of_any_one_node_loses_nothing(job: Job, base: Path) -> None:
    size = hc.get_world_size()
    job.save(1)
    job.save(2)
    job.check(2, size)
    assert checkpoint.steps(job.folder) == []
    for lost in sorted(set(job.nodes)):
        on_first(lambda lost=lost: job.storage(lost).rename(base / "lost"))  # type: ignore[misc]
        job.check(2, size)  # a new node has taken its place
        left = sorted(set(job.nodes) - {lost})
        for ranks in range(len(left), size):
            Job(base, lambda ranks, left=left: [left[rank % len(left)] for rank in range(ranks)], ranks).check(2, size)  # type: ignore[misc]
        on_first(lambda lost=lost: (base / "lost").rename(job.storage(lost)))  # type: ignore[misc]


@several
def test_a_job_goes_on_after_the_loss_of_a_node(job: Job) -> None:
    size = hc.get_world_size()
    job.save(1)
    on_first(lambda: shutil.rmtree(job.storage(0)))
    job.check(1, size)
    job.save(2)
    on_first(lambda: shutil.rmtree(job.storage(1)))
    job.check(2, size)


@several
def test_without_partners_a_node_is_lost_with_its_files(job: Job) -> None:
    size = hc.get_world_size()
    job.save(1, partner=False, flush_every=1)
    job.save(2, partner=False)
    job.check(2, size)
    on_first(lambda: shutil.rmtree(job.storage(0)))
    with first_rank_warns(r"step 2 is not whole on the nodes.*loaded step 1 instead"):
        job.check(1, size)
    if job.is_member:
        with pytest.raises(checkpoint.NoCheckpointError, match="step 2 is not whole on the nodes of this job: rank-"):
            job.load(step=2)
    job.save(2, partner=False)  # what was skipped does not count
    job.check(2, size)


@several
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_every_so_often_a_checkpoint_goes_to_the_shared_folder(base: Path, how: str) -> None:
    job = Job(base, KINDS["two nodes"])
    drained = []
    for step in range(1, 8):
        if step == 6:  # a new job, which knows of the others by their files only
            job = Job(base, KINDS["two nodes"])
        save(how, job, step, flush_every=3)
        drained.append(checkpoint.latest(job.folder))
        hc.barrier()
    assert drained == [None, None, 3, 3, 3, 6, 6]
    job.check(7, hc.get_world_size())
    on_first(lambda: [shutil.rmtree(job.storage(node)) for node in set(job.nodes)])
    job.check(6, hc.get_world_size())
    assert_same(checkpoint.load(job.folder).replicated["table"], replicated(6)["table"])  # by those who know no nodes
    save(how, job, 8, flush_every=1)
    hc.barrier()  # the first rank has removed what is no longer kept
    assert checkpoint.steps(job.folder) == [6, 8]
    on_first(lambda: None)
    assert [each for node in set(job.nodes) for each in checkpoint.steps(job.of_node(node))] == [8, 8]


def save(how: str, job: Job, step: int, **options: Any) -> None:
    """Save by one of both functions; the arrays change at once."""
    arrays = part(step, job.group.rank)
    options = {"replicated": replicated(step), "metadata": {"step": step}, "axis": {"second": 1}, **options}
    getattr(checkpoint, how)(job.folder, arrays, step, local=job.local, group=job.group, **options)
    for array in arrays.values():
        array[...] = 0
    checkpoint.finish(job.group)


@several
def test_a_copy_takes_the_place_of_a_damaged_file(job: Job) -> None:
    size = hc.get_world_size()
    job.save(1)
    for node in sorted(set(job.nodes)):
        for path in sorted(job.of_node(node).glob("step-*1-*/*")):
            on_first(lambda path=path: flip(path))  # type: ignore[misc]
            job.check(1, size)
            on_first(lambda path=path: flip(path))  # type: ignore[misc]


@several
def test_where_all_copies_are_damaged_the_step_before_is_loaded(base: Path) -> None:
    job, size = Job(base, KINDS["each rank on a node"]), hc.get_world_size()
    job.save(1)
    job.save(2)
    on_first(lambda: [flip(path) for path in base.glob("node-*/*/step-*2-*/rank-1.npy")])
    said = r"step 2 is not whole on the nodes of this job: rank-1.npy \(.*rank-1.npy is damaged.*loaded step 1 instead"
    with first_rank_warns(said):
        job.check(1, size)
    with pytest.raises(checkpoint.CheckpointError, match="step 2 is not whole on the nodes"):
        job.load(step=2)
    assert job.load(step=1).step == 1
    hc.barrier()
    job.save(2)
    job.check(2, size)


@several
def test_a_damaged_manifest_is_read_from_another_node(job: Job) -> None:
    job.save(1)
    for node in sorted(set(job.nodes)):
        manifest = job.of_node(node) / "step-0000000001.json"
        on_first(lambda manifest=manifest: flip(manifest, 40))  # type: ignore[misc]
        job.check(1, hc.get_world_size())
        on_first(lambda manifest=manifest: flip(manifest, 40))  # type: ignore[misc]


@several
def test_parts_of_files_of_other_nodes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 64)
    monkeypatch.setattr(nodes, "PIECE", 128)
    job, size = Job(base, KINDS["each rank on a node"]), hc.get_world_size()
    job.save(1, partner=False)
    whole = np.concatenate([part(1, rank)["bytes"] for rank in range(size)])
    for begin, end in ((0, 3), (60, 70), (63, 1001), (990, 1000 * size), (7, 7)):
        wanted = slice(begin + hc.get_rank(), end)
        assert_same(job.load(parts={"bytes": wanted}).arrays["bytes"], whole[wanted])
    with pytest.raises(ValueError, match="parts has 'x'; the sharded arrays are "):
        job.load(parts={"x": slice(1)})


# -- what goes wrong -----------------------------------------------------------------------------------


@several
def test_one_folder_for_two_nodes_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(base, KINDS["two nodes"])
    job.local = base / "of-all"
    with pytest.raises(checkpoint.CheckpointError, match="local= has to be a folder of each node alone"):
        job.save(1)
    monkeypatch.setattr(writer.fcntl, "flock", no_locks)
    hc.barrier()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"which another node has written: local= has to be a folder of"
    ):
        job.save(1)
    hc.barrier()
    assert list(base.rglob("*.npy")) == []


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@several
def test_two_folders_on_one_node_are_refused(base: Path) -> None:
    job = Job(base, lambda size: [0] * size)
    job.local = base / str(hc.get_rank())
    with pytest.raises(
        ValueError, match=r"local is .* on rank 1, and .* on another one of its node; local= has to be one"
    ):
        job.save(1, partner=False)


def test_partners_on_one_node_are_a_warning(base: Path) -> None:
    job = Job(base, lambda size: [0] * size)
    said = "partner=True, but all ranks are on one node, so there are no copies on another one"
    with first_rank_warns(said):
        job.save(1)
    job.check(1, hc.get_world_size())
    job.save(2, partner=False)
    job.check(2, hc.get_world_size())


@several
@pytest.mark.parametrize(
    ("option", "values"), [("flush_every", (2, 3)), ("partner", (True, False)), ("local", (None, 1))]
)
def test_arguments_that_differ_between_ranks(base: Path, option: str, values: tuple[Any, Any]) -> None:
    job = Job(base, KINDS["two nodes"])
    mine = values[int(hc.get_rank() == 0)]
    if option == "local":
        job.local, options = mine and job.local, {}  # type: ignore[assignment]
    else:
        options = {option: mine}
    with pytest.raises(ValueError, match=f"{option} is .* on rank 1, and "):
        job.save(1, **options)
    with pytest.raises(ValueError, match="flush_every is 0; expected 1 or more"):
        Job(base, KINDS["two nodes"]).save(1, flush_every=0)


@several
@pytest.mark.parametrize("where", ["own", "copy", "drained"])
def test_a_full_disk_changes_nothing(base: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = hc.get_world_size()
    job = Job(base, KINDS["each rank on a node"])
    job.save(1, flush_every=1)
    create, mine = files.create, hc.get_rank()
    tail = f"rank-{mine if where != 'copy' else (mine - 1) % size}.npy."

    def full_disk(path: Path) -> Any:
        is_there = base / "shared" in path.parents if where == "drained" else base / "shared" not in path.parents
        if mine == 1 and is_there and path.name.startswith(tail):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "create", full_disk)
        with pytest.raises(checkpoint.CheckpointError, match=r"No space left.*\(on rank 1\)") as caught:
            job.save(2, flush_every=1)
    hc.barrier()
    assert ("step 2 is complete on the nodes, but not there" in str(caught.value)) == (where == "drained")
    assert where == "copy" or f"device: '{base}" in str(caught.value)
    job.check(2 if where == "drained" else 1, size)
    assert checkpoint.steps(job.folder) == [1]
    assert len(list(job.folder.glob("step-*"))) == 2, "litter is left"
    job.save(2, flush_every=1)
    job.check(2, size)
    assert checkpoint.steps(job.folder) == [1, 2]


@several
def test_a_copy_that_is_not_what_was_written_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(base, KINDS["two nodes"])
    read_at = files.read_at

    def wrong(file: Any, position: int, data: Any, path: Path) -> None:
        read_at(file, position, data, path)
        if hc.get_rank() == 0 and path.name == "rank-0.npy":  # what is sent
            data[-1] ^= 1

    job.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "read_at", wrong)
        with pytest.raises(checkpoint.CheckpointError, match=r"rank-0.npy.*tmp is damaged: a checksum is wrong"):
            job.save(2)
    hc.barrier()
    job.check(1, hc.get_world_size())


def test_a_later_step_on_the_nodes_is_no_less_than_one_in_the_folder(base: Path) -> None:
    job = Job(base, KINDS["each rank on a node"])
    job.save(5, partner=False)
    with pytest.raises(ValueError, match=r"step is 4, but .*node-0.* has step 5 already"):
        job.save(4, partner=False)
    hc.barrier()
    job.save(4, partner=False, overwrite=True)
    job.check(4, hc.get_world_size())


@pytest.mark.serial
def test_a_folder_of_somebody_else_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(base, KINDS["each rank on a node"])
    job.save(1, partner=False)
    assert stat.S_IMODE(job.of_node(0).stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for act in (job.load, lambda: job.save(2, partner=False)):
        with pytest.raises(checkpoint.CheckpointError, match="is not a folder of this user"):
            act()
    monkeypatch.undo()
    elsewhere = job.of_node(0).rename(base / "elsewhere")
    job.of_node(0).symlink_to(elsewhere)
    with pytest.raises(checkpoint.CheckpointError, match="is not a folder of this user"):
        job.save(2, partner=False)


@pytest.mark.once
def test_partners_are_on_the_next_node() -> None:
    assert partners.partners_of([0, 0, 1, 1, 2, 2]) == [2, 3, 4, 5, 0, 1]
    assert partners.partners_of([0, 1, 0, 1]) == [1, 0, 3, 2]
    assert partners.partners_of([0, 1, 1, 1]) == [1, 0, 0, 0]
    assert partners.partners_of([3, 3]) == [None, None]
