"""The verdict from the ranks' recordings: the first operation in which they differ, and the ranks to blame.

All ranks number a group's collectives alike, so records with the same number must be the same operation. If recordings
agree but some ranks did not arrive, the ranks that wait for no other rank are to blame. If ranks wait for each other,
the operation with fewer ranks is to blame.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...core.operation_list import START, TASK
from ..culprits import Verdict
from ..records import Record, key_of_operation, minority, sides
from ..words import by_number, places_in_words, ranks_in_words
from .files import Trace


@dataclass
class History(Verdict):
    """The verdict from the recordings; `culprits` is empty if all ranks agree."""

    marks: set[tuple[str, int]] = field(default_factory=set)  # the verdict's collectives: (group, number)


@dataclass
class _Collective:
    """The ranks' records with one number in one group."""

    group: str
    number: int
    records: dict[int, Record]
    missing: list[int]  # ranks that have not reached it

    @property
    def any(self) -> Record:
        return next(iter(self.records.values()))


def history(traces: Sequence[Trace]) -> History:
    """Return the ranks to blame, from the recordings of a job's ranks.

    Recordings may begin with different operations, because older ones were overwritten: only the part that all ranks
    have is compared. Ranks without a recording are left out.
    """
    return _Search(traces).decide()


class _Search:
    """The search for the first operation in which the recordings differ."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = {trace.rank: trace for trace in traces}
        self._size = max((trace.size for trace in traces), default=0)
        self._absent = [rank for rank in range(self._size) if rank not in self._traces]
        self._members: dict[str, tuple[int, ...]] = {}
        self._collectives: dict[str, dict[int, dict[int, Record]]] = {}  # by group, rank and number
        for rank, trace in self._traces.items():
            for key, group in trace.groups.items():
                self._members[key] = group.ranks
                self._collectives.setdefault(key, {})[rank] = {}
            for record in trace.records:
                if not record.is_a_message:
                    self._collectives.setdefault(record.group, {}).setdefault(rank, {})[record.number] = record

    def decide(self) -> History:
        if not self._traces:
            return History()
        found_in = filter(None, map(self._first_doubtful, self._collectives))
        doubtful = sorted(found_in, key=lambda each: min(record.begin for record in each.records.values()))
        different = [each for each in doubtful if len(sides(each.records)) > 1]
        if different:
            found = self._difference(different[0])
        elif doubtful:
            found = self._absence(doubtful)
        else:
            found = self._unmatched_message()
        found.lines += self._tasks()
        if self._absent:
            found.lines.append(f"there is no recording of {ranks_in_words(self._absent)}")
        return found

    # -- collectives -----------------------------------------------------------------------------------------

    def reached(self, rank: int, group: str) -> int:
        """Return the number of the last collective that a rank has begun."""
        known = self._traces[rank].groups.get(group)
        return max(known.collectives if known else 0, *self._collectives[group].get(rank, ()), 0)

    def _first_doubtful(self, group: str) -> _Collective | None:
        """Return a group's first collective in which ranks differ, or which some ranks have not reached."""
        of_rank = self._collectives[group]
        reached = {rank: self.reached(rank, group) for rank in of_rank}
        first = max(min(records, default=reached[rank] + 1) for rank, records in of_rank.items())
        for number in range(first, max(reached.values()) + 1):
            records = {rank: records[number] for rank, records in of_rank.items() if number in records}
            missing = [rank for rank in of_rank if reached[rank] < number]
            missing = [rank for rank in missing if self._traces[rank].is_final]  # others may reach it later
            if all(record.state == "in flight" for record in records.values()):
                missing += [rank for rank in self._members.get(group, ()) if rank in self._absent]
            found = _Collective(group, number, records, missing)
            if records and (missing or len(sides(found.records)) > 1):
                return found
        return None

    def _difference(self, found: _Collective) -> History:
        found_sides = sides(found.records)
        shown = []
        for side in reversed(found_sides):
            record, at = found.records[side[0]], _at(*(found.records[rank] for rank in side))
            shown.append(f"{ranks_in_words(side)} {by_number(side, 'calls', 'call')} {record.in_detail()}{at}")
        line = f"collective #{found.number} of group {found.any.group_name!r} differs: {'; '.join(shown)}"
        hint = self._shift_hint(found, found_sides) if len(found_sides) == 2 else ""
        return History(minority(found_sides), [line, *filter(None, [hint])], {(found.group, found.number)})

    def _shift_hint(self, found: _Collective, both: list[list[int]]) -> str:
        """Return a hint if the smaller side is one collective ahead of the other side, or behind it."""
        of_rank = self._collectives[found.group]
        now, following = found.number, found.number + 1

        def fits_the_next(rank: int, other: int) -> bool:
            one, two = of_rank[rank].get(now), of_rank[other].get(following)
            return one is not None and two is not None and len(sides({0: one, 1: two})) == 1

        few, (one, *_), (other, *_) = ranks_in_words(both[0]), *both
        is_behind, is_ahead = fits_the_next(one, other), fits_the_next(other, one)
        if is_behind and not is_ahead:
            return f"{few} may have left out what the others call #{now}: it fits their #{following}"
        return f"{few} may have called one more than the others, #{now}" if is_ahead and not is_behind else ""

    # -- missing ranks -----------------------------------------------------------------------------------------

    def _absence(self, doubtful: list[_Collective]) -> History:
        waits = self._waits(doubtful)
        path = [min(doubtful[0].missing, key=lambda rank: (rank in waits, rank))]
        while path[-1] in waits:
            ahead = waits[path[-1]]
            following = min(ahead, key=lambda rank: (rank in waits, rank))
            if following in path:
                return self._circle(path[path.index(following) :], waits)
            path.append(following)
        root = path[-1]
        for each in doubtful:
            if root in each.missing:
                return self._never_reached(each, [rank for rank in each.missing if rank not in waits])
        record = waits[path[-2]][root]
        line = f"rank {root} has not answered {record}: {self._last_in_words(root)}; rank {path[-2]} waits{_at(record)}"
        return History([root], [line])

    def _waits(self, doubtful: list[_Collective]) -> dict[int, dict[int, Record]]:
        """Return the ranks that each waiting rank waits for, with the operation in which it waits."""
        waits: dict[int, dict[int, Record]] = defaultdict(dict)
        for each in doubtful:
            for rank, record in each.records.items():
                if record.state == "in flight":
                    waits[rank].update(dict.fromkeys(each.missing, record))
        for rank, trace in self._traces.items():
            for record in trace.records:
                if record.state == "in flight" and record.is_a_message and record.peer is not None:
                    members = self._members.get(record.group, range(self._size))
                    waits[rank].setdefault(members[record.peer], record)
        return {rank: ahead for rank, ahead in waits.items() if ahead}

    def _never_reached(self, each: _Collective, ranks: list[int]) -> History:
        in_flight = [rank for rank, record in each.records.items() if record.state == "in flight"]
        verb = by_number(in_flight, "waits", "wait") if in_flight else "came"
        there = in_flight or list(each.records)
        at = _at(*(each.records[rank] for rank in there))
        lines = [
            f"{ranks_in_words(ranks)} never reached {each.any}; {ranks_in_words(there)} {verb} there{at}",
            "  " + "; ".join(f"rank {rank}: {self._last_in_words(rank)}" for rank in ranks[:4]),
            self._first_other_line(each, ranks[0], there[0]),
        ]
        return History(sorted(ranks), list(filter(None, lines)), {(each.group, each.number)})

    def _first_other_line(self, each: _Collective, rank: int, other: int) -> str:
        """Describe the first collective that two ranks called from different lines."""
        of_rank = self._collectives[each.group]
        mine, theirs = of_rank.get(rank, {}), of_rank[other]
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number].where != theirs[number].where:
                return (
                    f"  they have called from different lines since #{number}: rank {rank}{_at(mine[number])}, "
                    f"rank {other}{_at(theirs[number])}"
                )
        return ""

    def _circle(self, circle: list[int], waits: dict[int, dict[int, Record]]) -> History:
        """Return the verdict on ranks that wait for each other: the operations with fewer ranks are to blame."""
        records = [waits[rank][following] for rank, following in zip(circle, [*circle[1:], circle[0]])]
        members: dict[tuple[str, int, str], set[int]] = defaultdict(set)
        for rank, ahead in waits.items():
            for record in ahead.values():
                members[key_of_operation(record)].add(rank)
        those = [(record, members[key_of_operation(record)]) for record in records]
        largest = max(len(side) for _, side in those)
        few = {rank for _, side in those if len(side) < largest for rank in side}
        shown = "; ".join(
            f"{ranks_in_words(side)} {by_number(side, 'is', 'are')} in {record}{_at(record)}"
            for record, side in sorted(those, key=lambda each: -len(each[1]))
        )
        marks = {(record.group, record.number) for record in records if not record.is_a_message}
        return History(sorted(few or circle), [f"ranks wait for each other: {shown}"], marks)

    def _last_in_words(self, rank: int) -> str:
        """Describe a rank's last operation."""
        trace = self._traces.get(rank)
        if trace is None:
            return "there is no recording of it"
        if not trace.records:
            return "it has called nothing"
        last = trace.records[-1]
        verb = "it is in" if last.state == "in flight" else "its last operation was"
        return f"{verb} {last}{_at(last)}"

    def _tasks(self) -> Iterator[str]:
        """Yield a line for each unfinished task of an executor."""
        for rank, trace in self._traces.items():
            for record in trace.records:
                if record.name == TASK.name and record.state == "in flight":
                    yield f"rank {rank} is in {record}{_at(record)}"

    # -- messages ------------------------------------------------------------------------------------------------

    def _unmatched_message(self) -> History:
        """Return the verdict on the first pair of ranks with unequal numbers of messages sent and received."""
        for group, members in self._members.items():
            sent: Counter[tuple[int, int, bool]] = Counter()  # by sender, receiver, and True for objects
            received: Counter[tuple[int, int, bool]] = Counter()
            last: dict[tuple[int, int, bool], Record] = {}
            unclear = {rank for rank in members if not self._has_all_messages(rank, group)}
            for rank in set(members) - unclear:
                for record in self._messages(rank, group):
                    name = record.name.removesuffix(START)
                    if name == TASK.name:
                        continue
                    if name == "sendrecv" or record.peer is None or record.state == "failed":
                        unclear.add(rank)
                        continue
                    peer, is_sent = members[record.peer], name.startswith("send")
                    pair = (rank, peer, "object" in name) if is_sent else (peer, rank, "object" in name)
                    (sent if is_sent else received)[pair] += 1
                    last[pair] = record
            for pair, record in sorted(last.items(), key=lambda each: each[1].begin):
                sender, receiver, _ = pair
                if sent[pair] != received[pair] and not unclear & {sender, receiver}:
                    line = (
                        f"rank {sender} has sent {sent[pair]} to rank {receiver}, which has received {received[pair]} "
                        f"in group {record.group_name!r}; the last was {record}{_at(record)}"
                    )
                    return History([sender, receiver], [line])
        return History()

    def _messages(self, rank: int, group: str) -> Iterable[Record]:
        return (each for each in self._traces[rank].records if each.group == group and each.is_a_message)

    def _has_all_messages(self, rank: int, group: str) -> bool:
        trace = self._traces.get(rank)
        if trace is None or not trace.is_final or group not in trace.groups:
            return False
        if not trace.groups[group].has_all_messages:
            return False
        numbers = {each.number for each in self._messages(rank, group)}
        return len(numbers) >= trace.groups[group].messages


def _at(*records: Record) -> str:
    places = {record.where for record in records}
    return f" at {places_in_words(places)}" if any(places) else ""
