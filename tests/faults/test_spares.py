"""Spares: they wait in init_process_group, take the places of dead ranks, and leave where they are not needed.

Each case is a job of its own. Its processes are numbered by MPI.COMM_WORLD; on one node the last ones are the spares.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.job import failures
from hpccomm.job.reserve import chosen, placed

from ..launch import launch

pytestmark = pytest.mark.serial
survives = pytest.mark.skipif(MPI.get_vendor()[0] != "Open MPI", reason="only Open MPI survives dead ranks")

BEGIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import numpy as np
    import hpccomm as hc

    FOLDER, PROCESS, seen = Path(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_RANK"]), {}

    def write_down():
        (FOLDER / f"{PROCESS}.json").write_text(json.dumps(seen))

    def die(pid=os.getpid()):
        os.kill(pid, signal.SIGKILL)

    def wait_for(file):
        while not (FOLDER / file).exists():
            time.sleep(0.01)

    def sum_of_ranks(group=None):
        x = np.array([float(hc.get_rank())])
        hc.all_reduce(x, group=group)
        return x[0]
"""


def run(program: str, folder: Path, ranks: int, timeout: float = 60) -> tuple[dict[int, Any], Any]:
    """Run a job under ULFM; return what each process has written down, and how the job has ended."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(program))
    ended = launch(ranks, sys.executable, file, folder, timeout=timeout, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    assert ended.returncode != 124, f"{ended.stdout}\n{ended.stderr}"
    return {int(each.stem): json.loads(each.read_text()) for each in folder.glob("*.json")}, ended


# -- whose turn it is ----------------------------------------------------------------------------------


@pytest.mark.once
def test_spares_are_the_last_ranks_of_the_nodes_in_turn() -> None:
    assert chosen([0] * 5, 2) == {3, 4}
    nodes = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert chosen(nodes, 1) == {8}
    assert chosen(nodes, 3) == {8, 5, 2}
    assert chosen(nodes, 4) == {8, 5, 2, 7}
    assert chosen([0, 1, 0, 1, 0, 1], 2) == {5, 4}
    assert chosen([0, 0, 0, 0, 1], 3) == {4, 3, 2}
    assert chosen([0, 0], 0) == set()


@pytest.mark.once
def test_the_first_spare_takes_the_first_empty_place() -> None:
    assert placed([0, 2, None, None], 4) == ({0: 0, 2: 1, 1: 2, 3: 3}, 0)
    assert placed([None, 1, None, 0], 2) == ({1: 1, 0: 3}, 0)
    assert placed([3, None], 4) == ({3: 0, 0: 1}, 2)
    assert placed([None, None], 0) == ({}, 0)


# -- refusals ------------------------------------------------------------------------------------------


def test_spares_need_an_mpi_that_survives_dead_ranks() -> None:
    with pytest.raises(hc.UnsupportedOperationError, match=r"spares is 2, but .*`mpirun --with-ft ulfm`"):
        hc.init_process_group(spares=2)
    with pytest.raises(TypeError, match=r"spares is 1\.5; expected an integer"):
        hc.init_process_group(spares=1.5)  # type: ignore[arg-type]
    assert not hc.is_initialized()


@pytest.mark.parametrize("spares", [-1, 1])
def test_one_rank_at_least_has_to_work(spares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_async_mpi_finalize", "1")
    monkeypatch.setattr(failures, "is_on", lambda: True)
    with pytest.raises(ValueError, match=f"spares is {spares}; expected 0 to 0, for MPI has 1 ranks"):
        hc.init_process_group(spares=spares)


def test_without_fault_tolerance_replace_failed_says_how_to_start_the_job(process_group: hc.ProcessGroup) -> None:
    with pytest.raises(hc.UnsupportedOperationError, match=r"replace_failed: .*`mpirun --with-ft ulfm`"):
        hc.replace_failed()


# -- unused --------------------------------------------------------------------------------------------

UNUSED = """
    try:
        world = hc.init_process_group(spares=2)
    except SystemExit as end:
        seen["status"] = end.code
        write_down()
        raise
    seen["world"] = [world.rank, world.size, world.is_replacement, sum_of_ranks()]
    write_down()
