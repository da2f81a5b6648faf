"""Recordings as files, on aligned clocks; and what `hpccomm trace` makes of them: verdict, summary, timeline, page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
import hpccomm.debug
from hpccomm.cli.main import main
from hpccomm.debug import report
from hpccomm.debug.records import Record
from hpccomm.debug.trace import clock
from hpccomm.debug.trace import files as trace_file
from hpccomm.debug.trace import recorder as recorders
from hpccomm.debug.trace.arrivals import arrivals, by_rank, straggler
from hpccomm.debug.trace.files import GroupInfo, Trace, read
from hpccomm.debug.trace.history import History, history
from hpccomm.debug.trace.summary import operations, summary
from hpccomm.debug.trace.timeline import chrome, html, lanes, page_data

from ..launch import launch

serial = pytest.mark.serial

STRAGGLER = """
    import sys, threading, numpy as np, hpccomm as hc
    with hc.init_process_group() as world:
        pair = hc.new_group([0, 1])
        hc.barrier()
        for step in range(15):
            if world.rank == 1:
                threading.Event().wait(0.03)  # late
            hc.all_reduce(np.ones(4))
            if world.rank < 2:
                hc.broadcast(np.ones(3, np.float32), src=0, group=pair)
        hc.all_reduce(np.ones(2), async_op=True).wait()
    """
MISMATCH = """
    import numpy as np, hpccomm as hc, hpccomm.debug
    world = hc.init_process_group()
    hc.all_reduce(np.ones(4))
    if world.rank == 1:
        hc.all_reduce(np.ones(4, "i8"), "bor")  # here
    else:
        hc.all_reduce(np.ones(4, "i8"), "band")
    hc.destroy_process_group()
    """


def run(tmp_path: Path, program: str, ranks: int, trace: str = "1") -> tuple[str, list[Trace]]:
    """Run a program with HPCCOMM_TRACE, and read what it has recorded."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    folder = tmp_path / "recordings"
    env = {"HPCCOMM_TRACE": trace, "HPCCOMM_DEBUG_DIR": str(folder)}
    ended = launch(ranks, sys.executable, file, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr, read(folder)


@serial
def test_a_program_with_a_straggler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, traces = run(tmp_path, STRAGGLER, 3, "stack")
    assert said.count("hpccomm trace") == 1
    assert [(trace.rank, trace.size, trace.is_final) for trace in traces] == [(0, 3, True), (1, 3, True), (2, 3, True)]
    assert [len(trace.records) for trace in traces] == [32, 32, 17]
    assert {group.name: group.ranks for group in traces[0].groups.values()} == {"world": (0, 1, 2), "group 1": (0, 1)}
    assert [group.collectives for group in traces[1].groups.values()] == [17, 15]
    assert all(record.where.endswith(".py:9") for record in traces[2].records[1:-1])
    assert all(trace.clock_error is not None and trace.clock_error < 0.1 for trace in traces)

    slow = straggler(by_rank(traces))
    assert slow is not None
    assert slow.rank == 1

    page, perfetto = tmp_path / "out.html", tmp_path / "out.json"
    folder = str(tmp_path / "recordings")
    assert main(["trace", folder, "--summary", "--html", str(page), "--timeline", str(perfetto)]) == 0
    printed = capsys.readouterr().out
    assert "81 operations of 3 of 3 ranks\nall ranks have made the same calls" in printed
    assert "rank 1 is the straggler" in printed
    assert main(["trace", folder, "--summary", "--json", "--html", str(page)]) == 0
    said, notes = capsys.readouterr()
    found = json.loads(said)
    assert "open it in a browser" in notes
    assert [found[key] for key in ("operations", "recordings", "size", "culprits", "lines")] == [81, 3, 3, [], []]
    assert sum(each["calls"] for each in found["times"]) == 81
    assert max(found["ranks"], key=lambda each: each["delay"])["rank"] == 1
    assert len([each for each in json.loads(perfetto.read_text())["traceEvents"] if each["ph"] == "X"]) == 81
    assert '"straggler":{"rank":1,' in page.read_text()
    assert main(["trace", folder, "--html", str(tmp_path / "nowhere" / "x.html")]) == 2
    assert "hpccomm trace: [Errno 2] No such file or directory: " in capsys.readouterr().err


@serial
def test_a_program_whose_ranks_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, MISMATCH, 3, "stack")
    assert main(["trace", str(tmp_path / "recordings")]) == 1
    printed = capsys.readouterr().out
    assert "collective #2 of group 'world' differs: ranks 0, 2 call all_reduce (4 int64, BAND)" in printed
    assert re.search(r"rank 1 calls all_reduce \(4 int64, BOR\) at .*program.py:6", printed)
    assert main(["trace", str(tmp_path / "recordings"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["culprits"] == [1]


OVERLAPPING = """
    from mpi4py import MPI
    import hpccomm as hc
    rank = MPI.COMM_WORLD.rank
    with hc.init_process_group(comm=MPI.COMM_WORLD.Split(rank == 3), timeout=20):
        hc.barrier()
    pair = MPI.COMM_WORLD.Split(0 if rank > 1 else MPI.UNDEFINED)
    if rank > 1:
        with hc.init_process_group(comm=pair, timeout=20):
            hc.barrier()
    """
ONE_LEAVES = """
    from mpi4py import MPI
    import hpccomm as hc
    rank = MPI.COMM_WORLD.rank
    with hc.init_process_group(timeout=15):
        hc.barrier()
    pair = MPI.COMM_WORLD.Split(0 if rank < 2 else MPI.UNDEFINED)
    if rank < 2:
        world = hc.init_process_group(comm=pair, timeout=15)
        hc.barrier()
        if rank == 0:
            world.destroy()
    """
CORRECT = {
    "a group has gone whose records are overwritten on one rank": """
        import numpy as np, hpccomm as hc
        with hc.init_process_group() as world:
            with hc.new_group() as group:
                for _ in range(9):
                    hc.barrier(group)
            del group
            with hc.split_group(color=world.rank) as own:
                for _ in range(0 if world.rank else 2500):
                    hc.barrier(own)
            hc.barrier()
        """,
    "the working directory has gone": """
        import os, tempfile, numpy as np, hpccomm as hc
        with hc.init_process_group():
            hc.barrier()
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
            hc.all_gather_object([None] * 3, 1)
        """,
}


@serial
def test_clocks_are_compared_by_all_ranks_of_a_communicator_or_by_none(tmp_path: Path) -> None:
    """For one rank it is larger than its last one, for the other not; or one leaves without destroying it."""
    run(tmp_path, OVERLAPPING, 4)
    run(tmp_path, ONE_LEAVES, 3)


@serial
@pytest.mark.parametrize("program", CORRECT)
def test_a_recording_finds_no_fault_with_a_correct_program(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = run(tmp_path, CORRECT[program], 3, "stack")
    assert "can't be written" not in said
    assert main(["trace", str(tmp_path / "recordings")]) == 0, capsys.readouterr().out


@serial
def test_the_size_of_the_ring_and_a_program_that_does_not_destroy(tmp_path: Path) -> None:
    program = "import hpccomm as hc\nhc.init_process_group()\nfor _ in range(9): hc.barrier()"
    (tmp_path / "program.py").write_text(program)
    env = {"HPCCOMM_TRACE": "1", "HPCCOMM_TRACE_SIZE": "4", "HPCCOMM_DEBUG_DIR": str(tmp_path)}
    assert launch(2, sys.executable, tmp_path / "program.py", env=env).returncode == 0
    assert [[each.number for each in trace.records] for trace in read(tmp_path)] == [[6, 7, 8, 9]] * 2
    ended = launch(1, sys.executable, tmp_path / "program.py", env={**env, "HPCCOMM_TRACE_SIZE": "many"})
    assert "HPCCOMM_TRACE_SIZE is 'many'; expected a number, 1 or more" in ended.stderr


HANG = """
    import numpy as np, hpccomm as hc
    world = hc.init_process_group(timeout=2)
    hc.all_reduce(np.ones(4))
    if world.rank != 1:
        hc.all_reduce(np.ones(4))
    else:
        hc.recv(np.ones(1), 0)
    """
EXCEPTION = """
    import numpy as np, hpccomm as hc
    world = hc.init_process_group()
    hc.all_reduce(np.ones(4))
    if world.rank == 1:
        raise RuntimeError("broken")
    hc.all_reduce(np.ones(4))
    """
LATE = """
    import numpy as np, hpccomm as hc
    from hpccomm.core import ending
    ending.SHORTEST_MEETING = 2
    with hc.init_process_group(timeout=2, on_timeout="warn") as world:
        if world.rank != 1:
            hc.all_reduce(np.ones(4))
        hc.all_reduce(np.ones(4))
    """


@serial
@pytest.mark.parametrize("program", [HANG, EXCEPTION, LATE], ids=["hang", "exception", "time limit of destroy"])
def test_a_job_that_is_ended_leaves_its_recordings(tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    env = {"HPCCOMM_TRACE": "stack", "HPCCOMM_DEBUG_DIR": str(tmp_path)}
    ended = launch(3, sys.executable, tmp_path / "program.py", env=env)
    assert ended.returncode != 0
    traces = read(tmp_path)
    assert 1 in [trace.rank for trace in traces]
    if program is HANG:
        assert [[each.state for each in trace.records] for trace in traces] == [["completed", "in flight"]] * 3
        found = history(traces)
        assert found.culprits == [1]
        assert "ranks 0, 2 are in all_reduce #2 of 'world'" in found.lines[0]
        assert "rank 1 is in recv #1 of 'world'" in found.lines[0]
    if program is LATE:
        found = history(traces)
        assert found.culprits == [1]
        assert "rank 1 never reached all_reduce #2 of 'world' (32 B float64); ranks 0, 2 wait there" in found.lines[0]


@serial
def test_what_there_is_nothing_to_say_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "HPCCOMM_TRACE=1" in capsys.readouterr().err
    (tmp_path / "rank0.trace.json").write_text('{"version": 99}')
    assert main(["trace", str(tmp_path)]) == 2
    assert "rank0.trace.json is no recording: it has version 99" in capsys.readouterr().err


@serial
def test_recordings_of_two_runs_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, run in enumerate(("run-a", "run-b")):
        with hpccomm.debug.record(), hc.ProcessGroup.from_comm(MPI.COMM_SELF) as group:
            hc.barrier(group)
            file = hpccomm.debug.dump_trace(tmp_path / run)
        os.utime(file, (number, number))
    assert main(["trace", str(tmp_path)]) == 0
    assert f"the last of 2 runs in {tmp_path}: {tmp_path / 'run-b'}" in capsys.readouterr().out
    (tmp_path / "run-b" / "rank1.trace.json").write_text(file.read_text().replace('"size":1', '"size":2'))
    assert main(["trace", str(tmp_path)]) == 2
    assert f"{tmp_path} has recordings of jobs of 1 and 2 ranks" in capsys.readouterr().err
    file.unlink()
    assert main(["trace", str(tmp_path / "run-b")]) == 2
    assert "there is no recording of rank 1" in capsys.readouterr().out


def test_a_recording_survives_its_file(process_group: hc.ProcessGroup, tmp_path: Path) -> None:
    with hpccomm.debug.record(stack=True):
        hc.all_reduce(np.ones(3, np.float32), "max")
        hc.broadcast(np.ones(3), src=0)
        receive = hc.irecv(np.ones(2), process_group.rank, tag=5)
        file = hpccomm.debug.dump_trace(tmp_path)
        receive.abort()
    assert file == tmp_path / f"rank{process_group.rank}.trace.json"
    (trace,) = read(tmp_path)
    assert (trace.rank, trace.size, trace.is_final) == (process_group.rank, process_group.size, False)
    assert [each.state for each in trace.records] == ["completed", "completed", "in flight"]
    recorded = hpccomm.debug.recorded()
    assert trace.records[:2] == recorded[:2]
    assert trace.groups[recorded[0].group].collectives == process_group.sequence_number


class Known:
    """A set of ranks as a recording knows it."""

    name, sequence_number, message_number = "many", 3, 4

    def __init__(self, ranks: Sequence[int]) -> None:
        self.key, self.ranks = f"key of {len(ranks)}", tuple(ranks)


@serial
@pytest.mark.parametrize(
    "ranks",
    [range(10_000), range(0, 80_000, 8), range(9999, -1, -1), [*range(5000), *range(7000, 12_000)], range(1), []],
    ids=["all", "a column", "backwards", "two parts", "one", "none"],
)
def test_a_recording_does_not_grow_with_the_ranks(ranks: Sequence[int], tmp_path: Path) -> None:
    known = Known(ranks)
    with hpccomm.debug.record():
        recorder = recorders.recorder()
        assert recorder is not None
        recorder.trace(known, known.key, known.ranks)
        file = hpccomm.debug.dump_trace(tmp_path)
    text = file.read_text()
    assert len(json.dumps(json.loads(text)["groups"][known.key])) < 200
    (tmp_path / "rank1.trace.json").write_text(text.replace('"rank":0', '"rank":1'))
    groups = [trace.groups[known.key] for trace in read(tmp_path)]
    assert [each.ranks for each in groups] == [tuple(ranks), tuple(ranks)]
    assert groups[0].ranks is groups[1].ranks
    assert (groups[0].collectives, groups[0].messages) == (3, 4)


@serial
def test_who_ends_the_process_saves_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with hpccomm.debug.record(), hc.ProcessGroup.from_comm(MPI.COMM_SELF) as group:
        hc.barrier(group)
    assert trace_file.save(tmp_path) == tmp_path / "rank0.trace.json"
    assert trace_file.save(tmp_path / "file") is None
    with hpccomm.debug.record():
        pass
    assert trace_file.save(tmp_path) is None


# -- clocks ----------------------------------------------------------------------------------------------------------


def test_clocks_are_compared(process_group: hc.ProcessGroup) -> None:
    ahead = 1000.0 * process_group.rank  # of all others
    found, error = clock.offset(process_group.comm, lambda: clock.now() + ahead)
    assert (
        abs(found + ahead) <= error + 1
    )  # one machine, one clock, but the ranks have looked at the time of day one by one
    assert (found == 0) == (process_group.rank == 0)


@serial
def test_drift_is_corrected() -> None:
    clocks = clock.Clocks()
    record = Record("barrier", 1, "", "", begin=50.0, end=200.0)
    assert clocks.corrected(record) == record
    clocks.points = [(0.0, 10.0), (100.0, 12.0)]
    assert (clocks.corrected(record).begin, clocks.corrected(record).end) == (61.0, 212.0)
    record.end = 0.0
    assert clocks.corrected(record).end == 0.0


# -- made-up recordings ----------------------------------------------------------------------------------------------


def made_up() -> list[Trace]:
    """Two ranks: an all_reduce to which rank 1 comes 2 ms late; two asynchronous ones that overlap; a hanging send."""
    traces = []
    for rank in range(2):
        trace = Trace(rank, 2, f"node{rank}", 7, {"k": GroupInfo("world", (0, 1), 3)}, clock_error=1e-6)
        what: dict[str, Any] = {"dtype": "float64", "count": 128, "nbytes": 1024, "op": "SUM"}
        begin = 10.0 + 0.002 * rank
        trace.records = [
            Record(
                "all_reduce", 1, "k", "world", **what, begin=begin, end=10.0025, state="completed", where="</a.py:1"
            ),
            Record("all_reduce", 2, "k", "world", **what, async_op=True, begin=10.003, end=10.005, state="completed"),
            Record("all_reduce", 3, "k", "world", **what, async_op=True, begin=10.004, end=10.006, state="completed"),
        ]
        traces.append(trace)
    traces[0].records.append(Record("send", 1, "k", "world", dtype="int8", count=5, nbytes=5, peer=1, begin=10.007))
    return traces


@serial
def test_arrivals() -> None:
    first, *others = arrivals(made_up())
    assert (first.last, first.delay) == (1, pytest.approx(0.002))
    assert (first.wait(0), first.wait(1)) == (pytest.approx(0.002), 0.0)
    assert [each.wait(0) for each in others] == [0.0, 0.0]  # asynchronous
    zero, one = by_rank(made_up())
    assert (zero.collectives, zero.waited, zero.delay) == (3, pytest.approx(0.002), 0.0)
    assert one.delay == one.longest == pytest.approx(0.002)
    assert straggler([zero, one]) is None  # late only once
    one.delay = 1.0
    assert straggler([zero, one]) == one
    zero.delay = zero.longest = 5.0
    assert straggler([zero, one]) == one
    zero.delay = 6.0
    assert straggler([zero, one]) is None
    assert straggler([one]) is None


@serial
def test_the_summary() -> None:
    head, _, blocking, overlapped = operations(made_up()).splitlines()
    assert head.split() == ["operation", "size", "calls", "bytes", "p50", "p99", "algbw"]
    assert blocking.split() == ["all_reduce", "1", "KiB", "2", "2", "KiB", "2500.0", "2500.0", "0.00041"]
    assert overlapped.split()[:5] == ["all_reduce", "(async)", "1", "KiB", "4"]
    assert "clocks agree within 1.0 us" in summary(made_up())
    of_single = {"all_gather_single": 200, "all_to_all_single": 150, "all_reduce": 300}
    for name, expected in (of_single | {"reduce_scatter": 200, "all_to_all": 150, "redistribute": 150}).items():
        trace = Trace(0, 2, groups={"k": GroupInfo("world", (0, 1))})
        trace.records = [Record(name, 1, "k", "world", nbytes=300, begin=1.0, end=2.0, state="completed")]
        assert f"{expected} B" in operations([trace])


@serial
def test_operations_that_overlap_are_in_lanes_of_their_own() -> None:
    assert [[each.number for each in lane] for lane in lanes(made_up()[1].records)] == [[1, 2], [3]]


@serial
def test_in_a_long_recording_small_delays_are_not_marked() -> None:
    traces = made_up()
    traces[0].records[-1] = Record("barrier", 4, "k", "world", begin=15.0, end=15.1, state="completed")
    assert page_data(traces, history(traces))["late"] == "5100"  # of 5.1 s
    assert not [each for each in chrome(traces)["traceEvents"] if each["ph"] in "sf"]


@serial
def test_the_file_for_perfetto() -> None:
    events = chrome(made_up())["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    assert Counter(each["ph"] for each in events) == {"M": 8, "X": 7, "s": 1, "f": 1}
    slices = [each for each in events if each["ph"] == "X"]
    assert {each["args"]["group"] for each in slices} == {"world"}
    assert min(each["ts"] for each in slices) == 0
    for pid, tid in {(each["pid"], each["tid"]) for each in slices}:  # slices of one thread nest or follow one another
        mine = sorted((each["ts"], each["dur"]) for each in slices if (each["pid"], each["tid"]) == (pid, tid))
        assert all(ts + dur <= after for (ts, dur), (after, _) in pairwise(mine))
    (start,), (finish,) = ([each for each in events if each["ph"] == phase] for phase in "sf")
    assert (start["pid"], finish["pid"], start["id"]) == (1, 0, finish["id"])
    names = {each["args"]["name"] for each in events if each["name"] in ("process_name", "thread_name")}
    assert names == {"rank 0 (node0)", "rank 1 (node1)", "world", "world (2)"}


@serial
def test_the_data_of_the_page() -> None:
    traces = made_up()
    found = History([0], ["said </script>"], {("k", 2)})
    data = page_data(traces, found)
    place = {name: number for number, name in enumerate(data["fields"])}
    rows = [row for rank in data["ranks"] for lane in rank["lanes"] for row in lane]
    assert len(rows) == 7
    assert all(len(row) == len(place) for row in rows)
    flags = sorted(row[place["flags"]] for row in rows)
    assert flags == [0, 1, 1, 4, 1 + 8, 1 + 8, 16]  # plain, asynchronous, in flight, marked, late
    assert data["late"] == "100"
    late = next(row for row in rows if row[place["flags"]] == 16)
    assert (late[place["begin"]], late[place["waited"]]) == (2000.0, 2000.0)
    assert data["straggler"] is None  # late only once
    assert data["groups"] == [{"name": "world", "ranks": [0, 1]}]
    assert [data["texts"][each] for each in data["messages"]] == ["send"]
    text = html(traces, found)
    embedded = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert embedded
    assert json.loads(embedded[1]) == json.loads(json.dumps(data))  # whatever is in the texts
    assert not re.search(r"(src|href)=|https?://", text)  # it needs nothing else


@serial
def test_there_may_be_nothing_in_a_recording() -> None:
    empty = [Trace(0, 1)]
    assert page_data(empty, history(empty))["length"] == 0.0
    assert [each["ph"] for each in chrome(empty)["traceEvents"]] == ["M", "M"]
    assert "operation" in summary(empty)


@serial
def test_nothing_in_a_recording_is_markup(tmp_path: Path) -> None:
    traces = made_up()
    for trace in traces:
        trace.host = "<!--<script></script><img src=x>"
        trace.groups = {key: replace(group, name=trace.host) for key, group in trace.groups.items()}
    page, plain = (html(each, History()) for each in (traces, made_up()))
    assert [page.count(mark) for mark in ("<!--", "<script", "<img")] == [
        plain.count(mark) for mark in ("<!--", "<script", "<img")
    ]
    assert "default-src 'none'" in page


@serial
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_of_the_page_can_be_parsed(tmp_path: Path) -> None:
    script = html(made_up(), History()).rpartition("<script>")[2].partition("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True, timeout=60)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@serial
@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright")
    traces = made_up()
    (tmp_path / "out.html").write_text(html(traces, History([0], ["rank 0 is wrong"], {("k", 2)})))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[Any] = []
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(f"file://{tmp_path}/out.html")
        assert page.inner_text(".bad") == "rank 0 is wrong"
        assert "Rank 1 is the straggler" in page.inner_text(".slow")
        assert "all_reduce (6)" in page.inner_text("#legend")
        page.click("#late")
        assert "the last to come, 2.000 ms after the others" in page.inner_text("#chosen")
        page.click("#mark")
        assert "all_reduce #2 of 'world'" in page.inner_text("#chosen")
        page.click("#fit")
        box = page.locator("#lanes").bounding_box()
        page.mouse.move(box["x"] + page.evaluate("x(100)"), box["y"] + 12)
        assert "all_reduce #1 of 'world'" in page.inner_text("#tip")
        assert "</a.py:1" in page.inner_text("#tip")
        for key in ("+", "-", "ArrowLeft", "ArrowRight", "l", "m", "0"):
            page.keyboard.press(key)
        page.mouse.wheel(0, -300)
        assert errors == []
        browser.close()


@serial
def test_the_watchdogs_reports_are_no_recordings(tmp_path: Path) -> None:
    trace_file.write_trace(tmp_path)
    report.Reporter(0, 1, tmp_path).write("test")
    assert {file.name for file in tmp_path.iterdir()} == {"rank0.json", "rank0.trace.json"}
    assert len(read(tmp_path)) == 1
    assert len(report.read(tmp_path)) == 1
