"""The start of the watchdog: what a first operation does not need is imported a second later, and before any hang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hpccomm.debug.report import Reporter

from ..launch import launch

pytestmark = pytest.mark.serial


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program), encoding="utf-8")
    return launch(2, sys.executable, file, folder, timeout=100)


LOADED = """
    import os, pathlib, sys, time, numpy as np, hpccomm as hc
    from hpccomm.debug import start
    folder = pathlib.Path(sys.argv[1])
    os.chdir(folder)
    def loaded():
        return start._started.watchdog is not None
    def poll(is_there):
        while not is_there():
            time.sleep(0.01)
    """


def test_a_verdict_imports_nothing(tmp_path: Path) -> None:
    program = """
    world = hc.init_process_group(timeout=2, on_timeout="warn")
    hc.all_reduce(np.ones(3))
    poll(loaded)
    hc.barrier()
    before, said = set(sys.modules), folder / "stderr of rank 0"
    if world.rank == 1:
        poll(lambda: said.exists() and "rank 1 never reached all_reduce #3 of 'world'" in said.read_text())
    else:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    hc.all_reduce(np.ones(3))
    print(f"{sorted(set(sys.modules) - before)}\\n", end="")
    """
    finished = run(LOADED + program, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[]\n[]\n"


def test_a_question_in_the_first_second_is_answered(tmp_path: Path) -> None:
    program = """
    import signal
    world = hc.init_process_group()
    os.kill(os.getpid(), signal.SIGUSR2)
    poll(lambda: len(list(folder.glob("hpccomm-debug-*/run-*/rank*.json"))) == 2)
    hc.barrier()
    """
    finished = run(LOADED + program, tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_a_command_in_the_first_second_is_answered(tmp_path: Path) -> None:
    program = """
    from hpccomm.debug import asking
    asking.FIRST_LOOK = 60
    world = hc.init_process_group()
    if world.rank == 1:
        asking.ask_process(os.getppid())
    hc.barrier()
    """
    finished = run(LOADED + program, tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_a_time_limit_that_passes_in_the_first_second_has_a_verdict(tmp_path: Path) -> None:
    program = """
    world, group = hc.init_process_group(), hc.new_group()
    if world.rank == 0:
        try:
            hc.barrier(group, timeout=0.1)
        except hc.DistTimeoutError as error:
            print(error)
        hc.barrier()
    else:
        hc.barrier()
        hc.barrier(group, timeout=60)
    """
    finished = run(LOADED + program, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "rank 1 is in barrier #1 of 'world'" in finished.stdout


@pytest.mark.parametrize(("age", "is_for_others"), [(60, True), (0, False)])
def test_questions_from_before_the_start_are_for_others(tmp_path: Path, age: float, is_for_others: bool) -> None:
    asked = time.time() - age
    (tmp_path / "ask").write_text("1 abc")
    os.utime(tmp_path / "ask", (asked, asked))
    assert Reporter(0, 2, tmp_path, since=time.time()).is_asked() == (not is_for_others)


def test_a_process_that_is_forked_in_the_middle_of_the_import_can_import_it(tmp_path: Path) -> None:
    program = """
    import signal, threading
    comes, goes_on = threading.Event(), threading.Event()
    class SlowFileSystem:
        def find_spec(self, name, path=None, target=None):
            if name == "hpccomm.debug.culprits":
                comes.set()
                goes_on.wait(1)  # nobody lets it go on: who forks waits for it
    sys.meta_path.insert(0, SlowFileSystem())
    hc.init_process_group()
    assert comes.wait(100)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it, if it can't
        from hpccomm.debug.culprits import verdict
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    finished = run(LOADED + program, tmp_path)
    assert finished.returncode == 0, finished.stderr
