"""What ranks of a node print when they fail at the same time: once what is equal, and nothing is lost."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from hpccomm import errors
from hpccomm.process import together
from hpccomm.process.settings import folder_at_start
from hpccomm.process.together import Words, said_once

from ..launch import run_program

pytestmark = pytest.mark.serial

WORDS = Words("Traceback:\nValueError: x is wrong (rank 5)", "hpccomm: ValueError on {ranks} ends the job")
ALONE = "[rank 5] Traceback:\n[rank 5] ValueError: x is wrong (rank 5)\nhpccomm: ValueError on rank 5 ends the job"
HEAD = """
    import os, sys
    import numpy as np, hpccomm as hc
    from hpccomm.process import together
    together.QUIET = {seconds}  # on a machine as loaded as you like
    def step():
        {body}
    world = hc.init_process_group()
    rank, x = world.rank, np.ones(3)
    with world:
        step()
    """
ALL_OF_THEM = {
    "an argument is refused": ("hc.all_reduce(x, 'meen')", "ValueError: all_reduce: no reduction is called 'meen'"),
    "a rank that is not there": ("hc.send(x, dst=99)", "ValueError: send: dst is 99, which is not in the group"),
    "a wrong name": ("hc.broadcast(x, root=0)", "TypeError: broadcast() got an unexpected keyword argument 'root'"),
    "a type": ("hc.all_reduce([1, 2])", "TypeError: all_reduce: array is"),
    "an exception of the program's": ("{}['a']", "KeyError: 'a'"),
    "sys.exit": ("sys.exit('we stop here')", "[ranks 0-3] we stop here"),
}


def run(tmp_path: Path, body: str, seconds: float) -> list[str]:
    finished = run_program(HEAD.format(body=body, seconds=seconds), tmp_path, 4, status=1)
    assert "MPI_ABORT" not in finished.stderr.upper(), finished.stderr
    return finished.stderr.splitlines()


@pytest.mark.parametrize("case", ALL_OF_THEM)
def test_what_all_ranks_say_is_printed_once(case: str, tmp_path: Path) -> None:
    body, said = ALL_OF_THEM[case]
    lines = [line for line in run(tmp_path, body, 60) if "rank" in line and "hpccomm/process" not in line]
    assert all(line.startswith(("[ranks 0-3] ", "hpccomm: ")) for line in lines), lines
    assert sum(said in line for line in lines) == 1
    assert sum("Traceback" in line for line in lines) == (case != "sys.exit")
    assert not any("hpccomm/core" in line or "hpccomm/api" in line for line in lines), lines
    assert "ends the job" in lines[-1]
    assert "0-3" in lines[-1]


def test_what_differs_is_printed_for_each(tmp_path: Path) -> None:
    lines = run(tmp_path, "{}['b' if rank == 1 else 'a']", 60)
    for ranks, key in (("rank 1", "b"), ("ranks 0, 2-3", "a")):
        assert f"[{ranks}] KeyError: '{key}'" in lines
        assert f"hpccomm: KeyError on {ranks} ends the job" in lines


def test_one_rank_does_not_wait_for_others_that_go_on(tmp_path: Path) -> None:
    lines = run(tmp_path, "rank == 1 and {}['a']; hc.all_reduce(x)", together.QUIET)
    assert "[rank 1] KeyError: 'a'" in lines
    assert "hpccomm: KeyError on rank 1 ends the job" in lines


@pytest.mark.parametrize(("answer", "texts"), [(b"!", []), (b"", [ALONE]), (b"?", [ALONE]), (None, [ALONE])])
def test_who_gets_no_answer_prints_by_itself(
    answer: bytes | None, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the rank that listens has died before it has taken the connection."""
    monkeypatch.setattr(errors, "_rank", 5)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0hpccomm-errors-{os.path.basename(folder_at_start())}")
        if answer is not None:
            listener.listen()

        def reply() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile() as file:
                assert "ValueError: x is wrong" in file.read()
                connection.send(answer or b"")

        thread = threading.Thread(target=reply)
        if answer is not None:
            thread.start()
        with said_once(WORDS) as said:
            assert said == texts
        if answer is not None:
            thread.join()


@pytest.mark.parametrize("sent", [b"", b"{", b"[]", b'[7, "lines"]'])
def test_what_is_no_message_of_a_rank_is_left_out(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_rank", 5)
    monkeypatch.setattr(together, "QUIET", 2.0)
    monkeypatch.setattr(together, "placement", lambda: None)  # of the launcher of the tests
    disturbed = threading.Event()
    address = f"\0hpccomm-errors-{os.path.basename(folder_at_start())}"

    def disturb() -> None:
        while not disturbed.wait(0.01):
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(address)
                except ConnectionRefusedError:
                    continue
                connection.sendall(sent)
                disturbed.set()

    thread = threading.Thread(target=disturb)
    thread.start()
    with said_once(WORDS) as said:
        assert said == [ALONE]
    is_disturbed = disturbed.is_set()
    disturbed.set()
    thread.join()
    assert is_disturbed
