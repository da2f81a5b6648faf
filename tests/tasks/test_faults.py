"""Workers that die or hang, and programs at lower thread levels: jobs of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from ..launch import run_program, time_limit

pytestmark = pytest.mark.serial
OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"
survives = pytest.mark.skipif(not OPEN_MPI, reason="only Open MPI survives dead ranks (mpirun --with-ft ulfm)")
ULFM = {"MPIEXEC_ARGS": "--with-ft ulfm"}

BEGIN = """
import os, signal, sys, time
import hpccomm as hc

def square(x):
    return x * x

def die_once(x, folder):
    mark = os.path.join(folder, "died")
    if x == 3 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return x * x

def die(x):
    os.kill(os.getpid(), signal.SIGKILL)

def rank(x):
    return hc.get_rank()

def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.01)

def told():  # an event that is set when something has been
    import threading
    from hpccomm.tasks.scheduler import Scheduler
    came, tell = threading.Event(), Scheduler._tell
    def tell_and_set(self, text):
        tell(self, text)
        came.set()
    Scheduler._tell = tell_and_set
    return came

def hang(x):
    while True:
        time.sleep(0.01)  # here

"""


def run(
    ranks: int, program: str, folder: Path, env: dict[str, str] | None = None, argument: str = ""
) -> tuple[int, str, str]:
    env = {"HPCCOMM_DEBUG_DIR": str(folder), **(env or {})}
    ended = run_program(BEGIN + program, folder, ranks, folder, argument, env=env)
    return ended.returncode, ended.stdout, ended.stderr


@survives
def test_the_task_of_a_dead_worker_is_given_to_another(tmp_path: Path) -> None:
    program = """
world = hc.init_process_group()
with hc.executor() as executor:
    if executor is not None:
        print(list(executor.map(die_once, range(40), [sys.argv[1]] * 40)), executor.num_workers)
world = hc.shrink_group()
hc.barrier()
print("of", world.size)
hc.destroy_process_group()
"""
    _, printed, told = run(4, program, tmp_path, ULFM)
    assert f"{[x * x for x in range(40)]} 2" in printed, told
    assert printed.count("of 3") == 3
    assert "has died in the task die_once(3, " in told


@survives
def test_a_task_that_kills_its_workers_is_not_given_to_all_of_them(tmp_path: Path) -> None:
    program = """
hc.init_process_group()
with hc.executor() as executor:
    if executor is not None:
        future = executor.submit(die, 5)
        try:
            future.result()
        except hc.RankFailedError as error:
            print("failed:", error)
        print(list(executor.map(square, range(4))), executor.num_workers)
hc.shrink_group()
hc.destroy_process_group()
"""
    _, printed, told = run(4, program, tmp_path, ULFM)
    assert "failed: 2 ranks have died in the task die(5)" in printed, told
    assert "[0, 1, 4, 9] 1" in printed


@survives
def test_an_executor_without_workers_says_so(tmp_path: Path) -> None:
    program = """
import concurrent.futures
hc.init_process_group()
with hc.executor() as executor:
    if executor is not None:
        futures = [executor.submit(die, k) for k in range(3)]
        for future in futures:
            print("failed:", type(future.exception()).__name__, future.exception())
        try:
            executor.submit(square, 1).result()
        except concurrent.futures.BrokenExecutor as error:
            print("broken:", error)
hc.shrink_group()
hc.destroy_process_group()
"""
    _, printed, told = run(2, program, tmp_path, ULFM)
    assert printed.count("failed: RankFailedError executor: all ranks that could do a task have died") == 3, told
    assert "broken: executor: all ranks" in printed


def test_a_worker_that_is_killed_ends_the_job_without_fault_tolerance(tmp_path: Path) -> None:
    program = """
hc.init_process_group()
with hc.executor() as executor:
    if executor is not None:
        print(list(executor.map(die, range(4))))
print("beyond")
"""
    status, printed, told = run(3, program, tmp_path)
    assert status not in (0, 124)
    assert "beyond" not in printed
    assert "signal 9" in printed + told  # the launcher says so


@pytest.mark.parametrize("action", ["abort", "raise", "warn"])
def test_a_task_that_hangs_is_named(action: str, tmp_path: Path) -> None:
    program = f"""
