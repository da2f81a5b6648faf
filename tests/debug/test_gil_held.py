"""Hangs of programs one of whose calls of C holds the GIL, so that no thread of Python's runs: what is said of them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpccomm.debug import held
from hpccomm.debug.culprits import verdict
from hpccomm.native import gil_held

from ..launch import IMITATED_GPU, launch

pytestmark = [pytest.mark.serial, pytest.mark.skipif(gil_held is None, reason="without the compiled extension")]

START = """
    import ctypes, os, sys, threading, time, numpy as np, hpccomm as hc
    python = ctypes.PyDLL(None)  # whose functions keep the GIL
    os.chdir(sys.argv[1])
    """


def run(program: str, folder: Path, ranks: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(START + program), encoding="utf-8")
    return launch(ranks, sys.executable, file, folder, timeout=60, env=env)


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
    assert ended.returncode == 124, ended.stderr
    place = line_of(program, "python.sleep")
    assert re.search(
        r"rank 1 (never reached|has not answered) .*: Python has not run there for [\d.]+ s: "
        rf"the GIL is held in {place} in <module>.*; rank 0 waits at program.py",
        ended.stderr,
    ), ended.stderr


WAITS = {
    "a small receive": "hc.recv(np.ones(3), 1)",
    "a large receive": "hc.recv(np.ones(90000)[::2], 1)",
    "memory of the node": "hc.all_reduce(np.ones(3))",
    "checked": "hc.all_reduce(np.ones(9000)[::2])",
}


@pytest.mark.parametrize("what", WAITS)
def test_a_rank_that_waits_in_another_thread_ends_the_job_itself(what: str, tmp_path: Path) -> None:
    program = f"""
    with hc.init_process_group(timeout=3) as world:
        for _ in range(20):
            hc.all_reduce(np.ones(3))
        if world.rank == 0:
            thread = threading.Thread(target=lambda: {WAITS[what]}, daemon=True)
            thread.start()
            time.sleep(0.5)
            python.sleep(600)
        else:
            time.sleep(600)
    """
    ended = run(program, tmp_path)
    assert ended.returncode == 124, ended.stderr
    name = WAITS[what].partition("(")[0].removeprefix("hc.")
    place = line_of(program, "python.sleep")
    assert re.search(
        rf"rank 0: Python has not run for \d+ s: the GIL is held in {place} in <module>; "
        rf"unfinished: {name} #\d+ of 'world', for [\d.]+ s\n",
        ended.stderr,
    ), ended.stderr
    assert "hpccomm: the job ends with status 124, because the GIL can't be taken" in ended.stderr


ON_A_GPU = """
    from tests.gpu import gpus, stand_in
    with hc.init_process_group(timeout=3) as world:
        array = gpus.array(np.ones(3))
        hc.all_reduce(array)
        hc.barrier()
        if world.rank == 0:
            assert world.door.backends["cuda"].last_on_gpu.poll()  # the first has ended
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
    assert ended.returncode == 124, ended.stderr
    place = line_of(ON_A_GPU, "python.sleep")
    assert re.search(
        rf"rank 0: Python has not run for \d+ s: the GIL is held in {place} in <module>; "
        r"unfinished: all_reduce #3 of 'world' on the GPU, for",
        ended.stderr,
    ), ended.stderr


@pytest.mark.parametrize(
    ("function", "event", "ends"),
    [("abs", 600, True), ("abs", 1 << 32, False), ("pause", 600, True)],  # 600: CUDA_ERROR_NOT_READY; pause: no answer
    ids=["the GPU waits", "the GPU has done it", "CUDA does not answer"],
)
def test_cuda_is_asked_before_the_job_ends(function: str, event: int, ends: bool, tmp_path: Path) -> None:
    """`abs` and `pause` in the place of cuEventQuery."""
    program = f"""
    from hpccomm.native import gil_held
    with hc.init_process_group(timeout=2) as world:
        gil_held.ask_cuda(ctypes.cast(getattr(ctypes.CDLL(None), "{function}"), ctypes.c_void_p).value)
        note = world.door.notes.begin_on_gpu("all_reduce", 7, {event})
        python.sleep({600 if ends else 8})
        world.door.notes.end(note)
    """
    ended = run(program, tmp_path)
    assert ended.returncode == (124 if ends else 0), ended.stderr
    assert ("unfinished: all_reduce #7 of 'world' on the GPU" in ended.stderr) == ends


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


@pytest.mark.parametrize("on_timeout", ["warn", "raise"])
def test_the_groups_setting_says_whether_the_job_ends(on_timeout: str, tmp_path: Path) -> None:
    program = f"""
    with hc.init_process_group(timeout=2, on_timeout="{on_timeout}") as world:
        hc.barrier()
        if world.rank == 0:
            thread = threading.Thread(target=hc.recv, args=(np.ones(3), 1), daemon=True)
            thread.start()
            time.sleep(0.5)
            python.sleep(8)
            thread.join()
        else:
            time.sleep(10)
            hc.send(np.ones(3), 0)
    """
    ended = run(program, tmp_path)
    assert ended.returncode == (0 if on_timeout == "warn" else 124), ended.stderr
    assert "rank 0: Python has not run for" in ended.stderr


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
    other = {**report, "rank": 1, "operations": [wait], "groups": {"0123456789ab": {"ranks": [0, 1], "collectives": 7}}}
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
