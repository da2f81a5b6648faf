"""Threads with a group each, whose first operations the ranks make in another order; threads that wait at the end."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from hpccomm.native import room

from ..launch import UNTIL_IN_MPI, launch

pytestmark = pytest.mark.serial

# Each rank begins with another group, and with the next when the first thread waits: for the other rank's second one.
PROGRAM = """
import sys, threading, time
import numpy as np
import hpccomm as hc

world = hc.init_process_group()
groups = [hc.new_grid(0, periodic=True) for _ in range(6)]
failed = []

def work(group):
    try:
        use(group)
    except BaseException as error:
        failed.append(error)

def wait_until_it_waits(thread):
    place, looks = None, 0
    while thread.is_alive() and looks < 20:
        frame = sys._current_frames().get(thread.ident)
        here = frame and (frame.f_code, frame.f_lasti)
        place, looks = here, looks + 1 if here == place else 0
        time.sleep(0.01)

def use(group):
    {use}

threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups[:: 1 - 2 * world.rank]]
for thread in threads:
    thread.start()
    wait_until_it_waits(thread)
for thread in threads:
    thread.join()
assert not failed, failed
hc.destroy_process_group()
"""


@pytest.mark.parametrize(
    "use",
    [
        "hc.halo_exchange_init(np.zeros(4), group).free()",
        "hc.all_gather_object([None] * 2, bytes(100_000), group)",
        "for _ in range(20): hc.all_reduce(np.ones(5), group=group)",
        "hc.all_reduce_init(np.ones(5), group=group).free()",
        "hc.fence(hc.empty_shared(5, group=group), group); group.destroy()",
    ],
)
def test_what_a_group_makes_for_its_first_operation_keeps_no_other_thread_waiting(use: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM).format(use=use))
    ended = launch(2, sys.executable, file)
    assert ended.returncode == 0, ended.stderr


# Rank 0's daemon thread waits for an operation that the other rank never makes.
WAITS_AT_THE_END = f"""
import sys, threading
import numpy as np
import hpccomm as hc
from mpi4py import MPI
{UNTIL_IN_MPI.replace("threading.main_thread().ident", "thread.ident")}
world = hc.init_process_group()
if world.rank == 0:
    thread = threading.Thread(target=lambda: {{operation}}, daemon=True)
    thread.start()
    until_in_mpi()
MPI.COMM_WORLD.Barrier()  # a rank that is alone at the end for some seconds says so
{{end}}
"""
OPERATIONS = [
    "hc.recv(np.zeros(4), src=1)",
    "hc.recv(np.zeros(1 << 20)[::2])",
    "hc.send(np.zeros(1 << 20), dst=1)",
    "hc.irecv(np.zeros(4), src=1).wait()",
    "hc.recv_object_list([None], src=1)",
    "hc.all_reduce(np.zeros(1 << 20))",
    "hc.all_gather_object([None] * 2, 0)",
    "hc.barrier()",
]


@pytest.mark.parametrize("operation", OPERATIONS if room is not None else [])  # it is compiled code that stops them
def test_a_program_ends_with_its_own_status_while_a_daemon_thread_waits(operation: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    for end in ("", "sys.exit(7 * world.rank)"):
        file.write_text(WAITS_AT_THE_END.format(operation=operation, end=end))
        ended = launch(2, sys.executable, file)
        assert ended.returncode == (7 if end else 0), ended.stderr
        assert end or ended.stderr == ""