hc.init_process_group(on_timeout={action!r})
came = told()
with hc.executor(task_timeout=1) as executor:
    if executor is not None:
        future = executor.submit(hang, 7)
        try:
            future.result() if {action != "warn"} else came.wait()
        except TimeoutError as error:
            print("raised", error)
        print(list(executor.map(square, range(4)))[3])
        sys.stdout.flush()
        os._exit(7)
"""
    status, printed, told = run(3, program, tmp_path)
    text = "has been in the task hang(7) for "
    line = 1 + BEGIN.splitlines().index("        time.sleep(0.01)  # here")
    place = f"program.py:{line} in hang, in time.sleep(0.01)"
    if action == "raise":
        assert text in printed, told
        assert place in printed
    else:
        assert text in told, printed
        assert place in told
    if action == "abort":
        assert "the job ends with status 124" in told
        assert status == 124
        assert "raised" not in printed
        verdict = "\n".join(file.read_text() for file in tmp_path.rglob("verdict*.txt"))
        waits = r"rank 0 waits at \S*program\.py:\d+, for "
        task = rf"it is in task #1 of 'world' \(hang\(7\)\), \S*program\.py:{line}, for .*; {waits}"
        assert re.search(rf"rank [12] has not answered task of 'world' \(hang\(7\)\): {task}", verdict), told
    else:
        assert "9" in printed.splitlines()  # the other worker does tasks
        assert status not in (0, 124)


def test_a_worker_that_is_late_comes_back(tmp_path: Path) -> None:
    program = """
hc.init_process_group(on_timeout="raise")
gate = os.path.join(sys.argv[1], "gate")
with hc.executor(task_timeout=float(sys.argv[2])) as executor:
    if executor is not None:
        list(executor.map(square, range(50)))  # workers get quick tasks in advance now
        late = executor.submit(wait_for, gate)
        print([executor.submit(square, k).result() for k in range(9)])
        print([each.result() for each in [executor.submit(square, k) for k in range(9)]])
        print(type(late.exception()).__name__)
        open(gate, "w").close()
        ranks = set()
        while len(ranks) < 2:
            ranks |= set(executor.map(rank, range(20)))
hc.barrier()
print("end")
"""
    status, printed, told = run(3, program, tmp_path, argument=str(time_limit(1)))
    assert status == 0, told
    assert printed.count(str([k * k for k in range(9)])) == 2
    assert "DistTimeoutError" in printed
    assert printed.count("end") == 3


@pytest.mark.parametrize(("action", "ranks"), [("raise", 2), ("raise", 3), ("warn", 2), ("warn", 3)])
def test_each_task_is_done_once_also_behind_one_that_is_late(action: str, ranks: int, tmp_path: Path) -> None:
    program = f"""
def note(k):
    with open(os.path.join(sys.argv[1], "done"), "a") as file:
        file.write(f"{{k}}\\n")

hc.init_process_group(on_timeout={action!r})
came, first, gate = told(), *(os.path.join(sys.argv[1], name) for name in ("first", "gate"))
with hc.executor(task_timeout=float(sys.argv[2])) as executor:
    if executor is not None:
        busy = [executor.submit(wait_for, first) for _ in range(executor.num_workers)]
        noted = [executor.submit(note, k) for k in range(20)]
        late = executor.submit(wait_for, gate)
        noted += [executor.submit(note, k) for k in range(20, 120)]
        open(first, "w").close()  # all wait now: workers get quick tasks in advance
        print(type(late.exception()).__name__ if {action == "raise"} else came.wait())
        if {(action, ranks) == ("raise", 3)}:  # the other one does all
            print([each.result() for each in noted] == [None] * 120)
        open(gate, "w").close()
        print([each.result() for each in noted] == [None] * 120)
"""
    status, printed, told = run(ranks, program, tmp_path, argument=str(time_limit(1)))
    assert status == 0, told
    assert ("DistTimeoutError" in printed) == (action == "raise")
    assert "False" not in printed
    done = sorted(map(int, (tmp_path / "done").read_text().split()))
    assert done == list(range(120))


def test_a_task_without_a_limit_is_told_of(tmp_path: Path) -> None:
    program = """
hc.init_process_group(timeout=1)
came, gate = told(), os.path.join(sys.argv[1], "gate")
with hc.executor() as executor:
    if executor is not None:
        future = executor.submit(wait_for, gate)
        came.wait()
        open(gate, "w").close()
        print("returned", future.result())
