"""Threads of a program, in jobs of two ranks: with a group each, in another order on each rank; or left at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpccomm.job.mpi_library import path_of_library
from hpccomm.native import fastpath

from ..launch import NO_THREAD_AT_THE_END, launch

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


# At the end of the program each thread waits for a second message, which never comes.
LISTENERS = """
import threading, time
import numpy as np
import hpccomm as hc
from mpi4py import MPI

world = hc.init_process_group()
other, heard, LARGE = 1 - world.rank, [], np.zeros(10**6)

def receive(x, tag):
    {receive}

def listen(tag, x):
    receive(x, tag)
    assert (x == other + tag).all(), x
    heard.append(tag)
    receive(x, tag)

arrays = [np.zeros(3), np.zeros(6)[::2], np.zeros((500, 600)), np.zeros((500, 600)).T]
threads = [threading.Thread(target=listen, args=each, daemon=True) for each in enumerate(arrays)]
for thread in threads:
    thread.start()
for tag, array in enumerate(arrays):
    x = np.full(array.shape, world.rank + tag, float)
    {send}
while len(heard) < len(arrays) and all(thread.is_alive() for thread in threads):
    time.sleep(0.01)
x = np.ones(3)
hc.all_reduce(x)
assert (x == 2).all() and sorted(heard) == [0, 1, 2, 3], heard
"""
SEND, SEND_OBJECT = "hc.send(x, other, tag=tag)", "hc.send_object_list([x], other, tag=tag)"
WAIT = "work.start(); work.wait()"
RECV_OBJECT = "got = [None]; hc.recv_object_list(got, other, tag=tag); x[...] = got[0]"


@pytest.mark.parametrize("is_compiled", [False, *[True] * (fastpath is not None)])
@pytest.mark.parametrize(
    ("receive", "send"),
    [
        ("hc.recv(x, other, tag=tag)", SEND),
        ("hc.recv(x, tag=tag)", SEND),
        ("hc.send(x, other, tag=9) if tag > 1 and tag in heard else hc.recv(x, other, tag=tag)", SEND),
        ("hc.sendrecv(x, MPI.PROC_NULL, x, other, tag=tag)", SEND),
        ("hc.irecv(x, other, tag=tag).wait()", SEND),
        ("hc.wait_all([hc.irecv(x, other, tag=tag)])", SEND),
        ("hc.batch_isend_irecv([hc.P2POp(hc.irecv, x, other, tag=tag)])[0].wait()", SEND),
        ("work = hc.recv_init(x, other, tag=tag); " + WAIT, SEND),
        ("work = hc.send_init(LARGE, other, tag=9) if tag in heard else hc.recv_init(x, tag=tag); " + WAIT, SEND),
        (RECV_OBJECT, SEND_OBJECT),
        (f"if tag in heard: hc.send_object_list([LARGE], other, tag=9)\n    else: {RECV_OBJECT}", SEND_OBJECT),
        ("got = [None]; hc.recv_object_list(got, tag=tag, async_op=True).wait(); x[...] = got[0]", SEND_OBJECT),
    ],
)
def test_threads_that_wait_for_messages_at_the_end_of_the_program_do_no_harm(
    receive: str, send: str, is_compiled: bool, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(LISTENERS.format(receive=receive, send=send))
    ended = launch(2, sys.executable, file, env={"HPCCOMM_NATIVE": f"{is_compiled:d}"})
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "call",
    [
        "hc.all_gather_object([None] * 2, 0, async_op=True).wait()",
        "hc.exchange_sparse({1: x}, async_op=True).wait()",
        "hc.all_to_all([x, x.copy()], [x.copy(), x.copy()])",
    ],
)
def test_a_thread_that_waits_for_a_collective_at_the_end_of_the_program_does_no_harm(call: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import threading, time, numpy as np, hpccomm as hc\nworld, x = hc.init_process_group(), np.ones(90000)\n"
        "def wait():\n"
        f"    {call}\n"
        "if world.rank == 0:\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
        "    while not world.sequence_number:\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.3)\n"  # so that it waits; otherwise this test only says less
    )
    ended = launch(2, sys.executable, file)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_group_may_be_destroyed_at_the_end_of_the_program_while_another_rank_is_late(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import atexit, time, hpccomm as hc\nfrom hpccomm.core import ending\nending.LONELY = 0.1\n"
        "world = hc.init_process_group()\natexit.register(hc.destroy_process_group)\n"
        f"atexit.register(time.sleep, world.rank)\n{NO_THREAD_AT_THE_END}"
    )
    ended = launch(2, sys.executable, file)
    assert (ended.returncode, ended.stderr) == (0, "")


COMPILER = shutil.which(os.environ.get("CC", "cc"))


def built(name: str, folder: Path) -> str:
    """Compile a library to preload, and return its file."""
    source, library = Path(__file__).with_name(f"{name}.c"), folder / f"{name}.so"
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


@pytest.mark.once  # the preloaded library stands in for functions of MPICH's
@pytest.mark.skipif(fastpath is None or COMPILER is None, reason="needs the compiled extension and a C compiler")
def test_a_thread_that_is_in_a_call_of_mpi_when_the_program_ends_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(LISTENERS.format(receive="hc.recv(x, tag=tag)", send=SEND))
    library = path_of_library("libmpi") or ""
    ended = launch(2, sys.executable, file, env={"LD_PRELOAD": built("late_receive", tmp_path), "LIBMPI": library})
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.once
@pytest.mark.skipif(fastpath is None or COMPILER is None, reason="needs the compiled extension and a C compiler")
def test_a_program_whose_threads_sleep_ends_at_once(tmp_path: Path) -> None:
    program = "import hpccomm as hc; hc.init_process_group(); hc.barrier()"
    ended = launch(1, sys.executable, "-c", program, env={"LD_PRELOAD": built("count_pauses", tmp_path)})
    assert ended.returncode == 0
    # One millisecond each. A program with a thread that runs has 500; a thread that just wakes up has some.
    assert 1 <= max(int(line.split()[0]) for line in ended.stdout.splitlines()) < 250, ended.stdout
