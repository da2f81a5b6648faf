"""Hangs of programs one of whose calls of C holds the GIL, so that no thread of Python's runs: what is said of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mpi4py import MPI

from hpccomm.debug import held
from hpccomm.debug.culprits import verdict
from hpccomm.native import gil_held

from ..launch import IMITATED_GPU, launch

pytestmark = [pytest.mark.serial, pytest.mark.skipif(gil_held is None, reason="without the compiled extension")]

START = """
    import ctypes, os, sys, threading, time, numpy as np, hpccomm as hc
    python = ctypes.PyDLL(None)  # whose functions keep the GIL
    EIGHT_SECONDS = b"for _ in $(seq 40); do sleep 0.2; done"  # a machine that stands still shortens one
    os.chdir(sys.argv[1])
    """


# A thread of C ends its process only: MPICH kills the others, and has status 9, theirs, where it sees their end first.
ENDED = (124, 9) if MPI.get_vendor()[0] == "MPICH" else (124,)


def run(program: str, folder: Path, ranks: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(START + program), encoding="utf-8")
    return launch(ranks, sys.executable, file, folder, timeout=60, env=env)


def assert_says(ended: subprocess.CompletedProcess[str], status: tuple[int, ...], pattern: str) -> None:
    assert ended.returncode in status, ended.stderr
    assert re.search(pattern, ended.stderr), ended.stderr


def line_of(program: str, text: str) -> str:
    lines = textwrap.dedent(START + program).splitlines()
    return f"program.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    "call", ["hc.all_reduce(np.ones(3))", "hc.all_reduce(np.ones(9000)[::2])", "hc.recv(np.ones(3), 1)"]
)
def test_who_is_late_inside_such_a_call_is_named_with_its_line(call: str, tmp_path: Path) -> None:
    program = f"""
    with hc.init_process_group(timeout=2) as world:
        hc.barrier()
        if world.rank == 1:
            python.sleep(600)
        {call}
    """
    ended = run(program, tmp_path)
    place = line_of(program, "python.sleep")
    assert_says(
        ended,
        (124,),
        r"rank 1 (never reached|has not answered) .*: Python has not run there for [\d.]+ s: "
        rf"the GIL is held in {place} in <module>.*; rank 0 waits at program.py",
    )


def test_a_module_that_hpccomm_imports_meanwhile_is_not_named(tmp_path: Path) -> None:
    program = """
    class Slow:
        imports = threading.Event()
        def find_spec(self, name, *_):
            if name == "hpccomm.debug.watchdog":
                self.imports.set()
                time.sleep(2)
    with hc.init_process_group(timeout=3) as world:
        if world.rank == 0:
            sys.meta_path.insert(0, Slow())
            Slow.imports.wait()
            python.sleep(600)
        hc.barrier()
    """
    ended = run(program, tmp_path)
    assert_says(ended, ENDED, rf"the GIL is held in {line_of(program, 'python.sleep')} in <module>; rank 1 waits at")


WAITS = {
    "a small receive": "hc.recv(np.ones(3), 1)",
    "a large receive": "hc.recv(np.ones(90000)[::2], 1)",
    "memory of the node": "hc.all_reduce(np.ones(3))",
    "checked": "hc.all_reduce(np.ones(9000)[::2])",
}


@pytest.mark.parametrize("what", WAITS)
def test_what_another_thread_waits_for_is_told_and_goes_on(what: str, tmp_path: Path) -> None:
    """It may have come, and the thread can't run to say so: nobody can tell, so the job goes on."""
    program = f"""
    with hc.init_process_group(timeout=3) as world:
        for _ in range(20):
            hc.all_reduce(np.ones(3))
        other = threading.Thread(target=lambda: {WAITS[what]})
        if world.rank == 0:
            other.start()
            time.sleep(0.5)
            python.system(EIGHT_SECONDS)
            other.join()
            os.mkdir("joined")
        else:
            time.sleep(1)
            {WAITS[what].replace("recv", "send").replace(", 1)", ", 0)")}
            while not os.path.exists("joined"):  # destroy would wait for ten seconds only
                time.sleep(0.1)
    """
    ended = run(program, tmp_path)
    name = WAITS[what].partition("(")[0].removeprefix("hc.")
    place = line_of(program, "python.system")
    assert_says(
        ended,
        (0,),
        rf"rank 0: Python has not run for \d+ s: the GIL is held in {place} in <module>; "
        rf"unfinished, or not yet seen to end: {name} #\d+ of 'world', for [\d.]+ s\n",
    )


ON_A_GPU = """
    from tests.gpu import gpus, stand_in
    with hc.init_process_group(timeout=3) as world:
        array = gpus.array(np.ones(3))
        hc.all_reduce(array)
        hc.barrier()
        if world.rank == 0:
            assert world.dispatcher.backends["cuda"].last_on_gpu.poll()  # the first has ended
            stand_in.MACHINE.held = True  # the GPU waits
            def _all_reduce(*_): pass
            stand_in.Communicator._all_reduce = _all_reduce
            time.sleep(0.1)  # not at once behind another one, of which the watchdog takes note
            hc.all_reduce(array)
            python.sleep(600)  # as the first launch of a kernel, behind NCCL's
        else:
            time.sleep(600)
    """


