"""hpccomm top: the screen from made-up reports, the bytes that ranks count, and running jobs in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyte
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.dispatcher import Dispatcher
from hpccomm.debug import meter as meters
from hpccomm.debug.meter import Meter
from hpccomm.debug.view import View

from ..launch import ROOT, WATCHED, clean_environment, mpiexec_folder, time_limit, until
from .many_ranks import NODE, Report, receives, report, waits

COLUMNS, LINES = 110, 30


def later(made: Report, operations: int, nbytes: int) -> Report:
    """Return the report of the same rank two seconds later, after collectives of the world."""
    world = {**made["groups"]["world"], "collectives": made["groups"]["world"]["collectives"] + operations}
    return {**made, "time": made["time"] + 2, "groups": {**made["groups"], "world": world}, "bytes": nbytes}


def hanging(size: int) -> list[Report]:
    """Return reports of ranks in an all_reduce that rank 7 has not reached."""
    late = report(7, size, memory=3 << 30)
    return [late if rank == 7 else report(rank, size, waits("all_reduce", 41)) for rank in range(size)]


def row_of(ranks: str, lines: list[str]) -> list[str]:
    """Return the words of the only row of some ranks."""
    (row,) = (line.split() for line in lines if line.split()[:1] == [ranks])
    return row


@pytest.mark.once
def test_eight_ranks_have_a_row_each() -> None:
    lines = View(hanging(8)).lines(COLUMNS, LINES)
    assert lines[0].startswith("8 of 8 ranks on 1 node, ")
    assert "rank 7 never reached all_reduce #41 of 'world'" in lines[1]
    assert row_of("3", lines) == (
        ["3", "10", "min", "-", "-", "1", "GiB", "7", "train.py:91", "all_reduce", "#41", "of", "'world'"]
    )
    assert row_of("*7", lines) == ["*7", "-", "-", "3", "GiB", "data.py:7", "in", "load"]
    assert row_of("world", lines) == ["world", "8", "#41", "-", "-"]


@pytest.mark.once
def test_rates_are_those_between_two_views() -> None:
    ranks = [report(rank, 8, bytes=0) for rank in range(8)]
    before = View([later(each, 0, 1 << 20) for each in ranks])
    lines = View([later(later(each, 50, 0), 50, 21 << 20) for each in ranks], before).lines(COLUMNS, LINES)
    assert row_of("3", lines)[1:4] == ["50", "10", "MiB/s"]
    assert row_of("world", lines) == ["world", "8", "#140", "50", "0.0"]
    assert not any("never" in line for line in lines)


@pytest.mark.once
def test_ten_thousand_ranks_fit_on_one_screen() -> None:
    size = 10_000
    before = View([{**later(each, -2, 0), "time": each["time"] - 2} for each in hanging(size)])
    lines = View([{**each, "bytes": 2048} for each in hanging(size)], before).lines(COLUMNS, LINES)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith(f"10000 of 10000 ranks on {-(-size // NODE)} nodes, ")
    assert row_of("0-6,", lines)[:10] == ["0-6,", "8-9999", "10", "min", "1.0", "9.765", "MiB/s", "1", "GiB", "7"]
    assert row_of("*7", lines)[:7] == ["*7", "1.0", "1", "KiB/s", "3", "GiB", "data.py:7"]
    assert row_of("world", lines)[1] == "10000"


@pytest.mark.once
@pytest.mark.parametrize("size", [100, 1000])
def test_operations_with_other_numbers_share_a_row_if_there_are_too_many(size: int) -> None:
    view = View([report(rank, size, waits("all_reduce", rank + 1, seconds=0.0)) for rank in range(size)])
    (row,) = (row for row in view.rows(10) if len(row.ranks) == size)
    assert row.does == "train.py:91 all_reduce #1 of 'world'"
    assert not row.is_to_blame


@pytest.mark.once
@pytest.mark.parametrize("lines", [4, 10, 30])
def test_too_many_rows_end_with_the_number_of_other_ranks(lines: int) -> None:
    programs = [f"solve.py:{rank} in step" for rank in range(100)]
    view = View([report(rank, 100, program=program) for rank, program in enumerate(programs)])
    shown = view.lines(COLUMNS, lines)
    assert len(shown) <= lines
    rows = [line for line in shown if "solve.py" in line]
    if len(rows) > 1:
        assert f"and {100 - len(rows)} more ranks in {100 - len(rows)} other lines" in shown


@pytest.mark.once
def test_ranks_without_an_answer_are_shown() -> None:
    lines = View([report(0, 2, receives(3, 1), neighbours={"dead": [[1, 2, 1]]})]).lines(COLUMNS, LINES)
    assert lines[0].startswith("1 of 2 ranks")
    assert row_of("*1", lines) == ["*1", "-", "-", "-", "its", "process", "is", "gone"]
    assert row_of("0", lines)[7] == "1"


@pytest.mark.once
def test_text_of_reports_can_not_move_the_cursor() -> None:
    lines = View([report(0, 1, program="a\x1b[2Jb.py:1")]).lines(COLUMNS, LINES)
    assert any(r"a\x1b[2Jb.py:1" in line for line in lines)


# -- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.int16])
def test_the_meter_counts_the_bytes_of_all_arrays(process_group: hc.ProcessGroup, dtype: type[np.generic]) -> None:
    meter, size = Meter(), process_group.size
    assert meter.total() is None
    meter.start()
    try:
        before = meter.total() or 0
        x, all_of_them = np.ones(100, dtype), np.ones((size, 100), dtype)
        hc.all_reduce(x)
        hc.all_reduce(np.ones((100, 2), dtype)[:, 0])
        hc.all_reduce(x, async_op=True).wait()
        hc.all_gather_single(all_of_them, x)
        hc.all_gather_object([None] * size, "text")
        hc.barrier()
        assert meter.total() == before + x.itemsize * (4 * 100 + size * 100)
    finally:
        meter.look(time.monotonic() + 2 * meters.LEASE)
    assert (meter.total(), Dispatcher.meter) == (None, None)


def test_the_meter_leaves_the_fast_path_on(process_group: hc.ProcessGroup) -> None:
    before, meter = process_group.dispatcher.fast, Meter()
    meter.start()
    assert process_group.dispatcher.fast is before
    meter.look(time.monotonic() + 2 * meters.LEASE)


# -- jobs ------------------------------------------------------------------------------------------------------

BUSY = """
    import sys, time, pathlib, numpy as np, hpccomm as hc
    world = hc.init_process_group()
    x, stop = np.ones(1000), np.zeros(1)
    def step():
        stop[0] = pathlib.Path(sys.argv[1], "go").exists()
        hc.all_reduce(x)
        hc.all_reduce(stop, "max")
        x[:] = 1.0
    """
OF_MPI4PY = """
    import sys, time, pathlib, numpy as np
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    x, stop = np.ones(1000), np.zeros(1)
    def step():
        stop[0] = pathlib.Path(sys.argv[1], "go").exists()
        world.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
        world.Allreduce(MPI.IN_PLACE, stop, MPI.MAX)
    """
REST = """
    while not stop[0]:
        step()
        time.sleep(0.01)
    if world.rank == 1:
        while not pathlib.Path(sys.argv[1], "end").exists():
            time.sleep(0.05)
    step()
    """


@contextlib.contextmanager
def job(program: str, folder: Path, *by: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job of two ranks, in which rank 1 comes late after the file "go" exists; it ends after the block."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program) + textwrap.dedent(REST), encoding="utf-8")
    limit = {"TIME_LIMIT": str(time_limit(120)), "HPCCOMM_DEBUG_DIR": str(folder / "reports")}
    command = [ROOT / "tools" / "run-mpi", mpiexec_folder(), "2", sys.executable, *by, file, folder]
    with subprocess.Popen(command, cwd=folder, env={**clean_environment(), **limit}, stdin=subprocess.DEVNULL) as run:
        try:
            yield run
        finally:
            (folder / "go").touch()
            (folder / "end").touch()
        assert run.wait(time_limit(100)) == 0


def top(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpccomm", "top", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment(), timeout=200)


class Terminal:
    """A program in a terminal of its own, and the screen that a user sees."""

    def __init__(self, *command: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.raw = b""
        self._stream = pyte.ByteStream(self.screen)
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, env={**clean_environment(), "TERM": "xterm"}, **streams)
        self._theirs = theirs

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        """Return the screen as soon as it is as wanted."""
        deadline = time.monotonic() + time_limit(60)
        while not condition(shown := "\n".join(self.screen.display)):
            assert time.monotonic() < deadline, f"no {what} on the screen:\n{shown}"
            assert self.process.poll() is None, f"it has ended without {what}:\n{shown}"
            if select.select([self._own], [], [], 0.1)[0]:
                read = os.read(self._own, 1 << 16)
                self.raw += read
                self._stream.feed(read)
        return shown

    def press(self, key: str) -> None:
        os.write(self._own, key.encode())

    def end(self) -> int:
        """Wait for the program's end, and return its status."""
        self.until(lambda _: self.process.poll() is not None, "end")
        while select.select([self._own], [], [], 0)[0]:
            self.raw += os.read(self._own, 1 << 16)
        echoes = bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)
        os.close(self._own)
        os.close(self._theirs)
        assert echoes, "the terminal stays without echo"
        return self.process.returncode


