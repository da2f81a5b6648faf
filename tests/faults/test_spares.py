"""Spares: they wait in init_process_group, take the places of dead ranks, and leave where they are not needed.

Each case is a job of its own. Its processes are numbered by MPI.COMM_WORLD; on one node the last ones are the spares.
"""

from __future__ import annotations

import json
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.debug import stacks
from hpccomm.debug.report import Reporter
from hpccomm.debug.watchdog import Watchdog
from hpccomm.job import failures
from hpccomm.job.reserve import Reserve, chosen, placed

from ..launch import launch, run_program

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

    def wait_for_a_death():
        try:
            while True:
                hc.barrier()
        except hc.RankFailedError as error:
            return error

    def sum_of_ranks(group=None):
        x = np.array([float(hc.get_rank())])
        hc.all_reduce(x, group=group)
        return x[0]
"""


def run(program: str, folder: Path, ranks: int, timeout: float = 60) -> tuple[dict[int, Any], Any]:
    """Run a job under ULFM; return each process's observations, and the end of the job."""
    program = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    ended = run_program(program, folder, ranks, folder, timeout=timeout, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
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
@pytest.mark.parametrize("store", ["None", "hc.FileStore(FOLDER / 'store')"])
def test_two_dead_ranks_are_replaced_and_groups_grids_and_arrays_are_made_again(store: str, tmp_path: Path) -> None:
    program = """
        def everything():
            pair = hc.split_group(color=hc.get_rank() // 2)
            first = hc.new_group([0, 3])
            grid = hc.new_grid((2, 2))
            shared = hc.empty_shared(1)
            shared[0] = hc.get_rank()
            hc.fence(shared)
            return pair, first, grid, shared

        world = hc.init_process_group(spares=2, timeout=50, group_name="team", store=STORE)
        if not world.is_replacement:
            old, persistent = everything(), hc.all_reduce_init(np.ones(4))
            world.store.set(str(world.rank), "before")
            old[0].store.set("key", "before")
            hc.barrier()
            if world.rank in (0, 3):
                die()
            error = wait_for_a_death()
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
        seen["key"] = pair.store.check(["key"])
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
    seen, _ = run(program.replace("STORE", store), tmp_path, 6)
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
        assert not each["key"]
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


@survives
def test_a_spare_that_dies_is_no_failure_and_the_next_one_is_called(tmp_path: Path) -> None:
    program = """
        from hpccomm.job import failures

        (FOLDER / f"pid {PROCESS}").write_text(str(os.getpid()))
        world = hc.init_process_group(spares=2)
        if not world.is_replacement:
            hc.barrier()
            if PROCESS == 0:
                die(int((FOLDER / "pid 3").read_text()))
            while not failures._dead():  # until the news have come
                time.sleep(0.01)
            seen["before"] = sum_of_ranks()
            hc.barrier()
            if PROCESS == 1:
                die()
            try:
                while True:
                    hc.barrier()
            except hc.RankFailedError as error:
                seen["ranks"] = error.ranks
                world = hc.replace_failed()
        seen["world"] = [world.rank, world.size, world.is_replacement, sum_of_ranks()]
        hc.destroy_process_group()
        write_down()
        """
    seen, _ = run(program, tmp_path, 5)
    expected = {"before": 3, "ranks": [1]}
    assert seen == {
        0: {**expected, "world": [0, 3, False, 3]},
        2: {**expected, "world": [2, 3, False, 3]},
        4: {"world": [1, 3, True, 3]},
    }


@survives
def test_more_dead_ranks_than_spares_are_told_on_every_survivor_and_the_spare_stays_for_later(tmp_path: Path) -> None:
    program = """
        world = hc.init_process_group(spares=1)
        victims = [] if world.is_replacement else [(1, 2), (0,), (3,)]
        for dead in victims:
            hc.barrier()
            if PROCESS in dead:
                die()
            wait_for_a_death()
            try:
                world = hc.replace_failed()
            except hc.TooFewSparesError as error:
                seen.setdefault("texts", []).append(str(error))
                world = hc.shrink_group()
            seen.setdefault("worlds", []).append([world.rank, world.size, sum_of_ranks()])
            if dead == (0,):
                break
        if world.is_replacement:
            seen["replacement"] = [world.rank, world.size, sum_of_ranks()]
        hc.barrier()
        if PROCESS == 3:
            die()
        wait_for_a_death()
        try:
            hc.replace_failed()
        except hc.TooFewSparesError as error:
            seen.setdefault("texts", []).append(str(error))
            world = hc.shrink_group()
        seen["last"] = [world.rank, world.size, sum_of_ranks()]
        hc.destroy_process_group()
        write_down()
        """
    seen, _ = run(program, tmp_path, 6)
    assert sorted(seen) == [4, 5]
    two, none = "2 ranks have died, and 1 spare is left", "1 rank has died, and no spares are left"
    assert f"{two}; shrink_group() makes a group of the 3 that live (rank 4)" in seen[4]["texts"][0]
    assert f"{none}; shrink_group() makes a group of the 2 that live" in seen[4]["texts"][1]
    assert f"{none}; shrink_group()" in seen[5]["texts"][0]
    assert seen[4]["worlds"] == [[2, 3, 3], [2, 3, 3]]
    assert seen[5]["replacement"] == [0, 3, 3]
    assert [seen[5]["last"], seen[4]["last"]] == [[0, 2, 1], [1, 2, 1]]


@survives
def test_survivors_that_shrink_while_others_replace_are_told_and_may_call_the_same(tmp_path: Path) -> None:
    program = """
        world = hc.init_process_group(spares=1)
        if not world.is_replacement:
            hc.barrier()
            if PROCESS == 1:
                die()
            wait_for_a_death()
            for call in [hc.shrink_group, hc.replace_failed][:: -1 if PROCESS else 1]:
                try:
                    call()
                except hc.DistError as error:
                    seen.setdefault("texts", []).append([type(error).__name__, str(error)])
            seen["same"] = hc.GroupMember.WORLD is world
            world = hc.replace_failed()
        seen["world"] = [world.rank, world.size, world.is_replacement, sum_of_ranks()]
        hc.destroy_process_group()
        write_down()
        """
    seen, _ = run(program, tmp_path, 4)
    same = "call the same on every rank: replace_failed(), and shrink_group() where that raises TooFewSparesError"
    texts = {
        name: ["DistError", f"{name}: other ranks call {other}; {same} (rank {{}})"]
        for name, other in [("shrink_group", "replace_failed"), ("replace_failed", "shrink_group")]
    }
    for rank, order in ((0, ["shrink_group", "replace_failed"]), (2, ["replace_failed", "shrink_group"])):
        expected = [[kind, text.format(rank)] for kind, text in map(texts.get, order)]
        assert seen[rank] == {"texts": expected, "same": True, "world": [rank, 3, False, 3]}
    assert seen[3] == {"world": [1, 3, True, 3]}


@survives
def test_survivors_that_shrink_a_smaller_group_while_others_replace_are_refused_and_can_replace(tmp_path: Path) -> None:
    program = """
        world = hc.init_process_group(spares=1)
        if not world.is_replacement:
            halves = hc.split_group(color=world.rank // 2)
            grid = hc.new_grid((2, 2))
            hc.barrier()
            if PROCESS == 1:
                die()
            wait_for_a_death()
            for part in (halves, grid) if PROCESS == 2 else ():  # processes 0 and 3 are in replace_failed, or will be
                try:
                    hc.shrink_group(part)
                except ValueError as error:
                    seen.setdefault("texts", []).append(str(error))
            seen["same"] = hc.GroupMember.WORLD is world
            world = hc.replace_failed()
        seen["world"] = [world.rank, world.size, world.is_replacement, sum_of_ranks()]
        hc.destroy_process_group()
        write_down()
        """
    seen, _ = run(program, tmp_path, 5)
    texts = seen[2].pop("texts")
    assert len(texts) == 2
    for text in texts:
        assert "is a part of a world with spares" in text
        assert "Call replace_failed(), and shrink_group() without a group where that raises TooFewSparesError" in text
    assert seen == {
        **{rank: {"same": True, "world": [rank, 4, False, 6]} for rank in (0, 2, 3)},
        4: {"world": [1, 4, True, 6]},
    }


# -- deaths meanwhile ----------------------------------------------------------------------------------

# In the middle of replace_failed, by the function of the reserve in which a process dies.
STAGES = ["_shrink", "_give_places", "_split", "_make", "_fields"]
MEANWHILE = """
    stage, victim = STAGE, VICTIM
    if PROCESS == victim:
        from hpccomm.job.reserve import Reserve
        known, calls = getattr(Reserve, stage), []

        def dying(*arguments):
            calls.append(1)
            in_init = stage == "_split" or (stage == "_fields" and victim < 3)  # they make the first world, too
            if len(calls) > in_init:
                die()
            return known(*arguments)

        setattr(Reserve, stage, dying)
    world = hc.init_process_group(spares=3)
    if not world.is_replacement:
        hc.barrier()
        if PROCESS == 1:
            die()
        wait_for_a_death()
        world = hc.replace_failed()
    while True:
        try:
            seen["world"] = [world.rank, world.size, sum_of_ranks(), sum_of_ranks(hc.new_group([0, 1]))]
            hc.barrier()
            break
        except hc.RankFailedError:  # the death came after all had agreed
            world = hc.replace_failed()
    hc.destroy_process_group()
    write_down()
"""


@survives
@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        pytest.param(stage, victim, marks=[] if (stage, victim) in [("_split", 2), ("_make", 3)] else pytest.mark.slow)
        for stage in STAGES
        for victim in (0, 2, 3, 5)  # two of the world, a spare that is called and one that is not
    ],
)
def test_a_death_in_the_middle_of_replace_failed_begins_it_again(stage: str, victim: int, tmp_path: Path) -> None:
    program = MEANWHILE.replace("STAGE", repr(stage)).replace("VICTIM", str(victim))
    seen, _ = run(program, tmp_path, 6)
    worlds = sorted(each["world"][:3] for each in seen.values())
    assert worlds == [[rank, 3, 3] for rank in range(3)]
    assert 1 not in seen
    assert victim not in seen or stage not in ("_shrink", "_give_places")  # it has died, or was not asked to do this
    assert {process for process in (0, 2) if process != victim} <= set(seen)


# -- the end of the job --------------------------------------------------------------------------------


@survives
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("if PROCESS == 1: raise KeyError('mine')", None, "[rank 1] KeyError: 'mine'"),
        ("if PROCESS == 1:\n    with world: sys.exit(5)", 5, "sys.exit(5) inside `with` of the world ends the job"),
        (
            "if PROCESS == 1: os.kill(int((FOLDER / 'pid 3').read_text()), signal.SIGINT)",
            None,
            "[rank 3, a spare] KeyboardInterrupt",
        ),
    ],
)
def test_what_ends_the_job_ends_the_spares(how: str, status: int | None, said: str, tmp_path: Path) -> None:
    program = """
        (FOLDER / f"pid {PROCESS}").write_text(str(os.getpid()))
        world = hc.init_process_group(spares=2)
        hc.barrier()
        """
    program = f"{textwrap.dedent(program)}{how}\nhc.recv(np.ones(1), src=1 - world.rank)\n"
    _, ended = run(program, tmp_path, 4)
    assert ended.returncode == status if status else ended.returncode not in (0, 124)
    assert said in ended.stderr


@survives
def test_an_exception_on_a_replacement_ends_the_job(tmp_path: Path) -> None:
    program = """
        world = hc.init_process_group(spares=1)
        if world.is_replacement:
            raise KeyError("mine")
        hc.barrier()
        if world.rank == 1:
            die()
        wait_for_a_death()
        hc.replace_failed()
        hc.barrier()
        """
    _, ended = run(program, tmp_path, 4)
    assert ended.returncode not in (0, 124)
    assert "hpccomm: KeyError on rank 1 ends the job" in ended.stderr


@survives
def test_spares_hear_of_an_init_that_fails_on_the_others_and_may_come_again(tmp_path: Path) -> None:
    program = """
        try:
            hc.init_process_group(spares=1, init_method="file:///nowhere/x")
        except hc.DistError as error:
            seen["text"] = str(error)
        write_down()
        with hc.init_process_group(spares=1):
            seen["sum"] = sum_of_ranks()
        write_down()
        """
    seen, ended = run(program, tmp_path, 3)
    assert ended.returncode == 0, ended.stderr
    assert [seen[rank].get("sum") for rank in range(3)] == [1, 1, None]
    assert "/nowhere/x" in seen[0]["text"]
    assert "failed on ranks that are no spares" in seen[2]["text"]


@survives
def test_spares_end_when_all_ranks_of_the_world_have_died(tmp_path: Path) -> None:
    _, ended = run("hc.init_process_group(spares=2)\ndie()\n", tmp_path, 4)
    assert ended.returncode not in (0, 124)
    assert "hpccomm: all ranks of the world have died; the spares end" in ended.stderr


# -- the watchdog --------------------------------------------------------------------------------------


@survives
def test_the_watchdog_sees_a_spare_that_waits_and_does_not_take_it_for_a_hang(tmp_path: Path) -> None:
    program = """
        from hpccomm.debug import culprits, start, watchdog

        world = hc.init_process_group(spares=2)
        if world.rank == 1:
            wait_for("0.json")
        elif world.rank == 0:
            import threading
            def inquire():
                found = []
                while len(found) < 4 or not any(call["number"] for each in found for call in each["operations"]):
                    found = start.current()._reports("a test")  # a watchdog answers after 1 s
                spares = [each for each in found if each["rank"] > 1]
                seen["spares"] = {each["rank"]: [each["spare"], each["operations"]] for each in spares}
                verdict = culprits.verdict(found, 4)
                seen["culprits"], seen["lines"] = verdict.culprits, verdict.lines
                write_down()
            threading.Thread(target=inquire).start()
        hc.barrier()
        """
    seen, ended = run(program, tmp_path, 4)
    assert seen[0]["spares"] == {"2": [True, []], "3": [True, []]}
    assert seen[0]["culprits"] == [1]
    assert seen[0]["lines"][0].startswith("rank 1 never reached barrier #1 of 'world'")
    assert ended.returncode == 0


@pytest.mark.once
def test_no_time_limit_hits_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve: Any = SimpleNamespace(comm=SimpleNamespace(Iprobe=lambda *_: looks.append(call()) or len(looks) > 1))
    reserve.comm.Recv = lambda *_: None
    looks: list[Any] = []

    def call() -> Any:
        return stacks.call_of_thread(threading.get_ident())

    assert Reserve.wait(reserve) == 0
    assert looks[0].record.name == "spare"
    assert looks[0].key == looks[1].key
    told: list[Any] = []
    dog = Watchdog(Reporter(0, 2, "unused"))
    monkeypatch.setattr(dog, "_time_out", told.append)
    monkeypatch.setattr("hpccomm.debug.watchdog.in_flight", lambda: looks[:1])
    for now in (0.0, 1e6):
        dog.look(now)
    assert not told


# -- the job -------------------------------------------------------------------------------------------


def digest_of_training(folder: Path, ranks: int, *arguments: str) -> tuple[str, list[str]]:
    """Return the weights' digest in the last line, and the lines before it."""
    arguments = ("--steps", "80", "--require-accuracy", "50", *arguments)
    job = [sys.executable, "jobs/elastic_training.py", "--folder", folder, *arguments]
    ended = launch(ranks, *job, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    *lines, last = ended.stdout.splitlines()
    assert last.endswith(" OK"), f"{ended.stdout}\n{ended.stderr}"
    assert last.startswith("ranks 3 ")
    assert (folder / "DONE").exists()
    return last.split()[last.split().index("weights") + 1], lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of_training(tmp_path_factory.mktemp("undisturbed"), 3, "--kill", "none")[0]


DEATHS = {
    "rank 0": (["0@60"], ["step 60: ranks [0] are new; back to step 50"]),
    "rank 1": (["1@60"], ["step 60: ranks [1] are new; back to step 50"]),
    "rank 2": (["2@60"], ["step 60: ranks [2] are new; back to step 50"]),
    "two at once": (["0@60", "2@60"], ["step 60: ranks [0, 2] are new; back to step 50"]),
    "all, one after the other": (["2@10", "0@40", "1@70"], [""] * 3),
}


@survives
@pytest.mark.parametrize(
    "who", [pytest.param(who, marks=[] if who == "two at once" else pytest.mark.slow) for who in DEATHS]
)
def test_training_with_spares_ends_with_the_bits_of_an_undisturbed_run(
    who: str, undisturbed: str, tmp_path: Path
) -> None:
    deaths, expected = DEATHS[who]
    spares = len(deaths)
    arguments = [word for each in deaths for word in ("--kill", each)]
    digest, lines = digest_of_training(tmp_path, 3 + spares, "--spares", str(spares), *arguments)
    assert digest == undisturbed
    assert len(lines) == len(expected)
    assert all(line.startswith(text) for line, text in zip(lines, expected))
