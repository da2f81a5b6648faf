"""What reports and verdicts cost as ranks become many, counted; `python -m tests.debug.many_ranks` measures seconds."""

from __future__ import annotations

import gc
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.debug import groups_seen
from hpccomm.debug import report as reports
from hpccomm.debug.culprits import Verdict, verdict
from hpccomm.debug.report import Reporter
from hpccomm.debug.words import as_ranges, from_ranges

from . import many_ranks

pytestmark = [pytest.mark.serial, pytest.mark.once]

Situation = Callable[[int], tuple[Iterator[Any], list[int]]]
FEW, MANY, MOST = 100, 1000, 10_000
FACTS = {"name": "irregular", "sequence_number": 0, "message_number": 0}
CELLS = 64, 576  # ranks, in squares, of which each line is counted
by_name = pytest.mark.parametrize("situation", many_ranks.SITUATIONS, ids=lambda each: str(each.__name__))


def lines_run(call: Callable[[], Verdict]) -> tuple[Verdict, int]:
    """Return the result, and the lines of Python that have run; each turn of a loop runs at least one."""
    count = 0

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = call()
    finally:
        sys.settrace(before)
    return found, count


@by_name
def test_a_verdict_costs_no_more_than_sorting_the_ranks(situation: Situation) -> None:
    counts = {}
    few, many = CELLS
    for size in CELLS:
        made, culprits = situation(size)
        listed = list(made)
        found, counts[size] = lines_run(lambda listed=listed, size=size: verdict(listed, size))
        assert found.culprits == culprits
        assert len(found.lines) < 30
    assert counts[few] > few  # they are counted
    assert counts[many] / counts[few] < many * math.log(many) / (few * math.log(few))


@pytest.mark.parametrize("situation", many_ranks.NAMED, ids=lambda each: str(each.__name__))
def test_ten_thousand_ranks_get_their_verdict(situation: Situation) -> None:
    made, culprits = situation(MOST)
    assert verdict(made, MOST).culprits == culprits


@by_name
def test_a_report_does_not_grow_with_the_ranks(situation: Situation) -> None:
    few, most = (len(json.dumps(next(situation(size)[0]))) for size in (FEW, MOST))
    assert most < few + 300  # longer numbers
    assert MOST * most < 40e6


@pytest.mark.parametrize(
    "ranks",
    [range(MOST), range(0, MOST, 8), range(0, MOST, 7), [0, *range(MOST - 1, 0, -1)]],
    ids=["all", "a column", "another one", "backwards"],
)
def test_the_groups_that_a_rank_has_made_are_short_in_its_report(ranks: Sequence[int]) -> None:
    with hc.ProcessGroup.from_comm(MPI.COMM_SELF) as group:
        called = []
        for made in (ranks, [*ranks[:500], ranks[501], ranks[500], *ranks[502:]], range(16)):
            group.agree_on("new_group", f"ranks {', '.join(map(str, made))}", "backend of no interest")
            called.append(reports._group(group)["recent"][-1][1])
    assert len(called[0]) < 200
    assert called[0].startswith("new_group (ranks 0, ")
    assert f" {ranks[-1]}" in called[0]
    assert called[2] == f"new_group (ranks {', '.join(map(str, range(16)))})"
    assert called[0] != called[1]


def test_what_a_rank_knows_of_a_group_goes_with_it(process_group: hc.ProcessGroup) -> None:
    group: Any = hc.new_group()
    known = weakref.ref(groups_seen._seen[weakref.ref(group)])
    group.destroy()
    del group
    gc.collect()
    assert known() is None


def test_made_up_reports_are_like_real_ones(tmp_path: Path) -> None:
    real = Reporter(0, 2, tmp_path).state("a test")
    made = many_ranks.report(0, 2, many_ranks.waits("barrier", 1))
    assert made.keys() == real.keys() | {"answers"}


def test_some_ranks_tell_the_others_of_an_irregular_group(
    process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [rank ^ rank // 2 for rank in range(1024)]  # a Gray code has no three in a row
    told: list[Any] = []
    monkeypatch.setattr(reports, "ranks_of", lambda group: group.ranks)
    monkeypatch.setattr(reports, "made_at", lambda _: "")
    for rank in ranks:
        group: Any = SimpleNamespace(
            **{**FACTS, "ranks": ranks, "rank": rank, "size": 1024, "dispatcher": process_group.dispatcher}
        )
        told += [said["ranks"]] if "ranks" in (said := reports._group(group)) else []
    assert 64 <= len(told) <= 128
    assert from_ranges(told[0], most=1024) == ranks


@pytest.mark.parametrize("size", [FEW, MANY, MOST])
def test_each_report_is_read_once(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter(0, size, tmp_path / "run-1")
    token = reporter.ask()
    folder, made = reporter.folder.places[0], many_ranks.one_late_rank(size)[0]
    parts = [[{**next(made), "answers": token} for _ in range(size // 4)] for _ in range(4)]
    read: list[Path] = []

    def counted(file: Path) -> Any:
        read.append(file)
        return whole(file)

    whole = reports._report
    monkeypatch.setattr(reports, "_report", counted)
    # One part comes between two looks; what is there was left at an earlier question.
    many_ranks.write(folder, ({**each, "answers": "0 earlier"} for each in parts[-1]))
    monkeypatch.setattr(reporter, "wake", lambda besides: many_ranks.write(folder, iter(parts.pop(0))))
    assert len(reporter.collect(token, patience=1e6)) == size
    assert len(read) == size + size // 4
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4000 * size


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("size", [FEW, MANY])
def test_no_garbage_is_collected_while_reports_are_read(size: int, is_on: bool, tmp_path: Path) -> None:
    many_ranks.write(tmp_path, many_ranks.one_late_rank(size)[0])
    collections: list[str] = []

    def count(phase: str, _: object) -> None:
        collections.append(phase)

    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(count)
    try:
        found = reports.Look().into(tmp_path)
        culprits = verdict(found, size).culprits
        is_still_on = gc.isenabled()
    finally:
        gc.callbacks.remove(count)
        (gc.enable if was_on else gc.disable)()
    assert culprits == [7]
    assert len(collections) <= 2 * 3 * is_on  # before, between and behind: each has a beginning and an end
    assert is_still_on == is_on


@pytest.mark.parametrize(
    ("ranks", "ranges"),
    [
        (range(MOST), [[0, MOST, 1]]),
        (range(0, MOST, 8), [[0, MOST, 8]]),
        (range(9, -1, -1), [[9, -1, -1]]),
        ([0, 1, 2, 7, 9, 11, 4], [[0, 3, 1], [7, 13, 2], [4, 5, 1]]),
        ([5, 5, 5], [[5, 6, 1], [5, 6, 1], [5, 6, 1]]),
        ([], []),
    ],
)
def test_ranks_as_ranges(ranks: Any, ranges: list[list[int]]) -> None:
    assert as_ranges(ranks) == ranges
    assert from_ranges(ranges, most=len(ranks)) == list(ranks)
    if ranks:
        with pytest.raises(ValueError, match="a report names more than"):
            from_ranges(ranges, most=len(ranks) - 1)
