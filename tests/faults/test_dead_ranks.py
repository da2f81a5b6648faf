"""A rank that is killed: every survivor is notified wherever it waits, and the survivors go on.

Each case is a job of four ranks, of which some kill themselves; each survivor writes its observations to a file.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.job import failures

from ..launch import launch

pytestmark = pytest.mark.serial
OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"
survives = pytest.mark.skipif(not OPEN_MPI, reason="only Open MPI survives dead ranks (mpirun --with-ft ulfm)")
by_signal = pytest.mark.skipif(OPEN_MPI, reason="only MPICH's mpiexec tells the survivors by a signal")

BEGIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import numpy as np
    import hpccomm as hc

    FOLDER, VICTIMS = Path(sys.argv[1]), json.loads(sys.argv[2])
    world = hc.init_process_group()
    me, x, big, seen = world.rank, np.ones(8), np.ones(1 << 18), {}

    def write_down():
        (FOLDER / f"{me}.json").write_text(json.dumps(seen))

    def die():
        os.kill(os.getpid(), signal.SIGKILL)
"""
MEET = """
    hc.barrier()
    if me in VICTIMS:
        time.sleep(0.2 + 0.2 * VICTIMS.index(me))  # until the others wait
        die()
    try:
"""
GO_ON = """
    except hc.RankFailedError as error:
        seen["ranks"], seen["text"] = error.ranks, str(error)
    world = hc.shrink_group()
    seen["new"] = [world.rank, world.size, hc.get_rank(), world is hc.GroupMember.WORLD]
    y = np.ones(8)
    hc.all_reduce(y)
    z = np.ones(1 << 18)
    hc.all_reduce(z, async_op=True).wait()
    seen["sums"] = [float(y[0]), float(z[-1])]
    seen["agreed"] = [hc.agree(True), hc.agree(hc.get_rank() == 0)]
    hc.barrier(hc.new_group())
    hc.destroy_process_group()
    write_down()
"""