def line_with(words: str, shown: str) -> str:
    return next((line for line in shown.splitlines() if words in line), "")


@pytest.mark.serial
@pytest.mark.parametrize(
    ("program", "by", "call"),
    [(BUSY, (), "all_reduce #"), (OF_MPI4PY, WATCHED, "Allreduce #")],
    ids=["hpccomm", "mpi4py"],
)
def test_top_shows_a_job_and_its_hang_in_a_terminal(
    program: str, by: tuple[str, ...], call: str, tmp_path: Path
) -> None:
    with job(program, tmp_path, *by) as run:
        once: list[Any] = []
        while not (once and once[-1]["ranks"][0]["bytes_per_second"]):
            shown = top("--pid", str(run.pid), "--once", "--json", "--interval", "0.5")
            once += map(json.loads, shown.stdout.splitlines())
            assert run.poll() is None, shown.stderr
        first = once[-1]["ranks"][0]
        assert [each["ranks"] for each in once[-1]["ranks"]] == [[0], [1]]
        mean = first["bytes_per_second"] / first["operations_per_second"]  # arrays of 8000 and of 8 bytes, in turn
        assert 0.5 * 4004 < mean < 1.5 * 4004
        assert first["memory"] > 1 << 20
        terminal = Terminal(sys.executable, "-m", "hpccomm", "top", "--pid", str(run.pid), "--interval", "0.3")
        terminal.until(lambda shown: "2 of 2 ranks on 1 node" in shown and "iB/s" in shown, "rate")
        (tmp_path / "go").touch()
        shown = terminal.until(lambda shown: "*1 " in shown, "culprit")
        assert "rank 1 never reached" in shown
        assert any("program.py:" in line and call in line and "never" not in line for line in shown.splitlines())
        assert line_with("*1 ", shown).split()[0] == "*1"
        assert shown.count("RANKS") == 2  # one screen: redrawn in place
        terminal.press("q")
        assert terminal.end() == 0
    assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")


@pytest.mark.serial
def test_top_ends_with_the_job_or_at_ctrl_c(tmp_path: Path) -> None:
    with job(BUSY, tmp_path) as run:
        until(lambda: top("--pid", str(run.pid), "--once", "--interval", "0.2").returncode == 0, "answer of a rank")
        command = [sys.executable, "-m", "hpccomm", "top", "--pid", str(run.pid), "--interval", "0.2"]
        terminals = [Terminal(*command), Terminal(*command)]
        for terminal in terminals:
            terminal.until(lambda shown: "2 of 2 ranks" in shown, "rank")
        terminals[0].process.send_signal(2)
        assert terminals[0].end() == 0
    assert terminals[1].end() == 0
    assert b"hpccomm top: " in terminals[1].raw


@pytest.mark.once
def test_top_needs_a_job(tmp_path: Path) -> None:
    for options, said in (
        ((), "hpccomm top: give the job: --pid PID, or --job JOB"),
        (("--pid", str(os.getpid()), "--once"), "has no ranks that answer"),
    ):
        if not MPI.COMM_WORLD.size > 1 or not options:
            shown = top(*options)
            assert (shown.returncode, shown.stdout) == (2, "")
            assert said in shown.stderr
