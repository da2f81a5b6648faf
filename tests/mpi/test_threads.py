"""Threads with a group each, whose first operations the ranks make in another order: a job of two ranks for each."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from ..launch import launch

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