def run(program: str, folder: Path, *, victims: tuple[int, ...] = (1,), ranks: int = 4) -> dict[int, Any]:
    """Run a job under ULFM; return each survivor's observations."""
    file = folder / "program.py"
    file.write_text(program)
    arguments = [sys.executable, file, folder, json.dumps(victims)]
    ended = launch(ranks, *arguments, timeout=60, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    found = {rank: folder / f"{rank}.json" for rank in range(ranks)}
    seen = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    assert sorted(seen) == [rank for rank in range(ranks) if rank not in victims], f"{ended.stdout}\n{ended.stderr}"
    assert ended.returncode != 124, ended.stderr  # also the end of the job
    return seen


def case(waits: str, setup: str = "") -> str:
    parts = textwrap.dedent(BEGIN), textwrap.dedent(setup), textwrap.dedent(MEET)
    return "".join([*parts, textwrap.indent(textwrap.dedent(waits), "    "), textwrap.dedent(GO_ON)])


# Where the survivors are when rank 1 dies.
WAITS = {
    "in a blocking collective": ("while True: hc.all_reduce(x)", ""),
    "in a blocking collective of large arrays": ("while True: hc.all_reduce(big)", ""),
    "in Work.wait": ("hc.all_reduce(x, async_op=True).wait()", ""),
    "in Future.wait": ("hc.all_reduce(x, async_op=True).get_future().wait()", ""),
    "in Work.wait of the thread's first operation": ("hc.all_reduce(big, async_op=True).wait()", ""),
    "in a receive from the dead rank": ("hc.recv(x, src=1)", ""),
    "in a receive from any rank": ("hc.recv(x)", ""),
    "in a receive from a rank that has failed itself": ("hc.barrier() if me == 0 else hc.recv(x, src=0)", ""),
    "in a receive from a rank that computes": (
        "time.sleep(1) or hc.barrier() if me == 0 else hc.recv(x, src=0)",
        "",
    ),
    "in a small persistent all_reduce": (
        "while True: small.start(); small.wait()",
        "small = hc.all_reduce_init(np.ones(8))\n",
    ),
    "in the start of a persistent all_reduce whose wait has failed": (
        """
        small.start()
        try:
            small.wait()
        except hc.RankFailedError:
            pass
        try:
            small.start()
        finally:
            from hpccomm.debug.ring import ring_records
            place = hc.GroupMember.WORLD.dispatcher.fast_path.place
            assert [*ring_records({place: ("", "")}).values()][-1].state == "failed"
        """,
        "small = hc.all_reduce_init(np.ones(8))\n",
    ),
    "in a persistent broadcast": (
        "while True: sent.start(); sent.wait()",
        "sent = hc.broadcast_init(np.ones(8), src=0)\n",
    ),
    "in a persistent halo exchange": (
        "while True: halo.start(); halo.wait()",
        "halo = hc.halo_exchange_init(np.ones(8), hc.new_grid(0, periodic=True))\n",
    ),
    "in a persistent halo exchange of large arrays": (
        "while True: halo.start(); halo.wait()",
        "halo = hc.halo_exchange_init(np.ones((3, 1 << 18)), hc.new_grid(0, periodic=True))\n",
    ),
    "in a halo exchange": (
        "while True: hc.halo_exchange(x, grid)",
        "grid = hc.new_grid(0, periodic=True)\n",
    ),
    "in a redistribution": (
        "while True: hc.redistribute(np.ones(32), x, slice(0, 32), slice(8 * me, 8 * me + 8))",
        "",
    ),
    "in a sparse exchange": ("while True: hc.exchange_sparse({(me + 1) % 4: big})", ""),
    "in an asynchronous sparse exchange": (
        "while True: hc.exchange_sparse({(me + 1) % 4: big}, async_op=True).wait()",
        "",
    ),
    "in a sparse exchange by consensus": (
        "while True: hc.exchange_sparse({(me + 1) % 4: big})",
        "from hpccomm.mpi import sparse_exchange; sparse_exchange.FEW = 0\n",
    ),
    "in a fence of a node-shared array": ("while True: hc.fence(shared)", "shared = hc.empty_shared(1000)\n"),
    "in a collective of objects": ("while True: hc.all_gather_object([None] * 4, me)", ""),
    "in a sub-group": (
        "while True: hc.barrier(pair) if me == 0 else hc.barrier()",
        "pair = hc.split_group(color=int(me > 1))\n",
    ),
    "in a sub-group without the dead rank": (
        "hc.barrier(rest) if me == 3 else hc.barrier()",
        "rest = hc.split_group(color=int(me > 1))\n",
    ),
    "in monitored_barrier": ("hc.monitored_barrier(timeout=50)", ""),
    "in new_group": ("while True: hc.new_group().destroy()", ""),
    "in destroy": ("hc.destroy_process_group()", ""),
}


STORE = """
    world.store.set(str(me), "before")
    hc.barrier()
    if me in VICTIMS:
        while len(list(FOLDER.glob("past the barrier *"))) < 3:
            time.sleep(0.01)
        die()
    (FOLDER / f"past the barrier {me}").touch()
    for rank in VICTIMS:
        try:
            world.store.get(f"what {rank} would have set")
        except hc.DistNetworkError as error:
            seen["text"] = str(error)
    world = hc.shrink_group()
    world.store.set(str(world.rank), "after")
    seen["values"] = [value.decode() for value in world.store.multi_get([str(rank) for rank in range(world.size)])]
    hc.destroy_process_group()
    write_down()
"""


@survives
def test_the_store_dies_with_rank_0_and_the_survivors_have_another(tmp_path: Path) -> None:
    program = textwrap.dedent(BEGIN) + textwrap.dedent(STORE)
    for seen in run(program, tmp_path, victims=(0,)).values():
        assert "the store at @hpccomm-" in seen["text"]
        assert "has the process that holds it ended?" in seen["text"]
        assert seen["values"] == ["after"] * 3


@survives
def test_the_programs_own_store_stays_without_the_keys_of_the_old_world(tmp_path: Path) -> None:
    begin = textwrap.dedent(BEGIN).replace("init_process_group(", "init_process_group(store=hc.FileStore(FOLDER / 's')")
    program = """
        world.store.set("key", "old")
        hc.split_group(color=me // 2).store.set("key", "old")
        hc.barrier()
        if me == 1:
            die()
        try:
            while True:
                hc.all_reduce(x)
        except hc.RankFailedError:
            world = hc.shrink_group()
        seen["check"] = world.store.check(["key"]) or hc.split_group(color=world.rank // 2).store.check(["key"])
        hc.barrier()
        world.store.set(str(world.rank), "new")
        seen["value"] = world.store.get(str((world.rank + 1) % world.size)).decode()
        hc.destroy_process_group()
        write_down()
        """
    for seen in run(begin + textwrap.dedent(program), tmp_path).values():
        assert seen == {"check": False, "value": "new"}


@survives
@pytest.mark.parametrize("where", WAITS)
def test_every_survivor_is_told_who_died_and_goes_on(where: str, tmp_path: Path) -> None:
    for rank, seen in run(case(*WAITS[where]), tmp_path).items():
        new = rank - (rank > 1)
        assert seen["ranks"] == [1]
        assert "rank 1 has died; shrink_group()" in seen["text"]
        assert seen["text"].endswith(f"(rank {rank})")
        assert seen["new"] == [new, 3, new, True]
        assert seen["sums"] == [3, 3]
        assert seen["agreed"] == [True, False]


@survives
@pytest.mark.parametrize("victims", [(1, 2), (0, 3)])
def test_two_deaths_one_of_them_while_the_survivors_shrink(victims: tuple[int, ...], tmp_path: Path) -> None:
    # the second victim dies 0.2 s after the first: by then the others have called shrink_group, and wait for it
    for seen in run(case("while True: hc.all_reduce(x)"), tmp_path, victims=victims).values():
        assert seen["ranks"]
        assert set(seen["ranks"]) <= set(victims)
        assert seen["new"][1] == 2
        assert seen["sums"] == [2, 2]


@survives
def test_one_rank_after_the_other_at_any_moment(tmp_path: Path) -> None:
    program = """
        rng = np.random.default_rng(me)
        rounds, survivors = 0, 4
        if me in VICTIMS:
            import threading
            threading.Timer(0.2 + 0.25 * VICTIMS.index(me) + 0.1 * rng.random(), die).start()
        while hc.get_world_size() > 2:
            try:
                hc.all_reduce(x)
                hc.all_reduce(big, async_op=True).wait()
            except hc.RankFailedError:
                try:
                    hc.shrink_group()
                except hc.RankFailedError:
                    pass
        hc.barrier()
        seen["size"], seen["rank"] = hc.get_world_size(), hc.get_rank()
        write_down()
        """
    seen = run(textwrap.dedent(BEGIN) + textwrap.dedent(program), tmp_path, victims=(0, 2))
    assert seen == {1: {"size": 2, "rank": 0}, 3: {"size": 2, "rank": 1}}


@survives
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])  # with DETAIL the ranks communicate while they make a group
def test_a_death_that_only_one_survivor_notices_during_the_shrink(level: str, tmp_path: Path) -> None:
    program = """
        from hpccomm.api import survivors
        make_group = survivors.make_group

        def interrupted(**fields):  # once
            survivors.make_group = make_group
            if me == 2:
                die()
            new = make_group(**fields)
            if me == 3:
                fields["comm"].Barrier()
            return new

        hc.barrier()
        if me == 1:
            die()
        survivors.make_group = interrupted
        while hc.get_world_size() > 2:
            try:
                hc.all_reduce(x)
            except hc.RankFailedError:
                hc.shrink_group()
        hc.barrier()
        seen["size"], seen["rank"] = hc.get_world_size(), hc.get_rank()
        write_down()
        """
    begin = f"import os\nos.environ['HPCCOMM_DEBUG'] = {level!r}\n" + textwrap.dedent(BEGIN)
    seen = run(begin + textwrap.dedent(program), tmp_path, victims=(1, 2))
    assert seen == {0: {"size": 2, "rank": 0}, 3: {"size": 2, "rank": 1}}