def test_a_rank_whose_gpu_waits_ends_the_job_itself(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    ended = run(ON_A_GPU, tmp_path, **{**IMITATED_GPU, "HPCCOMM_INTRA_NODE": "0"})
    place = line_of(ON_A_GPU, "python.sleep")
    assert_says(
        ended,
        ENDED,
        rf"rank 0: Python has not run for \d+ s: the GIL is held in {place} in <module>; "
        r"unfinished: all_reduce #3 of 'world' on the GPU, for [\d.]+ s\n(.*\n)*hpccomm: the job ends with status 124",
    )


WITH_CUDA = """
    from hpccomm.native import gil_held
    def noted(function, event, timeout, on_timeout="abort"):
        world = hc.init_process_group(timeout=timeout, on_timeout=on_timeout)
        asked = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
        gil_held.ask_cuda(asked, 0)  # in the place of cuEventQuery
        return world, world.dispatcher.notes.begin_on_gpu("all_reduce", 7, event)
    """
NOT_READY = 600  # CUDA_ERROR_NOT_READY, which abs(600) is, too; abs(1 << 32) is 0, and pause gives no answer


@pytest.mark.parametrize(
    ("function", "event", "on_timeout", "is_notified", "ends"),
    [
        ("abs", NOT_READY, "abort", True, True),
        ("abs", NOT_READY, "warn", True, False),
        ("abs", NOT_READY, "raise", True, False),
        ("abs", 1 << 32, "abort", False, False),
        ("pause", NOT_READY, "abort", True, True),
    ],
    ids=["the GPU waits", "warn", "raise", "the GPU has done it", "CUDA does not answer"],
)
def test_cuda_is_asked_before_the_job_ends(
    function: str, event: int, on_timeout: str, is_notified: bool, ends: bool, tmp_path: Path
) -> None:
    program = f"""
    world, note = noted("{function}", {event}, 2, "{on_timeout}")
    python.{"sleep(600)" if ends else "system(EIGHT_SECONDS)"}
    world.dispatcher.notes.end(note)
    world.destroy()
    """
    ended = run(WITH_CUDA + program, tmp_path)
    assert ended.returncode in (ENDED if ends else (0,)), ended.stderr
    assert ("the job ends with status 124" in ended.stderr) == ends
    assert ("unfinished: all_reduce #7 of 'world' on the GPU" in ended.stderr) == is_notified


def test_what_the_program_has_taken_is_left_alone(tmp_path: Path) -> None:
    """It has closed the file of the stacks and opened one of its own, and handles all signals as it likes."""
    program = f"""
    import signal
    world, note = noted("abs", {NOT_READY}, 2, "warn")
    def name(fd):
        try:
            return os.readlink(f"/proc/self/fd/{{fd}}")
        except FileNotFoundError:  # that of the folder itself
            return ""
    stacks = next(fd for fd in map(int, os.listdir("/proc/self/fd")) if "hpccomm-stacks" in name(fd))
    os.close(stacks)
    mine = os.open(f"mine{{world.rank}}", os.O_CREAT | os.O_RDWR)
    assert mine == stacks
    os.write(mine, b"my data")
    for number in range(signal.SIGRTMIN + 8, signal.SIGRTMAX + 1):
        signal.signal(number, signal.SIG_DFL)
    python.system(EIGHT_SECONDS)
    assert os.pread(mine, 100, 0) == b"my data"
    world.dispatcher.notes.end(note)
    world.destroy()
    """
    ended = run(WITH_CUDA + program, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "the GIL is held in an unknown line; unfinished: all_reduce #7" in ended.stderr


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    program = f"""
    world, note = noted("abs", {NOT_READY}, 8)
    pid = os.getpid()
    os.system(f"(sleep 1; kill -STOP {{pid}}; sleep 8; kill -CONT {{pid}}) &")
    python.sleep(6)
    world.dispatcher.notes.end(note)
    world.destroy()
    """
    ended = run(WITH_CUDA + program, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_job_whose_ranks_are_all_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """As Slurm does it with `scontrol suspend` and `scontrol resume`."""
    program = """
    with hc.init_process_group(timeout=6) as world:
        pids = [0, 0]
        hc.all_gather_object(pids, os.getpid())
        both = " ".join(map(str, pids))
        if world.rank == 1:
            os.system(f"(sleep 3; kill -STOP {both}; sleep 7; kill -CONT {both}; touch resumed) &")
            while not os.path.exists("resumed"):
                time.sleep(0.1)
            time.sleep(2.5)  # two looks of rank 0
        hc.barrier()
    """
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


def test_nobody_waits_for_the_thread_that_writes(tmp_path: Path) -> None:
    """Its stderr is a pipe that nobody reads."""
    program = f"""
    world, note = noted("abs", {NOT_READY}, 600)
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(4096))
    except BlockingIOError:
        os.set_blocking(write, True)
    stderr = os.dup(2)
    os.dup2(write, 2)
    python.sleep(7)
    hc.new_group().destroy()
    os.dup2(stderr, 2)
    world.dispatcher.notes.end(note)
    print("went on", flush=True)
    os.close(read)  # the thread has waited until here
    world.destroy()
    """
    ended = run(WITH_CUDA + program, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, 2 * "went on\n"), ended.stderr


def test_an_exception_of_a_signals_handler_leaves_no_note(tmp_path: Path) -> None:
    program = """
    import signal
    class Rings(Exception): pass
    armed = []
    def ring(*_):
        if armed:
            armed.clear()
            raise Rings
    signal.signal(signal.SIGALRM, ring)
    world = hc.init_process_group(timeout=2)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1.1e-3)
    rung, until = 0, time.monotonic() + 3
    while rung < 100 or time.monotonic() < until:
        try:
            armed.append(True)
            while True:
                world.dispatcher.notes.during("barrier", 1, int, ())
        except Rings:
            rung += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    python.sleep(7)
    world.destroy()
    """
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


def test_a_call_that_keeps_nobody_waiting_is_left_alone(tmp_path: Path) -> None:
    program = """
    with hc.init_process_group(timeout=2) as world:
        hc.broadcast(np.ones(3), 0)
        receive = hc.irecv(np.ones(3), 1 - world.rank)  # nobody waits for it
        python.sleep(7)
        hc.send(np.ones(3), 1 - world.rank)
        receive.wait()
    """
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


def test_a_root_that_has_gone_on_is_not_blamed(tmp_path: Path) -> None:
    """Rank 0 has done its part of the broadcast; rank 2 has not come to the one before."""
    program = """
    with hc.init_process_group(timeout=4) as world:
        hc.barrier()
        time.sleep(2)  # the watchdog has seen the group
        if world.rank == 0:
            hc.isend(np.ones(3), 1)
            hc.broadcast(np.ones(3), 0)
            python.sleep(600)
        elif world.rank == 1:
            hc.recv(np.ones(3), 2)
        time.sleep(600)
    """
    ended = run(program, tmp_path, ranks=3)
    assert ended.returncode == 124, ended.stderr
    assert "rank 2 has not answered recv #1 of 'world'" in ended.stderr
    assert "rank 0" not in ended.stderr


REPORT = """\
held 1
answers 1 abc
rank 0 of 2
host here
pid 17
time 1790000000.5
seconds 12.25
place train.py:8 in load data
operation 3.5 7 all_reduce 0123456789ab my group
group 6 2 0123456789ab my group
stacks
Thread 0x01 (most recent call first):
  File "train.py", line 8 in load data
"""


def test_what_the_thread_writes_is_read_as_a_report() -> None:
    report = held.report(REPORT)
    (operation,) = report["operations"]
    assert (operation["name"], operation["number"], operation["group_name"]) == ("all_reduce", 7, "my group")
    assert report["groups"] == {"0123456789ab": {"name": "my group", "collectives": 6, "messages": 2}}
    assert (report["rank"], report["size"], report["answers"], report["held"]) == (0, 2, "1 abc", 12.25)
    late = {**report, "operations": []}
    wait = {**operation, "number": 7, "waits": True, "seconds": 5.0, "where": "train.py:9"}
    groups = {"0123456789ab": {"ranks": [[0, 2, 1]], "collectives": 7}}
    other = {**report, "rank": 1, "operations": [wait], "groups": groups}
    del other["held"]
    (line,) = verdict([late, other], 2).lines
    assert line.startswith("rank 0 never reached all_reduce #7 of 'my group'")
    assert "Python has not run there for 12 s: the GIL is held in train.py:8 in load data" in line
    done = {**late, "groups": {"0123456789ab": {"name": "my group", "collectives": 7, "messages": 2}}}
    assert verdict([done, other], 2).culprits == []


@pytest.mark.parametrize(
    "text", ["", "held 1\n", REPORT.replace("rank 0 of 2", "rank x"), REPORT.replace(" 7 ", " seven ")]
)
def test_a_report_that_is_none_is_left_out(text: str, tmp_path: Path) -> None:
    from hpccomm.debug import report

    (tmp_path / "rank0.held").write_text(text)
    assert report.read(tmp_path) == []


def test_hpccomm_debug_shows_such_a_report(tmp_path: Path) -> None:
    (tmp_path / "rank0.held").write_text(REPORT)
    other = {**held.report(REPORT), "rank": 1, "threads": {}}
    del other["held"]
    (tmp_path / "rank1.json").write_text(json.dumps(other))
    for options in ([], ["--stacks"]):
        shown = subprocess.run(
            [sys.executable, "-m", "hpccomm", "debug", *options, tmp_path], capture_output=True, text=True, check=False
        )
        assert "Error" not in shown.stderr
        assert ("line 8 in load data" in shown.stdout) == bool(options)
