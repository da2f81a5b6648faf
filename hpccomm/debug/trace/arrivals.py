"""The ranks' arrivals at recorded collectives: the last rank, and the time that the others waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ...core.operation_list import START
from ..records import Record
from .files import Trace, groups_in


@dataclass(frozen=True)
class Arrival:
    """The arrival of all ranks of a group at one collective."""

    records: dict[int, Record]  # by rank; with aligned clocks
    last: int  # the rank that came last
    delay: float  # seconds between the last rank's arrival and the second to last's

    def wait(self, rank: int) -> float:
        """Return the seconds that a rank waited in the collective for the last rank; 0 if it did not block."""
        record, came = self.records[rank], self.records[self.last].begin
        if record.async_op or record.name.endswith(START):
            return 0.0
        return max(0.0, min(record.end, came) - record.begin)


@dataclass
class RankTotals:
    """Totals of a rank's arrivals: how often it came last, the seconds it delayed others, and the seconds it waited."""

    rank: int
    collectives: int = 0
    last: int = 0
    delay: float = 0.0
    longest: float = 0.0  # the longest of these delays
    waited: float = 0.0

    @property
    def steady(self) -> float:
        """The seconds it delayed others, without the longest delay: one rank often reads the input alone, once."""
        return self.delay - self.longest


def arrivals(traces: Sequence[Trace]) -> list[Arrival]:
    """Return the collectives that every rank of their group has recorded and completed."""
    groups = groups_in(traces)
    together: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for trace in traces:
        for record in trace.records:
            if record.state == "completed" and not record.is_a_message:
                together[record.group, record.number][trace.rank] = record
    found = []
    for (group, _), records in together.items():
        if group in groups and 1 < len(records) == len(groups[group].ranks):
            (before, _), (came, last) = sorted((record.begin, rank) for rank, record in records.items())[-2:]
            found.append(Arrival(records, last, came - before))
    return found


def by_rank(traces: Sequence[Trace]) -> list[RankTotals]:
    """Return the totals of each rank."""
    found = {trace.rank: RankTotals(trace.rank) for trace in traces}
    for each in arrivals(traces):
        found[each.last].last += 1
        found[each.last].delay += each.delay
        found[each.last].longest = max(found[each.last].longest, each.delay)
        for rank in each.records:
            found[rank].collectives += 1
            found[rank].waited += each.wait(rank)
    return list(found.values())


def straggler(ranks: Sequence[RankTotals]) -> RankTotals | None:
    """Return the rank whose `steady` delay is more than three times as long as any other rank's, or None."""
    if len(ranks) < 2:
        return None
    *_, second, worst = sorted(ranks, key=attrgetter("steady"))
    return worst if worst.steady > 3 * second.steady else None