@survives
def test_a_death_after_ranks_were_excluded(tmp_path: Path) -> None:
    program = """
        hc.barrier()
        small = hc.shrink_group([0]) if me else world
        try:
            while me:
                hc.all_reduce(x)
                if me == 3:
                    die()
            hc.destroy_process_group()
        except hc.RankFailedError as error:
            seen["ranks"] = error.ranks
        if me:
            hc.shrink_group()
            hc.barrier()
            hc.destroy_process_group()
        seen["destroyed"], seen["inside"] = [world.is_destroyed, small.is_destroyed], hc.is_initialized()
        write_down()
        while not (FOLDER / "0.json").exists():  # rank 0 would take an end for a death
            time.sleep(0.01)
        os._exit(0)
        """
    for rank, seen in run(textwrap.dedent(BEGIN) + textwrap.dedent(program), tmp_path, victims=(3,)).items():
        assert seen["ranks"] == [3 if rank == 0 else 2]
        assert seen["destroyed"] == [rank > 0] * 2
        assert seen["inside"] == (rank == 0)


@survives
def test_an_excluded_rank_that_has_died_and_the_larger_world(tmp_path: Path) -> None:
    program = """
        if me == 0:
            for rank in 1, 2, 3:  # they have left init_process_group
                hc.recv(x, src=rank)
            die()
        try:
            hc.send(x, dst=0)
            hc.recv(x, src=0)
        except hc.RankFailedError:
            small = hc.shrink_group([0])
        hc.all_reduce(x)
        seen["sum"] = x[0]
        try:
            hc.destroy_process_group()
        except hc.RankFailedError:
            seen["again"] = hc.is_initialized()
            hc.shrink_group()
            hc.destroy_process_group()
        seen["destroyed"], seen["inside"] = [world.is_destroyed, small.is_destroyed], hc.is_initialized()
        write_down()
        """
    for seen in run(textwrap.dedent(BEGIN) + textwrap.dedent(program), tmp_path, victims=(0,)).values():
        assert seen == {"sum": 3, "again": True, "destroyed": [True, True], "inside": False}


