"""Checkpoints on two levels: the nodes' own storage, copies on other nodes, and the folder that all ranks share.

Nodes are pretended: a group is told that its ranks are on several, and each of these has a folder of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hpccomm as hc
from hpccomm import checkpoint
from hpccomm.checkpoint import files, nodes, partners
from hpccomm.checkpoint.local import local_folder

from .arrays import assert_same

pytestmark = pytest.mark.usefixtures("process_group")
several = pytest.mark.mpi(min_size=2)

KINDS = {  # of pretended nodes: the node of each rank
    "each rank on a node": lambda size: range(size),
    "two nodes": lambda size: (rank * 2 // size for rank in range(size)),
    "two nodes, ranks in turns": lambda size: (rank % 2 for rank in range(size)),
    "the first alone": lambda size: (min(rank, 1) for rank in range(size)),
    "the last alone": lambda size: (int(rank == size - 1) for rank in range(size)),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder that all ranks share."""
    shared = [tmp_path]
    hc.broadcast_object_list(shared)
    return shared[0]


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
            options = {"keep": 2, "drain_every": None, **options}
            checkpoint.save(
                self.folder, part(step, self.group.rank), step, replicated=replicated(step),
                metadata={"step": step}, axis={"second": 1}, local=self.local, group=self.group, **options,
            )  # fmt: skip
        hc.barrier()

    def load(self, **options: Any) -> Any:
        return checkpoint.load(self.folder, local=self.local, group=self.group, **options) if self.is_member else None

    def check(self, step: int, writers: int, **options: Any) -> None:
        """What is loaded is what so many ranks have saved at this step."""
        found = self.load(**options)
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


def on_first(act: Callable[[], Any]) -> None:
    """Do something to the files, while the other ranks wait."""
    hc.barrier()
    if hc.get_rank() == 0:
        act()
    hc.barrier()


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


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
    job.save(1, partner=False, drain_every=1)
    job.save(2, partner=False)
    job.check(2, size)
    on_first(lambda: shutil.rmtree(job.storage(0)))
    warns = pytest.warns(RuntimeWarning, match=r"step 2 is not whole on the nodes.*loaded step 1 instead")
    if hc.get_rank() == 0:
        with warns:
            job.check(1, size)
    else:
        job.check(1, size)
    if job.is_member:
        with pytest.raises(checkpoint.NoCheckpointError, match="step 2 is not whole on the nodes of this job: rank-"):
            job.load(step=2)
    job.save(2, partner=False)  # what was skipped does not count
    job.check(2, size)
