"""The recordings as a timeline: for Perfetto (Chrome's trace format), and as a page for any browser."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...core.operation_list import TASK
from ..records import Record
from ..words import size_in_words
from .arrivals import arrivals, by_rank, straggler
from .files import GroupInfo, Trace, groups_in
from .history import History

LATE = 100e-6, 1e-3  # the delay that marks a rank: the larger of seconds and a share of the time shown
PAGE = Path(__file__).with_name("timeline.html")
PLACE = "__DATA__"  # in the page

# The fields of an operation on the page, in this order; names, dtypes, ops and lines are indices into a list of texts.
FIELDS = ("name", "group", "number", "begin", "duration", "dtype", "nbytes", "op", "peer", "flags", "where", "waited")
ASYNC, FAILED, IN_FLIGHT, MARKED, LATE_FLAG = 1, 2, 4, 8, 16


# -- for Perfetto --------------------------------------------------------------------------------------------


def chrome(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the recordings in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

    A process is a rank and a thread a group; overlapping operations of a group are on separate threads. Arrows go from
    a late rank to the ranks that waited for it. Times are microseconds since the first operation.
    """
    start, end = _span(traces)
    events: list[dict[str, Any]] = []
    threads: dict[tuple[str, int], int] = {}
    for trace in traces:
        events.append(_named("process_name", trace.rank, f"rank {trace.rank} ({trace.host})"))
        events.append({"name": "process_sort_index", "ph": "M", "pid": trace.rank, "args": {"sort_index": trace.rank}})
        for group in _groups([trace]):
            for lane, records in enumerate(lanes(each for each in trace.records if each.group == group)):
                thread = threads.setdefault((group, lane), 1 + len(threads))
                title = records[0].group_name + (f" ({lane + 1})" if lane else "")
                events.append(_named("thread_name", trace.rank, title, thread))
                events += [_slice(record, trace.rank, thread, start, end) for record in records]
    slices = {(each["pid"], each["args"]["key"], each["name"]): each for each in events if each["ph"] == "X"}
    for number, arrival in enumerate(each for each in arrivals(traces) if each.delay >= _late(start, end)):
        last = arrival.records[arrival.last]
        of_rank = {rank: slices[rank, last.group, _title(record)] for rank, record in arrival.records.items()}
        source = of_rank.pop(arrival.last)
        for rank, target in of_rank.items():
            if target["ts"] + target["dur"] >= source["ts"]:  # a root may have finished before
                arrow = {"name": "late", "cat": "late", "id": f"{number}.{rank}", "ts": source["ts"]}
                events.append({**arrow, "ph": "s", "pid": source["pid"], "tid": source["tid"]})
                events.append({**arrow, "ph": "f", "bp": "e", "pid": rank, "tid": target["tid"]})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, rank: int, name: str, thread: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(record: Record, rank: int, thread: int, start: float, end: float) -> dict[str, Any]:
    facts = {
        "group": record.group_name,
        "key": record.group,
        "number": record.number,
        "size": f"{size_in_words(record.nbytes)} {record.dtype}".strip(),
        "op": record.op,
        "peer": record.peer,
        "async": record.async_op,
        "state": record.state,
        "where": record.where,
    }
    # Round both to ns first: slices of one thread may touch, but must not overlap.
    began, ended = (round(1e6 * (each - start), 3) for each in (record.begin, record.end or end))
    return {
        "name": _title(record),
        "cat": "message" if record.is_a_message else "collective",
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": began,
        "dur": round(ended - began, 3),
        "args": facts,
    }


def _title(record: Record) -> str:
    return record.details if record.name == TASK.name else f"{record.name} #{record.number}"


# -- the page ------------------------------------------------------------------------------------------------