@survives
def test_a_death_after_all_have_met_in_destroy_is_no_error(tmp_path: Path) -> None:
    program = """
        from hpccomm.core import ending
        from hpccomm.job import failures

        def then_one_dies(group, deadline):
            answer = meet(group, deadline)
            if me == 1:
                die()
            while not failures.dead_ranks(group.comm, is_likely=False):
                time.sleep(0.01)
            return answer

        meet, ending.meet = ending.meet, then_one_dies
        shared = hc.empty_shared(8)
        hc.all_reduce(x)
        hc.all_reduce(big, async_op=True).wait()
        hc.destroy_process_group()
        seen["state"] = [world.is_destroyed, hc.is_initialized()]
        write_down()
        """
    for seen in run(textwrap.dedent(BEGIN) + textwrap.dedent(program), tmp_path).values():
        assert seen["state"] == [True, False]


UNDER_WAY = """
    folder = FOLDER / "checkpoints"
    half = hc.new_group([0, 1])
    hc.checkpoint.save(folder, {"x": x}, 5)
    work = hc.checkpoint.save_async(folder, {"x": x}, 6)
    if me < 2:
        of_half = hc.checkpoint.save_async(FOLDER / "of half", {"x": x}, 6, group=half)
"""
SAVED_ANEW = """
    seen["loaded"] = hc.checkpoint.load(folder).step
    hc.checkpoint.save_async(folder, {"x": x}, 7)
    seen["anew"] = hc.checkpoint.load(folder).step
    try:
        seen["work"] = work.wait()
    except hc.RankFailedError as error:
        seen["work"] = str(error)
    hc.destroy_process_group()
    write_down()
"""


