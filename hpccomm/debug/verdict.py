"""The verdict: from what every rank says that it is doing, which of them is to blame, in words.

A rank that waits in an operation waits for the ranks that are not in it. From every rank that waits one can go on to
those it waits for, and at the end are the culprits: ranks that wait for nobody (they compute, have ended, are stopped
or gone), ranks that call something else under the same number, or ranks that wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.backend import FastPath
from ..core.operation_list import OPERATIONS, START
from .records import Record, sides, unequal_sizes
from .words import alike, by_number, duration, places_in_words, ranks_in_words

MANY = 7  # entries of a report's "recent" from which on older ones may have been dropped
MAY_BE_SMALL = OPERATIONS.keys() & vars(FastPath).keys()  # of what takes the fast path only the number is known
SMALL = f"one of {', '.join(sorted(name for name in MAY_BE_SMALL if not OPERATIONS[name].is_a_message))}"


@dataclass
class Verdict:
    """What is wrong.

    Attributes
    ----------
    culprits : list of int
        The ranks (of MPI.COMM_WORLD) that are to blame; empty where nobody waits.
    lines : list of str
        The same in words, and who waits for them.

    Examples
    --------
    >>> import hpccomm.debug
    >>> print(hpccomm.debug.Verdict([3], ["rank 3 never reached barrier #7 of 'world'"]))
    rank 3 never reached barrier #7 of 'world'
    """

    culprits: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass
class _Rank:
    """What one rank says."""

    rank: int
    report: Mapping[str, Any] | None
    waits: list[tuple[Record, float]]  # what it is in, and for how many seconds

    def is_in(self, record: Record) -> bool:
        return any(
            (own.group, own.number, own.name) == (record.group, record.number, record.name) for own, _ in self.waits
        )

    def is_beyond(self, record: Record) -> bool:
        """Whether it is in a later collective of the same group."""
        later = (own for own, _ in self.waits if not own.is_a_message and own.group == record.group)
        return not record.is_a_message and any(own.number > record.number for own in later)

    def at(self, record: Record) -> tuple[Record, float] | None:
        """Return this rank's collective with the number of `record`, and for how long."""
        same = (
            (own, seconds) for own, seconds in self.waits if (own.group, own.number) == (record.group, record.number)
        )
        return next(((own, seconds) for own, seconds in same if not own.is_a_message), None)

    def has_called(self, record: Record, number: int) -> Record | None:
        """Return the collective with a number of the record's group that this rank has been through, if it is known."""
        group = self._group(record)
        recent = {each[0]: each[1:] for each in group.get("recent", ()) if _is_operation(each[1])}
        if "recent" not in group or number > group["collectives"]:
            return None
        if number not in recent and len(group["recent"]) > MANY and number < min(recent, default=number + 1):
            return None
        name, dtype, nbytes = recent.get(number, (SMALL, "", 0))
        return Record(
            name, number, record.group, record.group_name, dtype=dtype, count=-1, nbytes=nbytes, state="completed"
        )

    def before(self, record: Record) -> str:
        """Return in words the calls that are no operations and that this rank has made since the collective before."""
        recent = self._group(record).get("recent", ())
        names = [name for number, name, *_ in recent if number == record.number - 1 and not _is_operation(name)]
        return " and ".join(names) or "nothing"

    def _group(self, record: Record) -> Mapping[str, Any]:
        return (self.report or {}).get("groups", {}).get(record.group, {})  # type: ignore[no-any-return]


def _is_operation(name: str) -> bool:
    return name.removesuffix(START) in OPERATIONS


def verdict(reports: Iterable[Mapping[str, Any]], size: int) -> Verdict:
    """Return the ranks to blame, from the reports of the ranks (`report.state`) of a job of `size` ranks.

    Returns
    -------
    Verdict

    Examples
    --------
    >>> import hpccomm.debug, json
    >>> report = json.loads(hpccomm.debug.dump().read_text())
    >>> print(hpccomm.debug.verdict([report], size=1))
    no rank waits for another one
    """
    said = {report["rank"]: report for report in reports}
    ranks = [_Rank(rank, said.get(rank), _waits(said.get(rank))) for rank in range(size)]
    groups: dict[str, Sequence[int]] = {"": range(size)}
    for report in said.values():
        groups.update({key: each["ranks"] for key, each in report["groups"].items()})
    return _Case(ranks, groups).decide()


