"""Halos, redistributions and sparse exchanges to which one rank does not come: the time limit of their group."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from ..launch import launch, time_limit

pytestmark = pytest.mark.serial

PROGRAM = """
    import pathlib, sys, time, numpy as np, hpccomm as hc
    folder = pathlib.Path(sys.argv[1])
    world = hc.init_process_group(timeout=float(sys.argv[3]), on_timeout=sys.argv[2])
    grid = hc.new_grid(0, periodic=True, group_desc="ocean")
    n, me = world.size, world.rank
    x, mine, whole = np.zeros(4), np.full(3, me), np.empty(3 * n, int)
    boxes = slice(0, 3 * n), slice(3 * me, 3 * me + 3)
    halo, deposit = hc.halo_exchange_init(x, grid), hc.halo_accumulate_init(x, grid)
    gathering = hc.redistribute_init(whole, mine, *boxes, group=grid)
    """

ENDS = """
    if me == 1:
        while True:
            time.sleep(1)
    {call}
    """


@pytest.mark.parametrize(
    ("call", "late"),
    [
        ("hc.halo_exchange(x, grid)", "halo_exchange"),
        ("halo.start(); halo.wait()", "halo_exchange_start"),
        ("hc.redistribute(whole, mine, *boxes, grid)", "redistribute"),  # where it gathers boxes
        ("grid.redistribute_init(whole, mine, *boxes)", "redistribute_init"),
        ("hc.halo_accumulate_init(x, grid, width=2)", "halo_accumulate_init"),  # where it gathers sizes
        ("hc.exchange_sparse({0: x}, grid)", "exchange_sparse"),
    ],
)
def test_a_call_that_waits_for_a_late_rank_ends_the_job(call: str, late: str, tmp_path: Path) -> None:
    stderr = ended(ENDS.format(call=call), "abort", tmp_path, 124)
    assert f"rank 1 never reached {late} #" in stderr, stderr
    assert "of 'ocean'" in stderr
    assert "hpccomm: the job ends with status 124" in stderr


RAISES = """
    hc.exchange_sparse({}, grid)  # the first one makes a communicator

    def begun(work):
        work.start()
        return work

    calls = {
        "halo_exchange": lambda: hc.halo_exchange(x, grid, async_op=True),
        "halo_accumulate": lambda: hc.halo_accumulate(x, grid, async_op=True),
        "halo_exchange_start": lambda: begun(halo),
        "halo_accumulate_start": lambda: begun(deposit),
        "redistribute_start": lambda: begun(gathering),
        "exchange_sparse": lambda: hc.exchange_sparse({(me + 1) % n: mine}, grid, async_op=True),
    }
    for name, call in calls.items():
        whole[:], x[:] = -1, [0, me + 1, me + 1, 0]
        raised = folder / f"raised {name}"
        if me == 1:
            while not raised.exists():
                time.sleep(0.01)
            work = call()
        else:
            work = call()
            try:
                work.wait()
            except hc.DistTimeoutError as error:
                assert "is still in flight" in str(error), error
                assert f"rank 1 never reached {name} #{grid.sequence_number} of 'ocean'" in str(error), error
                raised.touch()
            else:
                raise AssertionError(f"{name} has ended without rank 1")
        work.wait(60)
        beside = float(2 - me)  # the other rank's
        if name.startswith("halo_exchange"):
            assert x.tolist() == [beside, me + 1, me + 1, beside]
        elif name.startswith("halo_accumulate"):
            assert x.tolist() == [0, me + 1, me + 1, 0]
        elif name == "redistribute_start":
            assert whole.tolist() == [0, 0, 0, 1, 1, 1]
        else:
            ((source, array),) = work.result().items()
            assert (source, array.tolist()) == (1 - me, [1 - me] * 3)
    raised = folder / "raised"
    if me == 1:
        while not raised.exists():
            time.sleep(0.01)
        hc.exchange_sparse({}, grid)
    else:
        try:
            hc.exchange_sparse({1: x}, grid)  # waits for a Work, and not in MPI
        except hc.DistTimeoutError:
            raised.touch()
    assert hc.exchange_sparse({me: mine}, grid)[me].tolist() == [me] * 3
    print("all have been late")
    """


def test_wait_raises_and_the_exchange_can_still_end(tmp_path: Path) -> None:
    said = ended(RAISES, "raise", tmp_path, 0)
    assert said.count("all have been late") == 2


def ended(rest: str, on_timeout: str, folder: Path, status: int) -> str:
    """Return what a job of two ranks says, which has to end with this status."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(rest), encoding="utf-8")
    env = {"HPCCOMM_DEBUG_DIR": str(folder / "reports")}
    finished = launch(2, sys.executable, program, folder, on_timeout, str(time_limit(2)), timeout=100, env=env)
    assert finished.returncode == status, finished.stderr
    return finished.stdout + finished.stderr
