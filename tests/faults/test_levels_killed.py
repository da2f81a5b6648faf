"""Ranks that are killed while they save on two levels, at each call that changes files, and the loss of a node then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpccomm import checkpoint
from hpccomm.checkpoint.local import local_folder

from ..arrays import assert_same
from . import killed_while_saving as program
from .forked_ranks import ForkedRank, run

pytestmark = [
    pytest.mark.once,
    # Python 3.12 and later warn of fork beside the threads of MPI, which the child does not use
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

NODES = (0, 1)
Made = list[tuple[str, str]]


def storage(base: Path, node: int) -> Path:
    return base / f"node-{node}"


def save(base: Path, step: int, content: int, rank: int = -1, kill_at: int = 0) -> list[Made | None]:
    """Save on two nodes, and from there to the shared folder; `rank` is killed before its call of this number.

    Return the calls of each rank that has come to its end.
    """

    def body(group: ForkedRank) -> Made:
        def is_the_end(made: Made) -> bool:
            return group.rank == rank and len(made) == kill_at

        local = storage(base, NODES[group.rank])
        calls = program.save("save", base / "shared", step, content, is_the_end, group, local=local, drain_every=1)
        return calls.made

    return run(NODES, body)


def loaded(base: Path, nodes: tuple[int, ...]) -> int:
    """Load on these nodes, a rank on each; return which content it is, of all ranks alike and bit for bit."""
    renumbered = [nodes.index(node) for node in nodes]

    def body(group: ForkedRank) -> int:
        local = storage(base, nodes[group.rank])
        found = checkpoint.load(base / "shared", parts={"labels": slice(None)}, local=local, group=group)
        content = int(found.replicated["both"][0])
        parts = [program.state(content, rank) for rank in range(len(NODES))]
        assert_same(found.replicated["both"], np.arange(content, content + 3))
        assert_same(found.arrays["labels"], np.concatenate([part["labels"] for part in parts]))
        weights = np.concatenate([part["weights"] for part in parts])
        own = parts[group.rank]["weights"] if group.size == len(NODES) else weights
        assert_same(found.arrays["weights"], own)
        return content

    contents = run(renumbered, body)
    assert len(set(contents)) == 1
    return int(contents[0])


def manifests(base: Path, step: int) -> list[Path]:
    name = f"step-{step:010}.json"
    folders = [base / "shared", *(local_folder(storage(base, node), base / "shared") for node in NODES)]
    return [folder / name for folder in folders if (folder / name).exists()]


@pytest.mark.parametrize("rank", range(len(NODES)))
def test_killed_at_every_call(tmp_path: Path, rank: int) -> None:
    base, kept = tmp_path / "base", tmp_path / "kept"
    assert None not in save(base, 1, content=1)
    base.rename(kept)

    def begin_again() -> None:
        # at the same path, which the names of the nodes' folders are made of
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(kept, base)

    begin_again()
    calls = save(base, 2, content=2)[rank]
    assert calls is not None
    assert {"mkdir", "open", "write", program.HALF, "fsync", "replace", "unlink", "rmdir"} == {
        name for name, _ in calls
    }
    assert [path for name, path in calls if name == "open" and path.endswith(f"rank-{1 - rank}.npy.tmp")], "no copy"
    for number in range(1, len(calls) + 1):
        begin_again()
        save(base, 2, content=2, rank=rank, kill_at=number)
        newest = 2 if manifests(base, 2) else 1
        assert loaded(base, NODES) == newest
        for lost in NODES:  # the first to be killed, and then its node, or the other one
            storage(base, lost).rename(tmp_path / "lost")
            left = tuple(node for node in NODES if node != lost)
            expected = {1, newest} if len(manifests(base, 2)) == 0 else {2}
            assert loaded(base, left) in expected
            (tmp_path / "lost").rename(storage(base, lost))
        assert None not in save(base, 3, content=3)
        assert loaded(base, NODES) == 3
        for folder in (base / "shared", *(local_folder(storage(base, node), base / "shared") for node in NODES)):
            assert len(os.listdir(folder)) == 2, "litter is left"
