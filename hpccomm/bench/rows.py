"""Row: the result of one contender for one size."""

from __future__ import annotations

from dataclasses import dataclass

from .measure import Timing
from .registry import Benchmark, Case


@dataclass(frozen=True)
class Row:
    """One result; the fields are the columns of the CSV and the keys in the JSON, with their units."""

    benchmark: str
    contender: str
    size_bytes: int
    count: int
    dtype: str
    op: str  # "" where nothing is reduced
    ranks: int
    iterations: int
    batch: int
    median_us: float | None  # None: the contender can't do it, for the reason in `note`
    min_us: float | None = None
    p99_us: float | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    messages_per_s: float | None = None
    ratio: float | None = None  # the first contender's median, divided by this one's
    wrong: int | None = None  # elements that differ from NumPy's, on all ranks; None: not checked
    note: str = ""
    host_us: float | None = None  # until the calls have returned: of GPU arrays only


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
