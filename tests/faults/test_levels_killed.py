"""Ranks that are killed while they save on two levels, at each call that changes files, and the loss of a node then."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from hpccomm import checkpoint
from hpccomm.checkpoint.local import local_folder

from ..arrays import assert_same
from ..launch import launch
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
        calls = program.save("save", base / "shared", step, content, is_the_end, group, local=local, flush_every=1)
        return calls.made

    return run(NODES, body)


def content_of(found: checkpoint.Checkpoint, ranks: slice) -> int:
    """Return which content has been loaded, of these ranks, bit for bit."""
    content = int(found.replicated["both"][0])
    parts = [program.state(content, rank) for rank in range(len(NODES))][ranks]
    assert_same(found.replicated["both"], np.arange(content, content + 3))
    for name, array in found.arrays.items():
        assert_same(array, np.concatenate([part[name] for part in parts]), name)
    return content


def loaded(base: Path) -> int:
    """Load on both nodes; return which content it is."""

    def body(group: ForkedRank) -> int:
        found = checkpoint.load(base / "shared", local=storage(base, group.rank), group=group)
        return content_of(found, slice(group.rank, group.rank + 1))

    first, second = run(NODES, body)
    assert first == second
    return int(first)


def loaded_without(base: Path, lost: int) -> int:
    """Load on the node that is left, on one rank; return which content it is."""
    storage(base, lost).rename(base / "lost")
    found = checkpoint.load(base / "shared", local=storage(base, 1 - lost), group=program.Alone())
    (base / "lost").rename(storage(base, lost))
    return content_of(found, slice(None))


def folders(base: Path) -> list[Path]:
    return [base / "shared", *(local_folder(storage(base, node), base / "shared") for node in NODES)]


def manifests(base: Path, step: int) -> list[Path]:
    name = f"step-{step:010}.json"
    return [folder / name for folder in folders(base) if (folder / name).exists()]


@pytest.mark.parametrize("rank", range(len(NODES)))
def test_killed_at_every_call(tmp_path: Path, rank: int, request: pytest.FixtureRequest) -> None:
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
        where = manifests(base, 2)
        assert loaded(base) == (2 if where else 1)
        for lost in NODES:  # of the one that was killed, or the other one
            assert loaded_without(base, lost) in ((1, 2) if len(where) < len(NODES) else (2,))
        if number % 4 and not request.config.getoption("--slow"):
            continue
        assert None not in save(base, 3, content=3)
        assert loaded(base) == 3
        for folder in folders(base):
            assert len(os.listdir(folder)) == 2, "litter is left"


ON_NODES = """
import sys
import hpccomm as hc
from tests.faults import killed_while_saving as program
base, step = sys.argv[1], int(sys.argv[2])
with hc.init_process_group() as world:
    assert hc.get_node_count() == 2
    local = f"{base}/node-{hc.get_node_rank()}"
    if step:
        program.save_all("save", base + "/shared", step, step, world, local=local)
    else:
        found = hc.checkpoint.load(base + "/shared", local=local)
        print(f"rank {world.rank}: {found.step} {found.arrays['weights'].sum():.12g}", flush=True)
"""


@pytest.mark.parametrize("lost", NODES)
def test_a_node_of_mpi_is_lost_with_its_folder(tmp_path: Path, lost: int) -> None:
    def job(ranks: int, step: int) -> str:
        pretended = {"MPIR_CVAR_NUM_CLIQUES": "2"}  # MPICH's
        ended = launch(ranks, sys.executable, "-c", ON_NODES, tmp_path, str(step), env=pretended)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    for step in (1, 2):
        job(3, step)
    shutil.rmtree(storage(tmp_path, lost))
    parts = [program.state(2, rank)["weights"] for rank in range(3)]
    for ranks in (3, 2):
        expected = parts if ranks == 3 else np.array_split(np.concatenate(parts), ranks)
        said = [f"rank {rank}: 2 {part.sum():.12g}" for rank, part in enumerate(expected)]
        assert sorted(job(ranks, 0).splitlines()) == said