"""
    status, printed, told = run(2, program, tmp_path)
    assert (status, "returned None" in printed) == (0, True), told
    assert "has been in the task wait_for('" in told
    assert "task_timeout= of hc.executor ends such tasks" in told


WAYS = {  # in which rank 0 waits for a task
    "result": "future.result()",
    "exception": "future.exception()",
    "map": "list(executor.map(wait_for, [gate]))",
    "wait": "concurrent.futures.wait([future])",
    "as_completed": "list(concurrent.futures.as_completed([future]))",
    "the end of the block": "executor.shutdown()",
}


@pytest.mark.parametrize("level", ["multiple", pytest.param("serialized", marks=pytest.mark.slow)])
def test_a_verdict_names_the_task_that_never_ends_its_rank_and_the_line_that_waits(level: str, tmp_path: Path) -> None:
    ways = {name: way for name, way in WAYS.items() if level == "multiple" or name not in ("wait", "as_completed")}
    waits = "\n".join(
        f"""
        gate = os.path.join(sys.argv[1], "gate {name}")
        future = executor.submit(wait_for, gate) if {name != "map"} else None
        threading.Thread(target=open_when_named, args=[{name!r}, gate]).start()
        {way}  # {name}"""
        for name, way in ways.items()
    )
    program = f"""
import concurrent.futures, threading
from hpccomm.debug import culprits, start

def open_when_named(name, gate):
    lines = []
    while not (lines and "it is in task" in lines[0] and "rank 0 waits" in lines[0]):
        found = start.current()._reports("a test")
        lines = culprits.verdict(found, 2).lines
    print(name, "|", lines[0])
    open(gate, "w").close()

hc.init_process_group()
with hc.executor() as executor:
    if executor is not None:{waits}
"""
    level = f"import mpi4py; mpi4py.rc.thread_level = {level!r}\n"
    status, printed, told = run(2, level + program, tmp_path)
    assert status == 0, told
    lines = (tmp_path / "program.py").read_text().splitlines()
    in_task = 1 + lines.index("        time.sleep(0.01)")
    for name, way in ways.items():
        said = next(line for line in printed.splitlines() if line.startswith(f"{name} |"))
        line = 1 + lines.index(f"        {way}  # {name}")
        assert re.search(r"rank 1 has not answered task of 'world' \(wait_for\('.*\): it is in task #\d+ of", said)
        assert re.search(rf"program\.py:({in_task - 1}|{in_task}), for ", said)  # the loop's two lines
        assert re.search(rf"; rank 0 waits at \S*program\.py:{line}, for ", said)


@pytest.mark.parametrize("level", [pytest.param("single", marks=pytest.mark.slow), "serialized"])
def test_thread_levels(level: str, tmp_path: Path) -> None:
    program = """
hc.init_process_group()
import threading
with hc.executor() as executor:
    if executor is not None:
        print(list(executor.map(square, range(5))), executor.submit(square, 9).result())
        print("hpccomm-executor" in [thread.name for thread in threading.enumerate()])
        try:
            executor.submit(square, 1).add_done_callback(print)
        except hc.UnsupportedOperationError as error:
            print(error)
try:
    with hc.executor() as executor:
        if executor is not None:
            executor.submit(square, 1)
            raise KeyError("not caught in the block")
except KeyError:
    pass
hc.barrier()
print("end")
"""
    status, printed, told = run(2, f"import mpi4py; mpi4py.rc.thread_level = {level!r}\n{program}", tmp_path)
    assert status == 0, told
    assert "[0, 1, 4, 9, 16] 81" in printed
    assert "False" in printed
    assert "need MPI_THREAD_MULTIPLE" in printed
    assert printed.count("end") == 2


def test_ctrl_c_in_the_block_ends_the_job(tmp_path: Path) -> None:
    program = """
hc.init_process_group()
with hc.executor() as executor:
    if executor is not None:
        future = executor.submit(hang, 1)
        while not future.running():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        future.result()
"""
    status, _, told = run(2, program, tmp_path)
    assert status not in (0, 124)
    assert "hpccomm: Ctrl-C ends the job" in told


def test_workers_are_released_by_a_program_that_does_not_wait_for_it(tmp_path: Path) -> None:
    program = """
world = hc.init_process_group()
executor = hc.executor().__enter__()
if executor is not None:
    futures = [executor.submit(square, x) for x in range(20)]
    executor.shutdown(wait=False)
"""
    status, _, told = run(2, program, tmp_path)
    assert status == 0, told