@survives
@pytest.mark.parametrize("where", ["hc.checkpoint.finish()", "while True: hc.all_reduce(x)"])
def test_a_checkpoint_under_way_is_given_up_and_the_survivors_save_anew(where: str, tmp_path: Path) -> None:
    after = GO_ON[: GO_ON.index("    y = ")] + SAVED_ANEW
    parts = [textwrap.dedent(part) for part in (BEGIN, UNDER_WAY, MEET)]
    program = "".join([*parts, f"    {where}", textwrap.dedent(after)])
    for rank, seen in run(program, tmp_path).items():
        assert seen["ranks"] == [1], rank
        assert seen["loaded"] == 5
        assert seen["anew"] == 7
        assert "rank 1 has died" in seen["work"]


@survives
def test_what_the_old_groups_say_afterwards(tmp_path: Path) -> None:
    program = """
        pair = hc.split_group(color=me // 2, group_desc="pair")
        persistent = hc.all_reduce_init(np.ones(4))
        received = hc.irecv(np.ones(4), src=(me + 1) % 4, tag=7)
        sub = hc.split_group(color=0, group_desc="sub")
        with world:
            hc.barrier()
            if me == 1:
                die()
            work = hc.all_reduce(big, async_op=True)
            try:
                hc.barrier()
            except hc.RankFailedError:
                pass
            smaller = hc.shrink_group(sub)
            seen["replaced"] = [smaller.rank, list(smaller.ranks), smaller.name, world is hc.GroupMember.WORLD]
            hc.barrier(smaller)
            hc.agree(True, smaller)  # until all have left the barrier, which shrinking the world would break
            hc.shrink_group()
            for name, act in {
                "world": lambda: hc.barrier(world),
                "pair": lambda: hc.barrier(pair),
                "smaller": lambda: hc.barrier(smaller),
                "again": lambda: hc.shrink_group(world),
                "split": lambda: hc.split_group(pair, 0),
                "agree": lambda: hc.agree(True, pair),
                "persistent": persistent.start,
                "received": received.wait,
                "work": work.wait,
            }.items():
                try:
                    act()
                except hc.DistError as error:
                    seen[name] = f"{type(error).__name__}: {error}"
            hc.barrier()
        seen["initialized"] = hc.is_initialized()  # the end of the block has destroyed the new world
        write_down()
        """
    for rank, seen in run(textwrap.dedent(BEGIN) + textwrap.dedent(program), tmp_path).items():
        assert seen["replaced"] == [rank - (rank > 1), [0, 2, 3], "sub", True]
        for name in ("world", "again", "persistent"):
            assert "DistError: " in seen[name]
            assert "'world' has been shrunk, because ranks 1 have died; go on with what shrink_group" in seen[name]
        for name in ("pair", "smaller", "split", "agree"):
            assert "was made from a group that has been shrunk, because ranks 1 have died; make it again" in seen[name]
        assert seen["received"].startswith("RankFailedError: ")
        assert seen["work"].startswith("RankFailedError: ")
        assert seen["initialized"] is False


@survives
def test_agree_is_the_same_on_all_survivors_while_a_rank_dies(tmp_path: Path) -> None:
    program = """
        hc.barrier()
        if me == 1:
            die()
        seen["answers"] = [hc.agree(True), hc.agree(me != 2), hc.agree(True)]
        write_down()
        """
    for seen in run(textwrap.dedent(BEGIN) + textwrap.dedent(program), tmp_path).values():
        assert seen["answers"] == [True, False, True]