def html(traces: Sequence[Trace], found: History) -> str:
    """Return a self-contained page that shows the recordings, with a lane for each rank."""
    text = json.dumps(page_data(traces, found), separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace(PLACE, text)


def page_data(traces: Sequence[Trace], found: History) -> dict[str, Any]:
    """Return the page's data; times are microseconds since the first operation."""
    start, end = _span(traces)
    texts: dict[str, int] = {}
    groups = {key: number for number, key in enumerate(_groups(traces))}
    late: dict[tuple[int, str, int], float] = {}
    waited: dict[tuple[int, str, int], float] = {}
    for arrival in arrivals(traces):
        last = arrival.records[arrival.last]
        for rank, record in arrival.records.items():
            waited[rank, record.group, record.number] = last.begin - record.begin
        if arrival.delay >= _late(start, end):
            late[arrival.last, last.group, last.number] = arrival.delay

    def number_of(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def row(rank: int, record: Record) -> list[Any]:
        key = rank, record.group, 0 if record.is_a_message else record.number  # collectives are numbered from 1
        flags = ASYNC * record.async_op + FAILED * (record.state == "failed") + IN_FLIGHT * (not record.end)
        flags += MARKED * (key[1:] in found.marks) + LATE_FLAG * (key in late)
        return [
            number_of(record.name),
            groups[record.group],
            record.number,
            round(1e6 * (record.begin - start), 1),
            round(1e6 * ((record.end or end) - record.begin), 1),
            number_of(record.dtype),
            record.nbytes,
            number_of(record.op),
            -1 if record.peer is None else record.peer,
            flags,
            number_of(record.where),
            round(1e6 * late.get(key, waited.get(key, 0.0)), 1),
        ]

    ranks = []
    for trace in traces:
        rows = [[row(trace.rank, each) for each in lane] for lane in lanes(trace.records)]
        ranks.append({"rank": trace.rank, "host": trace.host, "lanes": rows})
    infos = groups_in(traces)
    shown = [infos.get(key, GroupInfo(key, ())) for key in groups]
    slow = straggler(by_rank(traces))
    return {
        "fields": FIELDS,
        "ranks": ranks,
        "groups": [{"name": each.name, "ranks": list(each.ranks)} for each in shown],
        "texts": list(texts),
        "messages": sorted({number_of(each.name) for trace in traces for each in trace.records if each.is_a_message}),
        "length": round(1e6 * (end - start), 1),
        "late": f"{1e6 * _late(start, end):.0f}",
        "lines": found.lines,
        "culprits": found.culprits,
        "straggler": None if slow is None else {"rank": slow.rank, "ms": round(1e3 * slow.steady, 3)},
    }


def _late(start: float, end: float) -> float:
    seconds, part = LATE
    return max(seconds, part * (end - start))


# -- both ------------------------------------------------------------------------------------------------------


def lanes(records: Iterable[Record]) -> list[list[Record]]:
    """Distribute operations over as few lanes as possible, without overlaps in a lane."""
    found: list[list[Record]] = []
    for record in sorted(records, key=lambda each: each.begin):
        free = (lane for lane in found if lane[-1].end and lane[-1].end <= record.begin)
        lane = next(free, None)
        if lane is None:
            found.append(lane := [])
        lane.append(record)
    return found


def _groups(traces: Iterable[Trace]) -> list[str]:
    """Return the keys of groups with records, in the order of their first operations."""
    first: dict[str, float] = defaultdict(lambda: float("inf"))
    for trace in traces:
        for record in trace.records:
            first[record.group] = min(first[record.group], record.begin)
    return sorted(first, key=first.__getitem__)


def _span(traces: Iterable[Trace]) -> tuple[float, float]:
    """Return the begin of the first operation and the end of the last; a little later if one is in flight."""
    records = [record for trace in traces for record in trace.records]
    start = min((record.begin for record in records), default=0.0)
    end = max((max(record.begin, record.end) for record in records), default=0.0)
    hangs = any(not record.end for record in records)
    return start, end + hangs * max(0.1 * (end - start), 1e-4)
