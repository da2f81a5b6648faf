"""Jobs in which one rank calls something else: what the verdict says."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from hpccomm.native import fastpath

from ..launch import launch

pytestmark = pytest.mark.serial

PROGRAM = """
    import numpy as np, hpccomm as hc
    world = hc.init_process_group()
    me = world.rank
    other = me == 1
    large = np.ones(2_000_000, "i8")[::2]
    small = np.ones(4, "i8")
    {calls}
    hc.barrier()
    """


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            "hc.reduce(large, dst=0, op='band') if other else hc.all_reduce(large, 'band')",
            r"rank 1 has called reduce \(7.629 MiB int64, BAND\)|rank 1 calls reduce \(",
        ),
        (
            "hc.all_reduce(large, async_op=True).wait() if other else hc.all_reduce(large)",
            "MPI does not match a blocking call with an asynchronous one",
        ),
        pytest.param(
            "hc.barrier(); hc.all_reduce(small, 'bor' if other else 'band'); other and hc.recv(small, 0)",
            r"rank 1 has called all_reduce \(4 int64, BOR\)",
            marks=pytest.mark.skipif(fastpath is None, reason="without the compiled extension"),
        ),
        ("hc.new_group([0]) if other else hc.new_group([0, 1])", r"rank 1 new_group \(ranks 0\)"),
    ],
    ids=["reduce and all_reduce", "blocking and asynchronous", "small ones that have passed", "lists of ranks"],
)
def test_the_verdict_says_what_differs(calls: str, said: str, tmp_path: Path) -> None:
    (verdict,) = [line for line in ended(calls, tmp_path) if "the ranks differ in operation #" in line]
    assert "rank 1" in verdict
    assert re.search(said, verdict)


MESSAGES = """
    if me == 0:
        hc.send(small, dst=1, tag=6)
        {send}dst=2, tag={tag})
    elif other:
        hc.recv(small, src=0, tag=5)
    else:
        {receive}"""


@pytest.mark.parametrize(
    ("native", "send", "receive", "sent", "waited"),
    [
        ("1", "hc.isend(small, ", "hc.irecv(small, tag=5).wait()", "", ""),
        ("0", "hc.isend(small, ", "hc.irecv(small, tag=5).wait()", "", ""),
        ("0", "hc.send_object_list([1], ", "hc.recv_object_list([None], src=0, tag=5)", " of objects", " of objects"),
        ("1", "hc.send_object_list([1], ", "hc.recv(small, src=0, tag=5)", " of objects", ""),
        ("1", "hc.isend(small, ", "hc.recv_object_list([None], src=0, tag=5)", "", " of objects"),
    ],
    ids=["compiled", "not compiled", "objects", "objects to an array", "an array to objects"],
)
def test_the_verdict_names_the_tags_under_which_messages_wait(
    native: str, send: str, receive: str, sent: str, waited: str, tmp_path: Path
) -> None:
    last = 7 if sent == waited else 5
    calls = MESSAGES.format(send=send, receive=receive, tag=last)
    lines = ended(calls, tmp_path, HPCCOMM_NATIVE=native, HPCCOMM_TIMEOUT="5")
    for rank, waits, tag in ((1, "", "6"), (2, waited, f"{last}{sent}")):
        said = f"hpccomm: rank {rank} waits for a message with tag 5{waits}; the last from rank 0 to it has tag {tag}"
        assert said in lines, lines


MADE = """
    if other:
        b = hc.new_group([0, 1], group_desc="b")
    a = hc.new_group([0, 1], group_desc="a")
    if not other:
        b = hc.new_group([0, 1], group_desc="b")
    hc.all_reduce(small, group=a)"""


def test_the_verdict_names_groups_that_are_made_in_another_order(tmp_path: Path) -> None:
    lines = "\n".join(ended(MADE, tmp_path, ranks=2, HPCCOMM_TIMEOUT="5"))
    assert "rank 0 is in all_reduce #1 of 'a'" in lines
    first, second = "on rank 0, made at program.py:", "on rank 1, made at program.py:"
    order = ": do all ranks make their groups in the same order?"
    assert f"one group is 'a' {first}11; 'b' {second}10{order}" in lines
    assert f"one group is 'b' {first}13; 'a' {second}11{order}" in lines


def ended(calls: str, folder: Path, ranks: int = 3, **env: str) -> list[str]:
    """Return what a job says that makes these calls and is ended by the watchdog."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(calls=calls)), encoding="utf-8")
    env = {"HPCCOMM_DEBUG_DIR": str(folder / "reports"), "HPCCOMM_TIMEOUT": "3", **env}
    finished = launch(ranks, sys.executable, program, timeout=100, env=env)
    assert finished.returncode == 124, finished.stderr
    return finished.stderr.splitlines()