@survives
def test_without_a_handler_the_error_ends_the_job(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(BEGIN) + "hc.barrier()\nif me == 1:\n    die()\nhc.barrier()\n")
    ended = launch(3, sys.executable, file, tmp_path, "[]", timeout=60, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    assert ended.returncode not in (0, 124)
    assert re.search(r"RankFailedError: barrier #\d of 'world': rank 1 has died", ended.stderr)


@survives
def test_an_exception_ends_a_job_of_four_ranks_which_mpi_abort_does_not(tmp_path: Path) -> None:
    program = """
        if me == 1:
            raise KeyError("mine")
        hc.recv(x, src=1 if me == 0 else 0)
        """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(program))
    ended = launch(4, sys.executable, file, tmp_path, "[]", timeout=60, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    assert ended.returncode == 1
    assert "[rank 1] KeyError: 'mine'" in ended.stderr


@survives
def test_the_thread_that_looks_for_deaths_ends_before_the_programs_own_finalize(tmp_path: Path) -> None:
    end = "from mpi4py import MPI\nMPI.Finalize()\ntime.sleep(0.5)\nprint('it goes on')\n"  # five looks
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(BEGIN) + end)
    ended = launch(2, sys.executable, file, tmp_path, "[]", timeout=60, env={"MPIEXEC_ARGS": "--with-ft ulfm"})
    assert (ended.returncode, ended.stdout) == (0, 2 * "it goes on\n"), ended.stderr


def test_without_fault_tolerance_shrink_group_says_how_to_start_the_job(process_group: hc.ProcessGroup) -> None:
    with pytest.raises(hc.UnsupportedOperationError, match=r"start the job with Open MPI's `mpirun --with-ft ulfm`"):
        hc.shrink_group()
    assert hc.agree(True)
    assert not hc.agree(False)


@by_signal
def test_mpich_lets_a_survivor_have_last_words_although_it_waits_in_mpi(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, time
        from pathlib import Path
        import numpy as np
        import hpccomm as hc
        from mpi4py import MPI

        def last_words(rank):
            Path(sys.argv[1], f"{me}.txt").write_text(f"{rank} died")
            while len(list(Path(sys.argv[1]).glob("*.txt"))) < 2:  # who ends first is dead as well, for the other
                time.sleep(0.01)
            os._exit(3)

        turned = MPI.COMM_WORLD.Split(0, (MPI.COMM_WORLD.Get_rank() + 1) % 3)
        world = hc.init_process_group(comm=turned, on_peer_failure=last_words)
        me = world.rank
        hc.barrier()
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hc.recv(np.ones(1), src=2 - me)
        """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    # see docs/how-to/dead-ranks.md for the shell
    shell = ["sh", "-c", 'trap : USR1; "$@"; exit $?', "sh"]
    ended = launch(3, *shell, sys.executable, file, tmp_path, timeout=60, env={"MPIEXEC_ARGS": "-disable-auto-cleanup"})
    words = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert words == {"0.txt": "1 died", "2.txt": "1 died"}, ended.stderr
    assert ended.returncode not in (0, 124)


def test_on_peer_failure_has_to_be_a_function() -> None:
    with pytest.raises(TypeError, match="on_peer_failure is 3; expected a function"):
        hc.init_process_group(on_peer_failure=3)  # type: ignore[arg-type]


@pytest.mark.once
def test_an_error_that_mpi_cannot_name_waits_for_the_news_of_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    # Open MPI 5.0 reports MPI_ERR_OTHER of a barrier before it knows the dead ranks: on a busy machine, long before
    comm, news = MPI.COMM_SELF, time.monotonic() + 3 * failures.PAUSE
    watched = SimpleNamespace(comm=comm, is_revoked=True, world=SimpleNamespace(members=(0,)))
    monkeypatch.setattr(failures, "is_on", lambda: True)
    monkeypatch.setattr(failures, "_watched", [watched])
    monkeypatch.setattr(failures, "_dead", lambda: frozenset([0] * (time.monotonic() > news)))
    failed = failures.translated("barrier", MPI.Exception(MPI.ERR_OTHER), comm)
    assert failed is not None
    assert failed.ranks == (0,)
