"""The recordings as two tables: times of operations by kind and size, and the ranks that others wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...core.operation_list import START
from ..records import Record
from ..words import size_in_words
from .arrivals import by_rank, straggler
from .files import Trace, groups_in


def summary(traces: Sequence[Trace]) -> str:
    """Return both tables as text."""
    return f"{operations(traces)}\n\n{ranks(traces)}"


def operations(traces: Sequence[Trace]) -> str:
    """Return a line for each kind of operation and size; the bandwidth is the median's."""
    lines = [
        f"{'operation':<30} {'size':>9} {'calls':>7} {'bytes':>9} {'p50':>9} {'p99':>9} {'algbw':>9}",
        f"{'':<30} {'':>9} {'':>7} {'in all':>9} {'(us)':>9} {'(us)':>9} {'(GB/s)':>9}",
    ]
    for each in times(traces):
        bandwidth = f"{each.bytes / each.p50 / 1e9:.3g}" if each.bytes and each.p50 else ""
        lines.append(
            f"{each.operation:<30} {size_in_words(each.bytes):>9} {each.calls:>7} "
            f"{size_in_words(each.bytes * each.calls):>9} {1e6 * each.p50:>9.1f} {1e6 * each.p99:>9.1f} {bandwidth:>9}"
        )
    return "\n".join(lines)


class Times(NamedTuple):
    """The operations of one kind and size."""

    operation: str
    bytes: int  # of one operation
    calls: int
    p50: float  # seconds from beginning to end on one rank, including the wait for others
    p99: float


def times(traces: Sequence[Trace]) -> Iterator[Times]:
    """Yield the times of each kind of operation and size."""
    groups = groups_in(traces)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for trace in traces:
        for record in trace.records:
            if record.state == "completed":
                kind = record.name + (" (async)" if record.async_op else "")
                size = len(groups[record.group].ranks) if record.group in groups else 1
                found[kind, message_bytes(record, size)].append(record.end - record.begin)
    for (kind, nbytes), seconds in sorted(found.items()):
        seconds.sort()
        yield Times(kind, nbytes, len(seconds), _percentile(seconds, 50), _percentile(seconds, 99))


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds with three significant digits, without an exponent.

    >>> milliseconds(1.2899), milliseconds(0.0123)
    ('1290', '12.3')
    """
    return f"{float(f'{1e3 * seconds:.3g}'):.10g}"


def ranks(traces: Sequence[Trace]) -> str:
    """Return a line for each rank, and a line that names the straggler."""
    found = by_rank(traces)
    lines = [
        f"{'rank':>5} {'collectives':>12} {'came last':>10} {'delayed the others':>20} {'waited':>12}",
        f"{'':>5} {'':>12} {'':>10} {'(ms)':>20} {'(ms)':>12}",
    ]
    lines += [
        f"{each.rank:>5} {each.collectives:>12} {each.last:>10} {1e3 * each.delay:>20.3f} {1e3 * each.waited:>12.3f}"
        for each in found
    ]
    slow = straggler(found)
    if slow is not None:
        share = 100 * slow.last / slow.collectives
        lines.append(
            f"rank {slow.rank} is the straggler: without it the collectives would have begun "
            f"{milliseconds(slow.steady)} ms earlier in all; it was the last to come to {share:.0f} % of them"
        )
    errors = [trace.clock_error for trace in traces if trace.clock_error is not None]
    if len(errors) < len(traces):
        lines.append(
            "the clocks of the ranks were not compared (HPCCOMM_TRACE does it): across nodes, times may be off"
        )
    elif errors and max(errors) > 0:
        lines.append(f"clocks agree within {1e6 * max(errors):.1f} us")
    return "\n".join(lines)


def message_bytes(record: Record, size: int) -> int:
    """Return the size in bytes of an operation's larger array."""
    name = record.name.removesuffix(START)
    if name.startswith(("all_gather", "reduce_scatter")):
        return record.nbytes * size // (size + 1)
    has_two = name in ("all_to_all", "all_to_all_single", "sendrecv", "redistribute")
    return record.nbytes // 2 if has_two else record.nbytes


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest-rank method."""
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]