"""
ENDS = {
    "by destroy_process_group": "hc.destroy_process_group()",
    "without destroying anything": "",
    "one after the other": "hc.destroy_process_group() if world.rank else time.sleep(0.3)",
    "by sys.exit(0)": "sys.exit(0)",
}


@survives
@pytest.mark.parametrize("end", ENDS)
def test_spares_that_are_not_needed_leave_in_silence(end: str, tmp_path: Path) -> None:
    seen, ended = run(textwrap.dedent(UNUSED) + ENDS[end], tmp_path, 4)
    assert seen[2] == seen[3] == {"status": 0}
    assert seen[0] == {"world": [0, 2, False, 1]}
    assert seen[1] == {"world": [1, 2, False, 1]}
    assert ended.returncode == 0
    assert "hpccomm" not in ended.stderr


@survives
def test_after_a_world_with_spares_another_one_needs_a_communicator_of_the_others(tmp_path: Path) -> None:
    program = """
        world = hc.init_process_group(spares=1)
        others = world.comm.Dup()
        hc.destroy_process_group()
        try:
            hc.init_process_group()
        except hc.DistError as error:
            seen["text"] = str(error)
        world = hc.init_process_group(comm=others)
        seen["sum"] = sum_of_ranks()
        hc.destroy_process_group()
        write_down()
        """
    seen, ended = run(program, tmp_path, 3)
    assert sorted(seen) == [0, 1]
    for each in seen.values():
        assert "the spares of the world before have left the program; give a communicator" in each["text"]
        assert each["sum"] == 1
    assert ended.returncode == 0


# -- in the places of the dead -------------------------------------------------------------------------


@survives
def test_two_dead_ranks_are_replaced_and_groups_grids_and_arrays_are_made_again(tmp_path: Path) -> None:
    program = """
        def everything():
            pair = hc.split_group(color=hc.get_rank() // 2)
            first = hc.new_group([0, 3])
            grid = hc.new_grid((2, 2))
            shared = hc.empty_shared(1)
            shared[0] = hc.get_rank()
            hc.fence(shared)
            return pair, first, grid, shared

        world = hc.init_process_group(spares=2, timeout=50, group_name="team")
        if not world.is_replacement:
            old, persistent = everything(), hc.all_reduce_init(np.ones(4))
            world.store.set(str(world.rank), "before")
            hc.barrier()
            if world.rank in (0, 3):
                die()
            try:
                while True:
                    hc.barrier()
            except hc.RankFailedError as error:
                seen["ranks"], seen["text"] = error.ranks, str(error)
            new = hc.replace_failed(world)
            seen["same"] = [new is hc.GroupMember.WORLD, new is world]
            seen["refusals"] = {}
            for name, act in {
                "world": lambda: hc.barrier(world),
                "pair": lambda: hc.barrier(old[0]),
                "grid": lambda: hc.barrier(old[2]),
                "shared": lambda: hc.fence(old[3]),
                "persistent": persistent.start,
                "replace": lambda: hc.replace_failed(world),
                "shrink": lambda: hc.shrink_group(world),
            }.items():
                try:
                    act()
                except (hc.DistError, ValueError) as error:
                    seen["refusals"][name] = str(error)
            world = new
        pair, first, grid, shared = everything()
        seen["world"] = [world.rank, world.size, world.is_replacement, world.name, world.timeout.total_seconds()]
        seen["groups"] = [pair.ranks, first.ranks, grid.coords, [hc.peer_view(shared, rank)[0] for rank in range(4)]]
        seen["names"] = [pair.name, first.name]
        seen["sums"] = [sum_of_ranks(), sum_of_ranks(pair)]
        large = np.ones(1 << 18)
        hc.all_reduce(large, async_op=True).wait()
        seen["large"] = float(large[-1])
        world.store.set(f"after {world.rank}", str(world.rank))
        seen["store"] = [value.decode() for value in world.store.multi_get([f"after {rank}" for rank in range(4)])]
        try:
            hc.replace_failed(pair)
        except ValueError as error:
            seen["pair"] = str(error)
        hc.destroy_process_group()
        write_down()
        """
    seen, _ = run(program, tmp_path, 6)
    by_rank = {each["world"][0]: (process, each) for process, each in seen.items()}
    assert {rank: process for rank, (process, _) in by_rank.items()} == {0: 4, 1: 1, 2: 2, 3: 5}
    for rank, (process, each) in by_rank.items():
        assert each["world"] == [rank, 4, process in (4, 5), "team", 50]
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert each["groups"] == [pair, [0, 3], [rank // 2, rank % 2], [0, 1, 2, 3]]
        assert each["names"] == by_rank[0][1]["names"]
        assert each["sums"] == [6, 1 if rank < 2 else 5]
        assert each["large"] == 4
        assert each["store"] == ["0", "1", "2", "3"]
        assert "is not the world" in each["pair"]
    for rank in (1, 2):
        each = seen[rank]
        assert set(each["ranks"]) <= {0, 3}
        assert "died; replace_failed() gives the places of the dead to spares" in each["text"]
        assert each["same"] == [True, False]
        for name in ("world", "persistent", "replace", "shrink"):
            assert (
                "been replaced, because ranks 0, 3 have died; go on with what replace_failed" in each["refusals"][name]
            )
        for name in ("pair", "grid"):
            assert "was made from a group that has been replaced, because ranks 0, 3" in each["refusals"][name]
        assert "make it with empty_shared" in each["refusals"]["shared"]