class _Case:
    def __init__(self, ranks: list[_Rank], groups: Mapping[str, Sequence[int]]) -> None:
        self._ranks = ranks
        self._groups = groups

    def decide(self) -> Verdict:
        waiting = [each for each in self._ranks if each.waits]
        if not waiting:
            return Verdict(lines=["no rank waits for another one"] if any(each.report for each in self._ranks) else [])
        longest = max(seconds for each in waiting for _, seconds in each.waits)
        hanging = [each for each in waiting if any(seconds >= longest / 2 for _, seconds in each.waits)]
        for decide in (
            self._those_who_wait_for_nobody,
            self._those_who_differ,
            self._those_who_have_differed,
            self._those_who_wait_for_each_other,
            self._those_who_have_left,
            self._those_who_let_it_lie,
        ):
            found = decide(hanging)
            if found.culprits:
                return found
        return Verdict(lines=[f"{ranks_in_words([each.rank])} {_is_in(*each.waits[0])}" for each in waiting])

    # -- who waits for whom ------------------------------------------------------------------------------

    def _waits_for(self, each: _Rank) -> dict[int, Record]:
        """Return the ranks that a rank waits for, and in what."""
        found: dict[int, Record] = {}
        for record, _ in each.waits:
            members = self._groups.get(record.group, ())
            if record.is_a_message:
                peers = members if record.peer is None else [members[record.peer]] if record.peer < len(members) else []
                others = [rank for rank in peers if rank != each.rank]
            else:
                others = [rank for rank in members if rank != each.rank and not self._ranks[rank].is_in(record)]
                others = [rank for rank in others if not self._has_done(rank, record)]
            found.update(dict.fromkeys(others, record))
        return found

    def _has_done(self, rank: int, record: Record) -> bool:
        """Whether a rank has been through this operation already, as a root may that others still wait for."""
        each = self._ranks[rank]
        if each.report is None or each.at(record) is not None:
            return False
        group = each.report["groups"].get(record.group)
        return group is not None and group["collectives"] >= record.number and record.number > 0

    # -- three kinds of culprits ---------------------------------------------------------------------------

    def _those_who_wait_for_nobody(self, waiting: list[_Rank]) -> Verdict:
        missed: dict[int, dict[tuple[Any, ...], Record]] = {}
        pending, seen = list(waiting), {each.rank for each in waiting}
        for each in pending:
            for rank, record in self._waits_for(each).items():
                if not self._ranks[rank].waits:
                    missed.setdefault(rank, {}).setdefault((record.group, record.number, record.name), record)
                elif rank not in seen:
                    seen.add(rank)
                    pending.append(self._ranks[rank])
        found = Verdict(sorted(missed))
        what = ((rank, (tuple(missed[rank]), self._activity(rank))) for rank in found.culprits)
        for (keys, activity), ranks in alike(what).items():
            if len(ranks) > 1 and activity.startswith("it "):
                activity = f"each {activity.removeprefix('it ')}"
            for key in keys:
                record = missed[ranks[0]][key]
                others = [each for each in waiting if each.is_in(record) and each.rank not in ranks]
                verb = "has not answered" if record.is_a_message else "never reached"
                found.lines.append(
                    f"{ranks_in_words(ranks)} {verb} {record}: {activity}; {self._who_waits(others, record)}"
                )
        return found

    def _those_who_differ(self, waiting: list[_Rank]) -> Verdict:
        """Also ranks that have not waited for long: those of a large operation come late to a small one."""
        for each in waiting:
            for record, _ in each.waits:
                if not record.is_a_message:
                    found = [(other.rank, other.at(record)) for other in self._ranks]
                    records = {rank: own[0] for rank, own in found if own is not None}
                    different = sides(records)
                    if len(different) > 1:
                        return self._differing(record, records, different)
                    if len(records) == len(self._groups.get(record.group, ())):
                        wrong = self._wrong_sizes(record, records)
                        if wrong.culprits:
                            return wrong
        return Verdict()

    def _differing(self, record: Record, records: Mapping[int, Record], different: list[list[int]]) -> Verdict:
        shown = "; ".join(self._called(side, records) for side in reversed(different))
        earlier = alike((rank, self._ranks[rank].before(record)) for rank in records)
        if len(earlier) > 1:  # the fault is older than the operation
            different = sorted(earlier.values(), key=len)
            others = ", ".join(f"{ranks_in_words(side)} {calls}" for calls, side in earlier.items())
            shown = f"{shown}; before it have called: {others}"
        few = [side for side in different if len(side) < len(different[-1])] or different
        names, forms = ({getattr(each, field) for each in records.values()} for field in ("name", "async_op"))
        why = ": MPI does not match a blocking call with an asynchronous one" if len(names) == 1 < len(forms) else ""
        line = f"the ranks differ in {_title(record)}: {shown}{why}"
        return Verdict(sorted(rank for side in few for rank in side), [line])

    def _called(self, side: list[int], records: Mapping[int, Record]) -> str:
        record = records[side[0]]
        if record.state == "completed":
            return f"{ranks_in_words(side)} {by_number(side, 'has', 'have')} called {record.in_detail()}"
        places = places_in_words(records[rank].where for rank in side)
        return f"{ranks_in_words(side)} {by_number(side, 'calls', 'call')} {record.in_detail()} at {places}"

    def _those_who_have_differed(self, waiting: list[_Rank]) -> Verdict:
        """Ranks whose collectives were others than those of the rest, although they got through them."""
        for each in waiting:
            for record, _ in each.waits:
                for number in range(record.number - MANY, record.number + 1) if not record.is_a_message else ():
                    records = {}
                    for rank in self._groups.get(record.group, ()):
                        now = self._ranks[rank].at(record) if number == record.number else None
                        past = self._ranks[rank].has_called(record, number) if now is None else now[0]
                        records.update({} if past is None else {rank: past})
                    known = {rank: one for rank, one in records.items() if one.name != SMALL}
                    if any(one.name.removesuffix(START) in MAY_BE_SMALL for one in known.values()):
                        records = known
                    different = sides(records)
                    if number > 0 and len(different) > 1:
                        return self._differing(next(iter(records.values())), records, different)
        return Verdict()

    def _wrong_sizes(self, record: Record, records: Mapping[int, Record]) -> Verdict:
        """Compare what each rank sends to each other with what that expects."""
        members = self._groups[record.group]
        sizes = [records[rank].sizes for rank in members]
        wrong = [] if None in sizes else unequal_sizes(sizes)
        if not wrong:
            return Verdict()
        sender, receiver = (members[rank] for rank in wrong[0])
        sends, expects = sizes[wrong[0][0]][0][wrong[0][1]], sizes[wrong[0][1]][1][wrong[0][0]]  # type: ignore[index]
        common = [members[rank] for rank in set.intersection(*map(set, wrong))]
        line = (
            f"the ranks differ in {_title(record)}: rank {sender} sends {sends} elements to rank {receiver} at "
            f"{records[sender].where}, which expects {expects} at {records[receiver].where}"
        )
        return Verdict(sorted(common or {sender, receiver}), [line])

    def _those_who_wait_for_each_other(self, waiting: list[_Rank]) -> Verdict:
        edges = {each.rank: self._waits_for(each) for each in waiting}
        for start in sorted(edges):
            path = [start]
            while edges.get(path[-1]):
                following = min(edges[path[-1]])
                if following in path:
                    circle = path[path.index(following) :]
                    return self._minority(circle, edges) or self._circle(circle, edges)
                path.append(following)
                edges.setdefault(following, self._waits_for(self._ranks[following]))
        return Verdict()

    def _minority(self, circle: list[int], edges: dict[int, dict[int, Record]]) -> Verdict | None:
        """Return a verdict on the smaller side, where many ranks are in one collective and few in something else."""
        if len(circle) != 2:
            return None
        records = [edges[circle[0]][circle[1]], edges[circle[1]][circle[0]]]
        sides = [[each for each in self._ranks if each.is_in(record)] for record in records]
        (few, theirs), (many, record) = sorted(zip(sides, records), key=lambda side: len(side[0]))
        if len(few) == len(many) or record.is_a_message or theirs.is_a_message:
            return None
        ranks = [each.rank for each in few]
        own, seconds = next(each for each in few[0].waits if each[0].number == theirs.number)
        activity = f"{by_number(few, 'it', 'they')} {_is_in(own, seconds, by_number(few, 'is', 'are'))}"
        return Verdict(
            ranks, [f"{ranks_in_words(ranks)} never reached {record}: {activity}; {self._who_waits(many, record)}"]
        )

    def _those_who_have_left(self, waiting: list[_Rank]) -> Verdict:
        """Ranks that are in a later operation than others of the group: they have caught an error, or hold a result."""
        for each in waiting:
            for record, _ in each.waits:
                ahead = [other for other in self._ranks if other.is_beyond(record)]
                if ahead:
                    own, seconds = next(own for own in ahead[0].waits if own[0].group == record.group)
                    ranks, still = [other.rank for other in ahead], [other for other in waiting if other.is_in(record)]
                    activity = _is_in(own, seconds, by_number(ahead, "is", "are"))
                    words = f"{ranks_in_words(ranks)} {by_number(ahead, 'has', 'have')} left {record}, and {activity}"
                    return Verdict(ranks, [f"{words}; {self._who_waits(still, record)} (was an error caught?)"])
        return Verdict()

    def _those_who_let_it_lie(self, waiting: list[_Rank]) -> Verdict:
        """Ranks that have begun an asynchronous operation, and compute: MPI makes progress inside its calls only."""
        found = Verdict()
        for each in waiting:
            for record, _ in each.waits:
                for other in self._ranks:
                    begun = () if other.report is None or other.waits else other.report["operations"]
                    if any(
                        (own["group"], own["number"], own["name"]) == (record.group, record.number, record.name)
                        for own in begun
                    ):
                        found.culprits.append(other.rank)
                        what, why = "and does not wait for it", "but MPI makes progress only in its calls"
                        if not record.async_op:
                            what = f"asynchronously, and {ranks_in_words([each.rank])} calls it as a blocking operation"
                            why = "which MPI does not match"
                        found.lines.append(
                            f"rank {other.rank} has begun {record} {what}, {why}: "
                            f"{self._activity(other.rank)}; {self._who_waits([each], record)}"
                        )
            if found.culprits:
                break
        return found

    def _circle(self, circle: list[int], edges: dict[int, dict[int, Record]]) -> Verdict:
        found = Verdict(sorted(circle), [f"{ranks_in_words(circle)} wait for each other:"])
        for rank, following in zip(circle, [*circle[1:], circle[0]]):
            record = edges[rank][following]
            seconds = next(seconds for own, seconds in self._ranks[rank].waits if own is record)
            found.lines.append(f"  rank {rank} {_is_in(record, seconds)}, and waits for rank {following}")
        return found

    # -- words -----------------------------------------------------------------------------------------------

    def _activity(self, rank: int) -> str:
        """Return the state in words of a rank that waits for nobody."""
        each = self._ranks[rank]
        for other in self._ranks:
            state = (other.report or {}).get("neighbours", {}).get(str(rank))
            if state in ("dead", "stopped"):
                meaning = {"dead": "its process is gone", "stopped": "its process is stopped (SIGSTOP, or a debugger)"}
                return meaning[state]
        if each.report is None:
            return "it does not answer (has it called init_process_group? is its node there?)"
        if each.report.get("left"):
            why = f" ({each.report['reason']})" if ": " in each.report["reason"] else ""
            return f"it has come to the end of its program{why} without that{_last(each.report)}"
        if each.report.get("ended"):
            return f"it has ended {each.report['ended']}{_last(each.report)}"
        return f"it is in the program at {each.report['program']}{_last(each.report)}"

    def _who_waits(self, others: list[_Rank], record: Record) -> str:
        places = places_in_words(own.where for each in others for own, _ in each.waits if own.number == record.number)
        seconds = max((s for each in others for own, s in each.waits if own.number == record.number), default=0.0)
        verb = by_number(others, "waits", "wait")
        return f"{ranks_in_words([each.rank for each in others])} {verb} at {places}, for {duration(seconds)}"


def _waits(report: Mapping[str, Any] | None) -> list[tuple[Record, float]]:
    if report is None or report.get("left"):
        return []
    found = []
    for each in report["operations"]:
        if each["waits"]:
            fields = {name: each[name] for name in Record.__dataclass_fields__ if name in each}
            found.append((Record(**fields), each["seconds"]))
    return found


def _title(record: Record) -> str:
    return f"operation #{record.number} of {record.group_name!r}"


def _is_in(record: Record, seconds: float, verb: str = "is") -> str:
    peer, tag = "", ""
    if record.is_a_message:
        peer = " from any rank" if record.peer is None else f" with rank {record.peer} of the group"
        tag = f", tag {record.tag}" if record.tag is not None else ""
    return f"{verb} in {record}{peer}{tag}, {record.where}, for {duration(seconds)}"


def _last(report: Mapping[str, Any]) -> str:
    """Return the last collective of a rank in each of its groups, in words."""
    reached = [
        f"#{each['collectives']} of {each['name']!r}" for each in report["groups"].values() if each["collectives"]
    ]
    return f" (its last collective: {', '.join(reached[:4])})" if reached else ""
