"""Windows and communicators that several threads make at the same time, and the end of those that one rank leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..launch import run_program

pytestmark = pytest.mark.serial

PROGRAM = """
import threading
import numpy as np, hpccomm as hc

def work(groups):
    for group in groups:
        for _ in range(12):  # the ninth makes memory of the node
            array = np.ones(10)
            hc.all_reduce(array, group=group)
            assert array[0] == group.size
        told = [None] * group.size
        hc.all_gather_object(told, group.rank, group=group)
        assert told == list(range(group.size))

with hc.init_process_group(timeout=60):
    sets = [[hc.new_group() for _ in range(10)] for _ in range(3)]
    threads = [threading.Thread(target=work, args=(groups,)) for groups in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def ended(program: str, folder: Path, ranks: int = 2, **environment: str) -> str:
    """Run a program that ends well; return what it says on stderr."""
    return run_program(program, folder, ranks, status=0, env=environment).stderr


@pytest.mark.parametrize("osc", [None, "^nothing"], ids=["as hpccomm sets it", "with osc/ucx"])
def test_threads_make_windows_at_the_same_time(osc: str | None, tmp_path: Path) -> None:
    """Open MPI 5.0's osc/ucx, which each new window asks, opens and closes UCX: two threads at once crashed in it."""
    said = ended(PROGRAM, tmp_path, **({} if osc is None else {"OMPI_MCA_osc": osc}))
    assert osc is not None or said == ""  # no "Error: OSC UCX component ..."


ORDERS = """
import numpy as np, hpccomm as hc

with hc.init_process_group(timeout=60):
    for turn in range(12):
        group, array = hc.new_group(), np.ones(1 << 20)
        is_first = (hc.get_rank() + turn) % 2
        if is_first and turn % 4 > 1:
            hc.new_group()
        work = hc.all_reduce(array, group=group, async_op=True)
        if is_first and turn % 4 < 2:
            work.wait()
        if not (is_first and turn % 4 > 1):
            hc.new_group()
        work.wait()
        assert (array == 2).all()
"""


def test_the_communication_thread_starts_while_the_program_makes_groups_in_any_order(tmp_path: Path) -> None:
    """Of the communicators that the threads of a process make, Open MPI 5.0 goes on with one at a time."""
    ended(ORDERS, tmp_path)


MAKES = {
    "memory of the node": "hc.all_reduce(np.ones(3))",
    "a node-shared array": "array = hc.empty_shared((4,), 'f8')",
    "a persistent operation": "work = hc.all_reduce_init(np.ones(3)); work.start(); work.wait()",
    "a communication thread": "hc.all_reduce(np.ones(1 << 20), async_op=True).wait()",
}


@pytest.mark.parametrize("makes", MAKES)
def test_one_rank_leaves_the_program_while_the_others_destroy_the_group(makes: str, tmp_path: Path) -> None:
    program = (
        "import numpy as np, hpccomm as hc\n"
        "world = hc.init_process_group(timeout=30)\n"
        f"{MAKES[makes]}\n"
        "if world.rank != 1:\n"
        "    world.destroy()\n"
    )
    ended(program, tmp_path, ranks=3)


# Ranks 0 and 2 free a window that rank 1 does not have, before or after they make others with it.
LEFT = """
import numpy as np, hpccomm as hc

world = hc.init_process_group(timeout=30)
made = []

def group_of(*ranks):
    group = hc.new_group(ranks)
    made.append(hc.empty_shared(4, group=group) if world.rank in ranks else None)
    return group

groups = [group_of(*ranks) for ranks in {before}]
for freed in {freed}:
    made[freed] = None
    if world.rank in groups[freed].ranks:
        groups[freed].destroy()
groups += [group_of(*ranks) for ranks in {after}]
"""


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize(
    ("before", "freed", "after"),
    [
        ([(0, 2), (0, 1)], [0], [(0, 1)]),
        ([(0, 2), (1, 2), (0, 1)], [0, 1], [(0, 1), (1, 2)]),
        ([(0, 1, 2), (0, 2), (0, 1)], [1], [(0, 1, 2), (0, 1)]),
        ([(0, 2), (0, 1)], [1, 0], [(1, 2), (0, 1)]),
    ],
)
def test_windows_left_to_the_end_are_freed_in_one_order(
    before: list[tuple[int, ...]], freed: list[int], after: list[tuple[int, ...]], native: str, tmp_path: Path
) -> None:
    """Open MPI frees them in the order of a table, and waits in each for its ranks."""
    program = LEFT.format(before=before, freed=freed, after=after)
    ended(program, tmp_path, ranks=3, HPCCOMM_NATIVE=native)
