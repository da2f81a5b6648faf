"""Whether all ranks stand still: in one call of C, in calls that wait for each other, or at the end of the program."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpccomm.debug.culprits import verdict
from hpccomm.debug.standing import Standing

from ..launch import launch
from .test_verdict import is_in, polls, report

pytestmark = pytest.mark.serial

WRITES, CLOSES = 'out.py:12 in save, in f["x"] = ...', "out.py:14 in save, in f.close()"

WAITS = """\
import sys, threading, time
from pathlib import Path
from mpi4py import MPI

def waits():
    while not list(Path(sys.argv[1]).glob("reports/*/verdict.txt")):
        time.sleep(0.1)
    while "further threads" not in next(Path(sys.argv[1]).glob("reports/*/verdict.txt")).read_text():
        time.sleep(0.1)

MPI.COMM_WORLD.Barrier()
thread = threading.Thread(target=waits)
thread.start()

thread.join()
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("name", ["hpccomm-test", "one of the program's"])
def test_the_main_thread_in_a_call_of_c(name: str, computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", time.monotonic if computes else float)
    standing, seconds = Standing(), [0.0, 0.0]

    def looks() -> None:
        give_up = time.monotonic() + 30
        while seconds[0] <= 0.3 and time.monotonic() < give_up:
            seconds[:] = standing.look(time.monotonic()), standing.seconds()
            time.sleep(0.01)

    thread = threading.Thread(target=looks, name=name)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), thread])  # without those of pytest
    thread.start()
    thread.join()
    assert seconds[0] > 0.3
    assert (seconds[1] > 0.0) == (name.startswith("hpccomm-") or not computes)
    give_up = time.monotonic() + 30
    while standing.look(time.monotonic()) and time.monotonic() < give_up:
        pass
    assert standing.look(time.monotonic()) < 0.3


def stands(rank: int, program: str, seconds: float = 30.0, **fields: Any) -> Any:
    return report(rank, 3, program=program, stands=seconds, **fields)


def test_the_places_are_named_and_the_few_are_the_culprits() -> None:
    found = verdict([stands(0, WRITES), stands(1, CLOSES, 12.0), stands(2, WRITES)], 3)
    assert (found.culprits, found.standstill) == ([1], 12.0)
    assert found.lines == [
        "every rank has been in one call of C for 12 s, none of them in one of MPI's:",
        f"rank 1 is at {CLOSES}",
        f"ranks 0, 2 are at {WRITES}",
    ]


def test_all_at_one_place() -> None:
    found = verdict([stands(rank, WRITES) for rank in range(3)], 3)
    assert (found.culprits, found.standstill, found.lines[1:]) == ([], 30.0, [f"ranks 0-2 are at {WRITES}"])


def test_further_threads_are_named() -> None:
    threads = stands(1, WRITES, has_threads=True)
    assert not verdict([stands(rank, WRITES) for rank in range(3)], 3).has_threads
    found = verdict([stands(0, WRITES), threads, stands(2, WRITES)], 3)
    assert (found.standstill, found.has_threads) == (30.0, True)
    assert found.lines[2:] == ["rank 1 has further threads, which may go on"]


def test_all_ranks_wait_for_a_thread_that_waits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITS, encoding="utf-8")
    environment = {"HPCCOMM_TIMEOUT": "3", "HPCCOMM_DEBUG_DIR": str(tmp_path / "reports")}
    done = launch(2, sys.executable, "-m", "hpccomm", "run", program, tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"hpccomm: every rank has been in one call of C for [\d.]+ s, none of them in one of MPI's:\n"
        r"hpccomm: ranks 0-1 are at \S*program.py:15 in <module>, in thread.join\(\).*\n"
        r"hpccomm: ranks 0-1 have further threads, which may go on\n",
        done.stderr,
    ), done.stderr
    assert "the job ends" not in done.stderr


def test_a_rank_that_does_not_answer_or_has_ended_is_named() -> None:
    found = verdict([stands(0, WRITES), report(1, 3, left=True)], 3)
    assert (found.culprits, found.standstill) == ([1, 2], 30.0)
    assert found.lines[2] == "rank 1: it has come to the end of its program"
    assert found.lines[3].startswith("rank 2: it does not answer")


@pytest.mark.parametrize(
    "other", [report(1, 3), report(1, 3, stands=0.0), stands(1, CLOSES, 0.5), report(1, 3, is_in("barrier", 4))]
)
def test_a_rank_that_moves_or_waits_is_enough(other: Any) -> None:
    assert verdict([stands(0, WRITES), other, stands(2, WRITES)], 3).standstill == 0.0


def test_who_is_not_at_the_end_of_the_program_is_named() -> None:
    ended = [report(rank, 4, left=True) for rank in (0, 2, 3)]
    found = verdict([*ended, report(1, 4)], 4)
    assert (found.culprits, found.all_wait) == ([1], 0.0)
    waits = "ranks 0, 2-3 wait at the end of the program for rank 1"
    assert found.lines == [f"{waits}: it is in the program at data.py:7 in load"]
    found = verdict([*ended, report(1, 4, stands=30.0)], 4)
    assert found.culprits == [1]
    assert not verdict([report(rank, 3, left=True) for rank in range(3)], 3).culprits


@pytest.mark.parametrize(
    ("other", "seconds"),
    [
        (report(1, 3, is_in("recv", 1, seconds=12.0, peer=0)), 12.0),
        (report(1, 3, left=True), 30.0),
        (report(1, 3), 0.0),
        (report(1, 3, is_in("recv", 1, seconds=12.0, peer=0), has_threads=True), 0.0),
        (report(1, 3, polls("Iprobe", None)), 0.0),
        (report(1, 3, is_in("recv", 1, seconds=12.0, peer=0), tasks=[{"where": "", "seconds": 3.0}]), 0.0),
    ],
)
def test_whether_all_wait(other: Any, seconds: float) -> None:
    barrier = is_in("barrier", 2)
    assert verdict([report(0, 3, barrier), other, report(2, 3, barrier)], 3).all_wait == seconds


def test_whether_all_wait_while_one_does_not_answer_or_is_dead() -> None:
    reports = [report(0, 3, is_in("barrier", 2)), report(2, 3, is_in("barrier", 2))]
    assert verdict(reports, 3).all_wait == 0.0
    reports[0]["neighbours"] = {"dead": [[1, 2, 1]]}
    assert verdict(reports, 3).all_wait == 30.0
