"""Who comes when: for each collective that all ranks have recorded, who came last, and how long the others waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.operation_list import START
from ..records import Record
from .files import Trace


@dataclass(frozen=True)
class Arrival:
    """One collective, as its ranks came to it.

    Attributes
    ----------
    records : dict of int to Record
        By rank; their clocks have been aligned.
    last : int
        The rank that came last.
    delay : float
        Seconds by which it came later than the last but one: what the others would have gained.
    """

    records: dict[int, Record]
    last: int
    delay: float

    def wait(self, rank: int) -> float:
        """Return the seconds that a rank was in it before the last one came; 0 for those that did not block."""
        record, came = self.records[rank], self.records[self.last].begin
        if record.async_op or record.name.endswith(START):
            return 0.0
        return max(0.0, min(record.end, came) - record.begin)


@dataclass
class OfRank:
    """What all arrivals say of one rank: how often it came last, the seconds it delayed others, those it waited."""

    rank: int
    collectives: int = 0
    last: int = 0
    delay: float = 0.0
    waited: float = 0.0


def arrivals(traces: Sequence[Trace]) -> list[Arrival]:
    """Return the collectives that every rank of their group has recorded and ended."""
    members = {key: group.ranks for trace in traces for key, group in trace.groups.items()}
    together: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
    for trace in traces:
        for record in trace.records:
            if record.state == "completed" and not record.is_a_message:
                together[record.group, record.number][trace.rank] = record
    found = []
    for (group, _), records in together.items():
        if len(records) > 1 and len(records) == len(members.get(group, ())):
            (before, _), (came, last) = sorted((record.begin, rank) for rank, record in records.items())[-2:]
            found.append(Arrival(records, last, came - before))
    return found


def by_rank(traces: Sequence[Trace]) -> list[OfRank]:
    """Return the sum of the arrivals for each rank."""
    found = {trace.rank: OfRank(trace.rank) for trace in traces}
    for each in arrivals(traces):
        found[each.last].last += 1
        found[each.last].delay += each.delay
        for rank in each.records:
            found[rank].collectives += 1
            found[rank].waited += each.wait(rank)
    return list(found.values())


def straggler(ranks: Sequence[OfRank]) -> OfRank | None:
    """Return the rank that delays the others most, if it is not chance: three times as long as any other."""
    if len(ranks) < 2:
        return None
    *_, second, worst = sorted(ranks, key=lambda each: each.delay)
    return worst if worst.delay > 3 * second.delay else None
