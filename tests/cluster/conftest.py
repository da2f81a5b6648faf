"""Tests on a real Slurm: they are there where the cluster is (`make test-cluster`), seen from its head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/run/hpccomm-cluster/ready").exists():
    collect_ignore_glob = ["*"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that all nodes see, from which the batch scripts can be submitted."""
    from ..launch import ROOT

    for name in ("jobs", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """End what a test leaves in the queue, also one that has failed; and no process may be left on any node."""
    from .slurm import eventually, processes, run

    yield
    run("scancel", "--user=root")
    eventually(lambda: not run("squeue", "--noheader").stdout, says=lambda: run("squeue").stdout)
    eventually(lambda: not processes("slurmstepd: ["), says=lambda: "\n".join(processes("slurmstepd: [")))
