"""The rows of results, and their table, CSV and JSON.

A table is printed line by line, so column widths are fixed before the first line.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from .measure import Timing
from .registry import Benchmark, Case

Column: TypeAlias = tuple[str, str, int]  # name, unit, width
SCHEMA = 1  # the version of the JSON; raise it when a key changes its meaning


@dataclass(frozen=True)
class Row:
    """One result; the fields are the columns of the CSV and the keys of the JSON, with their units."""

    benchmark: str
    contender: str
    size_bytes: int
    count: int
    dtype: str
    op: str  # "" if the benchmark does not reduce
    ranks: int
    iterations: int
    batch: int
    median_us: float | None  # None: the contender can't do it; `note` has the reason
    min_us: float | None = None
    p99_us: float | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    messages_per_s: float | None = None
    ratio: float | None = None  # the first contender's median divided by this contender's
    wrong: int | None = None  # elements that differ from NumPy's, on all ranks; None: not checked
    note: str = ""
    host_us: float | None = None  # time until the calls return; only for GPU arrays


def row(
    benchmark: Benchmark,
    case: Case,
    contender: str,
    timing: Timing | None,
    reference: Timing | None = None,
    wrong: int | None = None,
    note: str = "",
) -> Row:
    """Return the row of `contender`, with its ratio to `reference`, the timing of the first contender."""
    op = case.op if benchmark.reduces else ""
    point = (benchmark.name, contender, case.nbytes, case.count, str(case.dtype), op, case.ranks)
    if timing is None:
        return Row(*point, 0, 0, None, wrong=wrong, note=note)
    seconds, host = timing.median, timing.host_median
    algbw = case.nbytes / seconds / 1e9 if benchmark.sized else None
    return Row(
        *point,
        len(timing.samples),
        timing.batch,
        median_us=seconds * 1e6,
        min_us=timing.minimum * 1e6,
        p99_us=timing.p99 * 1e6,
        algbw_gbs=algbw,
        busbw_gbs=None if algbw is None else algbw * benchmark.busbw(case.ranks),
        messages_per_s=(case.ranks // 2) / seconds if benchmark.rate else None,
        ratio=None if reference is None else reference.median / seconds,
        wrong=wrong,
        note=note,
        host_us=None if host is None else host * 1e6,
    )


class Table:
    """The table of one benchmark: a head, one line for each size, and a summary.

    The columns of the first contender (hpccomm) come first. Every other contender has a column for its median and one
    for the ratio. With `gpu`, every contender also has a column for the host's time.
    """

    def __init__(self, benchmark: Benchmark, contenders: Sequence[str], check: bool = False, gpu: bool = False) -> None:
        self._benchmark = benchmark
        self._first, *self._others = contenders
        self._check = check
        self._rows: list[Row] = []
        # Each column, its field of a row, and its formatting function.
        fields: list[tuple[Column, str, Callable[[Any], str]]] = []
        if benchmark.sized:
            fields += [(("size", "bytes", 11), "size_bytes", str), (("count", "elements", 11), "count", str)]
        for name, field in (("time", "median_us"), ("min", "min_us"), ("p99", "p99_us")):
            fields.append(((name, "us", 9), field, microseconds))
        host: tuple[Column, str, Callable[[Any], str]] = (("host", "us", 8), "host_us", microseconds)
        fields += [host] * gpu
        if benchmark.sized:
            fields += [((name, "GB/s", 7), f"{name}_gbs", bandwidth) for name in ("algbw", "busbw")]
        if benchmark.rate:
            fields.append((("rate", "Mmsg/s", 7), "messages_per_s", millions))
        self._fields = [(self._first, *each) for each in fields]
        for name in self._others:
            self._fields.append((name, (name, "us", max(10, len(name) + 1)), "median_us", microseconds))
            self._fields += [(name, *host)] * gpu
            self._fields.append((name, ("ratio", "", 6), "ratio", ratio))
        self._columns = [column for _, column, _, _ in self._fields] + [("check", "", 6)] * check

    def head(self) -> str:
        """Return the title and two lines of column headings."""
        return f"{self._benchmark.name}: {self._benchmark.summary}\n{heads(self._columns)}"

    def line(self, rows: Sequence[Row]) -> str:
        """Return the line of one size."""
        self._rows += rows
        by_name = {each.contender: each for each in rows}
        cells = [show(getattr(by_name[contender], field)) for contender, _, field, show in self._fields]
        return aligned(self._columns, [*cells, verdict(rows)] if self._check else cells)

    def summary(self) -> str:
        """Return the lines below the table: mean ratios, reasons for empty columns, wrong results."""
        lines = []
        widths = [each.busbw_gbs for each in self._rows if each.contender == self._first and each.busbw_gbs]
        if len(widths) > 1:
            lines.append(f"# Avg bus bandwidth: {sum(widths) / len(widths):.3f} GB/s")
        for name in self._others:
            rows = [each for each in self._rows if each.contender == name]
            ratios = [each.ratio for each in rows if each.ratio is not None]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                sizes = "" if len(ratios) == 1 else f", geometric mean of {len(ratios)} sizes"
                lines.append(f"# {self._first} takes {ratio(mean)} times the time of {name}{sizes}")
        notes = dict.fromkeys((each.contender, each.note) for each in self._rows if each.note)
        lines += [f"# {name}: not measured: {note}" for name, note in notes]
        lines += [
            f"# WRONG: {each.contender}, {each.size_bytes} bytes: {each.wrong} elements differ from NumPy's"
            for each in self._rows
            if each.wrong
        ]
        return "\n".join(lines)


def heads(columns: Sequence[Column]) -> str:
    """Return two lines: the names and the units of the columns."""
    units = [f"({unit})" if unit else "" for _, unit, _ in columns]
    return "\n".join(aligned(columns, line).rstrip() for line in ([name for name, _, _ in columns], units))


def aligned(columns: Sequence[Column], cells: Sequence[str]) -> str:
    """Return one line of a table."""
    return " ".join(cell.rjust(width) for cell, (_, _, width) in zip(cells, columns, strict=True))


def microseconds(time: float | None) -> str:
    """Return a time as text with its significant digits."""
    if time is None:
        return "-"
    return f"{time:.2f}" if time < 1000 else f"{time:.1f}" if time < 100_000 else f"{time:.0f}"


def bandwidth(rate: float | None) -> str:
    """Return a bandwidth in GB/s as text."""
    return "-" if rate is None else f"{rate:.2f}" if rate >= 1 or rate == 0 else f"{rate:.3f}"


def millions(rate: float | None) -> str:
    """Return a rate as text in millions per second."""
    return "-" if rate is None else f"{rate / 1e6:.3f}"


def ratio(value: float | None) -> str:
    """Return a ratio as text with at least two digits."""
    return "-" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def verdict(rows: Sequence[Row]) -> str:
    """Return the check's result for one size, over all contenders."""
    if any(each.wrong for each in rows):
        return "WRONG"
    return "ok" if any(each.wrong is not None for each in rows) else "-"


def csv_line(row: Row | None) -> str:
    """Return one row as CSV (None: the names of the columns); a missing value is an empty cell."""
    text = io.StringIO()
    cells = [getattr(row, each.name) if row else each.name for each in fields(Row)]
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def as_json(machine: dict[str, Any], options: dict[str, Any], rows: Sequence[Row], **more: Any) -> str:
    """Return the whole result as a JSON document."""
    document = {
        "schema": SCHEMA,
        "tool": "hpccomm bench",
        "machine": machine,
        "options": options,
        "rows": [asdict(each) for each in rows],
        **more,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
