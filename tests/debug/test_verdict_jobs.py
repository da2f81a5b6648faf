"""Jobs of three ranks of which one calls something else: what the verdict says."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from ..launch import launch

pytestmark = pytest.mark.serial

PROGRAM = """
    import numpy as np, hpccomm as hc
    world = hc.init_process_group()
    me = world.rank
    other = me == 1
    large = np.ones(2_000_000)[::2]
    {calls}
    hc.barrier()
    """


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            "hc.reduce(large, dst=0) if other else hc.all_reduce(large)",
            r"rank 1 has called reduce \(7.629 MiB float64\)|rank 1 calls reduce \(",
        ),
        (
            "hc.all_reduce(large, async_op=True).wait() if other else hc.all_reduce(large)",
            "MPI does not match a blocking call with an asynchronous one",
        ),
        ("hc.new_group([0]) if other else hc.new_group([0, 1])", r"rank 1 new_group \(ranks 0\)"),
    ],
    ids=["reduce and all_reduce", "blocking and asynchronous", "lists of ranks"],
)
def test_the_verdict_says_what_differs(calls: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(calls=calls)), encoding="utf-8")
    env = {"HPCCOMM_DEBUG_DIR": str(tmp_path / "reports"), "HPCCOMM_TIMEOUT": "3"}
    finished = launch(3, sys.executable, program, timeout=100, env=env)
    assert finished.returncode == 124, finished.stderr
    verdict = [line for line in finished.stderr.splitlines() if "the ranks differ in operation #" in line]
    assert len(verdict) == 1, finished.stderr
    assert "rank 1" in verdict[0]
    assert re.search(said, verdict[0])
