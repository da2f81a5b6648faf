"""The verdict: the ranks to blame for a hang, from the reports of all ranks.

A rank that waits in an operation waits for the ranks that are not in it. These may wait for other ranks in turn. At the
end of each such chain are the culprits: ranks that wait for no rank (they compute, have ended, are stopped or gone),
ranks that call a different operation under the same number, or ranks that wait for each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..core.operation_list import START
from .records import Record, key_of_operation, minority, sides
from .reported import (
    MAY_BE_SMALL,
    SMALL,
    Reported,
    Wait,
    last_collectives,
    record_from,
    tasks_in_words,
    wait_in_words,
    waits_in,
    without_collector,
)
from .sizes import unequal
from .words import by_number, duration, from_ranges, places_in_words, ranks_by_value, ranks_in_words, tag_in_words

LEAST = 1.0  # seconds; shorter calls of C are not reported
PASSED = 32  # collectives that are compared before the one that hangs
MOST = 16  # lines of one kind in a verdict


@dataclass
class Verdict:
    """The ranks to blame for a hang, and a description.

    Attributes
    ----------
    culprits : list of int
        The ranks to blame (in MPI.COMM_WORLD); empty if no rank waits.
    lines : list of str
        A description of the culprits, and of the ranks that wait for them.
    standstill : float
        The seconds for which every rank has been in a call of C that hpccomm does not know; otherwise 0.
    all_wait : float
        The seconds for which every rank that has not ended has waited for others in a call; otherwise 0.
    has_threads : bool
        True if a rank of a standstill has threads besides its main thread, which may continue.

    Examples
    --------
    >>> import hpccomm.debug
    >>> print(hpccomm.debug.Verdict([3], ["rank 3 never reached barrier #7 of 'world'"]))
    rank 3 never reached barrier #7 of 'world'
    """

    culprits: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    standstill: float = field(default=0.0, kw_only=True)
    all_wait: float = field(default=0.0, kw_only=True)
    has_threads: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return "\n".join(self.lines)


@without_collector()
def verdict(reports: Iterable[Mapping[str, Any]], size: int) -> Verdict:
    """Return the ranks to blame, from the reports (`report.state`) of a job of `size` ranks.

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
    search = Search.of(reports, size)
    return replace(search.decide(), all_wait=search.all_wait())


class _Awaited:
    """The ranks that one operation's waiting ranks wait for."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.all = frozenset(ranks)
        self._first = min(ranks, default=None)
        self._second = min((rank for rank in ranks if rank != self._first), default=None)

    def first(self, without: int) -> int | None:
        """Return the lowest rank other than `without`; None if there is none."""
        return self._second if without == self._first else self._first


class Search:
    """The search for culprits: one kind after the other, the most certain kind first.

    There may be thousands of ranks, so operations are looked up in tables.
    """

    def __init__(self, ranks: list[Reported], groups: Mapping[str, Sequence[int]]) -> None:
        self._ranks = ranks
        self._groups = groups
        self._awaited: dict[tuple[Any, ...], _Awaited] = {}

    @classmethod
    def of(cls, reports: Iterable[Mapping[str, Any]], size: int) -> Search:
        """Return the search in the reports of a job of `size` ranks."""
        by_rank = {report["rank"]: report for report in reports}
        ranks = [Reported(rank, by_rank.get(rank), waits_in(by_rank.get(rank))) for rank in range(size)]
        said: dict[str, Any] = {}
        for report in by_rank.values():
            said.update({key: each["ranks"] for key, each in report["groups"].items() if "ranks" in each})
        groups = {"": range(size), **{key: from_ranges(each, most=size) for key, each in said.items()}}
        return cls(ranks, groups)

    @cached_property
    def _in(self) -> dict[tuple[Any, ...], list[Reported]]:
        """The ranks in each operation, by `key_of_operation`."""
        found = defaultdict(list)
        for each in self._ranks:
            for key in each.keys:
                found[key].append(each)
        return found

    @cached_property
    def _own(self) -> dict[tuple[str, int], dict[int, Record]]:
        """Each waiting rank's numbered collectives, by group and number."""
        found: dict[tuple[str, int], dict[int, Record]] = defaultdict(dict)
        for each in self._ranks:
            for key, record in each.collectives.items():
                found[key][each.rank] = record
        return found

    @cached_property
    def _states(self) -> dict[int, set[str]]:
        """The states of each rank's process, as seen by ranks of its node."""
        sides = ((each.rank, repr(each.report["neighbours"])) for each in self._ranks if each.report)
        found: dict[int, set[str]] = defaultdict(set)
        for rank, *_ in ranks_by_value(sides).values():
            for state, ranks in (self._ranks[rank].report or {})["neighbours"].items():
                for seen in from_ranges(ranks, most=len(self._ranks)):
                    found[seen].add(state)
        return found

    def decide(self) -> Verdict:
        """Return the verdict, without the time for which all ranks have waited."""
        waiting = [each for each in self._ranks if each.waits]
        if not waiting and (found := self._standing()).standstill:
            return found
        if not waiting and (found := self._not_at_the_end()).culprits:
            return found
        if not waiting:
            lines = ["no rank waits for another one"] if any(each.report for each in self._ranks) else []
            return Verdict(lines=[*lines, *_abridged(self._tasks())])
        hanging = _longest_of(waiting)
        for search in (
            self._absent,
            self._differing,
            self._differing_earlier,
            self._waiting_for_each_other,
            self._ahead,
            self._making_no_progress,
        ):
            found = search(hanging)
            if found.culprits:
                found.lines += _abridged(self._other_tags())
                if search not in (self._differing, self._differing_earlier):  # an earlier difference may be the cause
                    found.lines += self._differing_earlier(hanging).lines
                if all(record.is_awaited for each in waiting for record, _ in each.waits):
                    found.lines += _abridged(self._tasks(without=set(found.culprits)))
                return found
        words = (f"{ranks_in_words([each.rank])} {wait_in_words(*each.waits[0])}" for each in waiting)
        return Verdict(lines=_abridged(words))

    def longest_wait_of(self, rank: int) -> Wait | None:
        """Return the operation that a rank has waited in for longest; None if it does not wait."""
        return max(self._ranks[rank].waits, key=lambda wait: wait.seconds, default=None)

    def awaited_in(self, record: Record) -> Sequence[int]:
        """Return the ranks that the ranks in an operation wait for, perhaps with a rank that is in it."""
        return self._awaited_in(record).ranks

    # -- waits between ranks -----------------------------------------------------------------------------

    def _waits_for(self, each: Reported, polls: bool = False) -> list[tuple[Record, _Awaited]]:
        """Return a rank's waits (or its polls, if `polls`), each with the awaited ranks, perhaps with itself."""
        records = [record for record, _ in each.waits] or (each.polls if polls else [])
        return [(record, self._awaited_in(record)) for record in records]

    def _awaited_in(self, record: Record) -> _Awaited:
        if record.is_a_message:
            key: tuple[Any, ...] = (record.group, record.peer)
        else:
            key = key_of_operation(record)
        if (found := self._awaited.get(key)) is None:
            members = self._groups.get(record.group, ())
            if not record.is_a_message:
                members = [rank for rank in members if not self._is_in_or_beyond(self._ranks[rank], record)]
            elif record.peer is not None:
                members = members[record.peer : record.peer + 1]
            found = self._awaited[key] = _Awaited(members)
        return found

    def _following(self, rank: int) -> int | None:
        """Return the lowest rank that a rank waits for."""
        firsts = (awaited.first(without=rank) for _, awaited in self._waits_for(self._ranks[rank]))
        return min((first for first in firsts if first is not None), default=None)

    def _edge(self, rank: int, other: int) -> Record:
        """Return the operation in which `rank` waits for `other`."""
        waits = self._waits_for(self._ranks[rank])
        return next(record for record, awaited in reversed(waits) if other in awaited.all)

    def _is_in_or_beyond(self, each: Reported, record: Record) -> bool:
        """Return whether a rank is in an operation or has completed it: a root may complete it before others."""
        if each.is_in(record):
            return True
        if each.report is None or each.own(record) is not None:
            return False
        group = each.report["groups"].get(record.group)
        return group is not None and group["collectives"] >= record.number and record.number > 0

    # -- kinds of culprits ---------------------------------------------------------------------------------

    def _absent(self, waiting: list[Reported]) -> Verdict:
        """Find ranks that wait for no rank; ranks that poll count only if there are no others."""
        found = self._behind(waiting, polls=True)
        return found if found.culprits or not any(each.polls for each in self._ranks) else self._behind(waiting)

    def _behind(self, waiting: list[Reported], polls: bool = False) -> Verdict:
        missed: dict[int, dict[tuple[Any, ...], Record]] = {}
        pending, seen, looked_at = list(waiting), {each.rank for each in waiting}, set()
        noted: Counter[_Awaited] = Counter()  # number of operations in which these ranks are awaited
        for each in pending:
            waits = self._waits_for(each, polls)
            kind = tuple((key_of_operation(record), id(awaited)) for record, awaited in waits)
            if kind in looked_at:
                continue  # another rank has the same waits
            looked_at.add(kind)
            last: dict[int, Record] = {}
            for record, awaited in waits:
                if noted[awaited] <= MOST:
                    noted[awaited] += 1
                    last.update(dict.fromkeys(awaited.ranks, record))
            for rank, record in last.items():
                if self._is_spare(rank):
                    continue  # it has done its part of the call that makes the world
                if not self._ranks[rank].waits and not (polls and self._ranks[rank].polls):
                    missed.setdefault(rank, {}).setdefault(key_of_operation(record), record)
                elif rank not in seen:
                    seen.add(rank)
                    pending.append(self._ranks[rank])
        found = Verdict(sorted(missed))
        what = ((rank, (tuple(missed[rank]), self.activity(rank))) for rank in found.culprits)
        for (keys, activity), ranks in ranks_by_value(what).items():
            if len(ranks) > 1 and activity.startswith(("it ", "its ")):
                activity = f"each {activity.partition(' ')[2]}"
            lines = []
            for key in keys:
                record = missed[ranks[0]][key]
                wait = [each for each in self._in[key] if each.rank in seen]
                others = wait or [each for each in pending if record in each.polls]
                verb = f"{by_number(ranks, 'has', 'have')} not answered" if record.is_a_message else "never reached"
                lines.append(f"{ranks_in_words(ranks)} {verb} {record}: {activity}; {self._who_waits(others, record)}")
            found.lines += _abridged(lines)
        return found

    def _differing(self, waiting: list[Reported]) -> Verdict:
        """Find ranks whose calls differ under one number, including ranks that have not waited for long.

        A rank that has a large operation may arrive late at a small one.
        """
        for record in _collectives(waiting):
            records = self._own[record.group, record.number]
            if len(sides(records)) > 1:
                return self._difference(record, records)
            if len(records) == len(self._groups.get(record.group, ())):
                wrong = self._wrong_sizes(record, records)
                if wrong.culprits:
                    return wrong
        return Verdict()

    def _difference(self, record: Record, records: Mapping[int, Record]) -> Verdict:
        different = sides(records)
        shown = "; ".join(self._called(side, records) for side in reversed(different))
        before = {rank: self._ranks[rank].calls_before(record) for rank in records}
        says_more = any(calls not in ("nothing", records[rank].in_detail()) for rank, calls in before.items())
        earlier = ranks_by_value(before.items())
        if len(earlier) > 1 and says_more:  # the error is older than the operation
            different = sorted(earlier.values(), key=len)
            others = ", ".join(f"{ranks_in_words(side)} {calls}" for calls, side in earlier.items())
            shown = f"{shown}; calls since #{record.number - 1}: {others}"
        names, forms = ({getattr(each, field) for each in records.values()} for field in ("name", "async_op"))
        why = ": MPI does not match a blocking call with an asynchronous one" if len(names) == 1 < len(forms) else ""
        return Verdict(minority(different), [f"the ranks differ in {_title(record)}: {shown}{why}"])

    def _called(self, side: list[int], records: Mapping[int, Record]) -> str:
        record = records[side[0]]
        if record.state == "completed":
            return f"{ranks_in_words(side)} {by_number(side, 'has', 'have')} called {record.in_detail()}"
        places = places_in_words(records[rank].where for rank in side)
        return f"{ranks_in_words(side)} {by_number(side, 'calls', 'call')} {record.in_detail()} at {places}"

    def _differing_earlier(self, waiting: list[Reported]) -> Verdict:
        """Find ranks whose earlier collectives differ from the others', although all ranks completed theirs."""
        for record in _collectives(waiting):
            members = [self._ranks[rank] for rank in self._groups.get(record.group, ())]
            alike = ranks_by_value((each.rank, each.history(record)) for each in members).values()
            for number in range(max(1, record.number - PASSED), record.number + 1):
                if len(sides(self._collective_of((ranks[0] for ranks in alike), record, number))) > 1:
                    records = self._collective_of((each.rank for each in members), record, number)
                    return self._difference(next(iter(records.values())), records)
        return Verdict()

    def _collective_of(self, ranks: Iterable[int], record: Record, number: int) -> dict[int, Record]:
        """Return each rank's collective `number` in the group of `record`, for ranks where it is known."""
        records = {}
        for rank in ranks:
            each = self._ranks[rank]
            own = (each.own(record) if number == record.number else None) or each.completed(record, number)
            if own is not None:
                records[rank] = own
        known = {rank: own for rank, own in records.items() if own.name != SMALL}
        return known if any(own.name.removesuffix(START) in MAY_BE_SMALL for own in known.values()) else records

    def _wrong_sizes(self, record: Record, records: Mapping[int, Record]) -> Verdict:
        """Compare the sizes that each rank sends to each other rank with the sizes that the other rank expects."""
        members = self._groups[record.group]
        sizes = [records[rank].sizes for rank in members]
        places = [records[rank].where for rank in members]
        ranks, words = ([], "") if None in sizes else unequal(sizes, members, places)
        return Verdict(ranks, [f"the ranks differ in {_title(record)}: {words}"] if ranks else [])

    def _waiting_for_each_other(self, waiting: list[Reported]) -> Verdict:
        ended: set[int] = set()  # ranks from which no path leads into a circle
        for start in waiting:
            path: dict[int, None] = {}
            rank: int | None = start.rank
            while rank is not None and rank not in ended:
                if rank in path:
                    circle = list(path)[list(path).index(rank) :]
                    found = self._smaller_side(circle) or self._circle(circle)
                    found.lines += self._made_differently(circle)
                    return found
                path[rank] = None
                rank = self._following(rank)
            ended.update(path)
        return Verdict()

    def _smaller_side(self, circle: list[int]) -> Verdict | None:
        """Return a verdict on the smaller side if many ranks are in one collective and few are in another."""
        if len(circle) != 2:
            return None
        records = [self._edge(*circle), self._edge(*reversed(circle))]
        both = [self._in[key_of_operation(record)] for record in records]
        (few, theirs), (many, record) = sorted(zip(both, records), key=lambda side: len(side[0]))
        if len(few) == len(many) or record.is_a_message or theirs.is_a_message:
            return None
        ranks = [each.rank for each in few]
        own, seconds = next(each for each in few[0].waits if each.record.number == theirs.number)
        activity = f"{by_number(few, 'it', 'they')} {wait_in_words(own, seconds, by_number(few, 'is', 'are'))}"
        line = f"{ranks_in_words(ranks)} never reached {record}: {activity}; {self._who_waits(many, record)}"
        return Verdict(ranks, [line])

    def _ahead(self, waiting: list[Reported]) -> Verdict:
        """Find ranks in a later operation than others of their group: they caught an error, or finished early."""
        latest: dict[str, int] = {}
        for group, number in self._own:
            latest[group] = max(number, latest.get(group, 0))
        for record in _collectives(waiting):
            if latest[record.group] > record.number:
                ahead = [other for other in self._ranks if other.is_beyond(record)]
                own, seconds = next(own for own in ahead[0].waits if own.record.group == record.group)
                ranks, still = [other.rank for other in ahead], [other for other in waiting if other.is_in(record)]
                activity = wait_in_words(own, seconds, by_number(ahead, "is", "are"))
                words = f"{ranks_in_words(ranks)} {by_number(ahead, 'has', 'have')} left {record}, and {activity}"
                return Verdict(ranks, [f"{words}; {self._who_waits(still, record)} (was an error caught?)"])
        return Verdict()

    def _making_no_progress(self, waiting: list[Reported]) -> Verdict:
        """Find ranks that compute with an asynchronous operation in flight: MPI progresses only inside its calls."""
        found = Verdict()
        begun: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for other in self._ranks:
            if other.report is not None and not other.waits and "held" not in other.report:
                for key in {key_of_operation(record_from(each)) for each in other.report["operations"]}:
                    begun[key].append(other.rank)
        for each in waiting if begun else ():
            for record, _ in each.waits:
                for rank in begun.get(key_of_operation(record), ()):
                    found.culprits.append(rank)
                    what, why = "and does not wait for it", "but MPI makes progress only in its calls"
                    if not record.async_op:
                        what = f"asynchronously, and {ranks_in_words([each.rank])} calls it as a blocking operation"
                        why = "which MPI does not match"
                    found.lines.append(
                        f"rank {rank} has begun {record} {what}, {why}: "
                        f"{self.activity(rank)}; {self._who_waits([each], record)}"
                    )
            if found.culprits:
                break
        found.lines = _abridged(found.lines)
        return found

    def _other_tags(self) -> Iterator[str]:
        """Yield a line for each receive whose possible senders have sent messages only under other tags."""
        sent: dict[tuple[str, int], dict[int, list[str]]] = {}  # tags, by group, receiver and sender
        receives = [
            (each, record, tag_in_words(record.name, record.tag))
            for each in self._ranks
            for record, _ in each.waits
            if record.name.startswith("recv") and record.tag is not None
        ]
        for group in {record.group for _, record, _ in receives}:
            members = self._groups.get(group, ())
            for sender in members:
                for receiver, tags in self._ranks[sender].tags_sent(group).items():
                    if 0 <= receiver < len(members):
                        sent.setdefault((group, members[receiver]), {})[sender] = tags
        for each, record, tag in receives:
            came = sent.get((record.group, each.rank), {})
            if record.peer is not None:
                senders = self._groups.get(record.group, ())[record.peer : record.peer + 1]
                came = {rank: came[rank] for rank in senders if rank in came}
            if came and not any(tag in tags for tags in came.values()):
                said = (
                    f"the last from rank {rank} to it {by_number(tags, 'has tag', 'have tags')} {', '.join(tags)}"
                    for rank, tags in came.items()
                )
                yield f"rank {each.rank} waits for a message with tag {tag}; {'; '.join(said)}"

    def _made_differently(self, circle: list[int]) -> Iterator[str]:
        """Yield a line for each group that the circle's ranks made at different lines of the program."""
        waits = [wait for rank in circle for wait in self._waits_for(self._ranks[rank])]
        groups = {record.group: record for record, awaited in waits if awaited.ranks}
        for record in groups.values() if len(groups) > 1 else ():
            reports = {rank: self._ranks[rank].group(record) for rank in circle}
            known = ((rank, (said["name"], said["made_at"])) for rank, said in reports.items() if "made_at" in said)
            if len(made := ranks_by_value(known)) > 1:
                words = [f"{name!r} on {ranks_in_words(on)}, made at {place}" for (name, place), on in made.items()]
                yield f"one group is {'; '.join(words)}: do all ranks make their groups in the same order?"

    def _circle(self, circle: list[int]) -> Verdict:
        found = Verdict(sorted(circle), [f"{ranks_in_words(circle)} wait for each other:"])
        lines = []
        for rank, following in zip(circle, [*circle[1:], circle[0]]):
            record = self._edge(rank, following)
            seconds = next(seconds for own, seconds in self._ranks[rank].waits if own is record)
            lines.append(f"  rank {rank} {wait_in_words(record, seconds)}, and waits for rank {following}")
        found.lines += _abridged(lines)
        return found

    def _standing(self) -> Verdict:
        """Return a standstill if every rank has been in one call of C, as in a library that calls MPI itself."""
        places = {
            each.rank: each.report["program"] for each in self._ranks if each.report and each.report.get("stands")
        }
        others = [each for each in self._ranks if each.rank not in places]
        if not places or any(each.report and not each.report.get("left") for each in others) or any(self._tasks()):
            return Verdict()  # some rank may continue, or is in a task that may take long
        if others and len(places) == 1 and all(each.report for each in others):
            return Verdict()  # ranks at their end wait for one rank, which may be computing
        seconds = min(each.report["stands"] for each in self._ranks if each.report and each.rank in places)
        if seconds < LEAST:
            return Verdict()
        sides = sorted(ranks_by_value(places.items()).values(), key=len)
        found = Verdict([each.rank for each in others] or (minority(sides) if len(sides) > 1 else []))
        found.standstill = seconds
        found.lines = [f"every rank has been in one call of C for {duration(seconds)}, none of them in one of MPI's:"]
        for ranks in sides:
            found.lines.append(f"{ranks_in_words(ranks)} {by_number(ranks, 'is', 'are')} at {places[ranks[0]]}")
        for activity, ranks in ranks_by_value((each.rank, self.activity(each.rank)) for each in others).items():
            found.lines.append(f"{ranks_in_words(ranks)}: {activity.replace(' without that', '')}")
        threads = [each.rank for each in self._ranks if each.report and each.report.get("has_threads")]
        if threads:
            found.has_threads = True
            verb = by_number(threads, "has", "have")
            found.lines.append(f"{ranks_in_words(threads)} {verb} further threads, which may go on")
        return found

    def _not_at_the_end(self) -> Verdict:
        """Find the ranks that others wait for at the end of their programs."""
        at_the_end = [each.rank for each in self._ranks if each.report and each.report.get("left")]
        others = [each for each in self._ranks if each.rank not in at_the_end and not self._is_spare(each.rank)]
        if not at_the_end or any(each.report and each.report.get("ended") for each in others):
            return Verdict()
        found = Verdict([each.rank for each in others])
        for activity, ranks in ranks_by_value((each.rank, self.activity(each.rank)) for each in others).items():
            waits = f"{ranks_in_words(at_the_end)} {by_number(at_the_end, 'waits', 'wait')} at the end of the program"
            found.lines.append(f"{waits} for {ranks_in_words(ranks)}: {activity}")
        return found

    def all_wait(self) -> float:
        """Return the seconds for which every rank that has not ended has waited in a call; 0 if one may continue."""
        waited = []
        for each in self._ranks:
            if (each.report is None and self._has_ended(each.rank)) or (each.report and each.report.get("left")):
                continue
            if not each.waits or each.report is None or each.report.get("tasks") or each.report.get("has_threads"):
                return 0.0
            waited.append(max(wait.seconds for wait in each.waits))
        return min(waited, default=0.0)

    def _has_ended(self, rank: int) -> bool:
        return bool(self._states.get(rank, set()) & {"dead", "ended"})

    # -- words -----------------------------------------------------------------------------------------------

    def activity(self, rank: int, in_short: bool = False) -> str:
        """Describe the state of a rank that waits for no rank; without its last collectives if `in_short`."""
        meanings = {
            "dead": "its process is gone",
            "stopped": "its process is stopped (SIGSTOP, or a debugger)",
            "ended": "it has come to the end of its program without that",
        }
        states = self._states.get(rank, ())
        for state in meanings.keys() & states:
            return meanings[state]
        report = self._ranks[rank].report
        if report is None and "running" in states:
            return "its process runs, and does not answer (is it in a call of C that keeps Python's other threads out?)"
        if report is None:
            return "it does not answer (has it called init_process_group? is its node there?)"
        last = "" if in_short else last_collectives(report)
        if report.get("left"):
            why = f" ({report['reason']})" if ": " in report["reason"] else ""
            return f"it has come to the end of its program{why} without that{last}"
        if report.get("ended"):
            return f"it has ended {report['ended']}{last}"
        if tasks := tasks_in_words(report):
            return f"it is in {tasks}{last}"
        if "held" in report:
            why = f"Python has not run there for {duration(report['held'])}: the GIL is held in {report['program']}"
            return f"{why}{last}"
        return f"it is in the program at {report['program']}{last}"

    def _tasks(self, without: Collection[int] = ()) -> Iterator[str]:
        """Yield a line for each rank that is in a task of an executor."""
        for each in self._ranks:
            if (tasks := tasks_in_words(each.report)) and each.rank not in without:
                yield f"rank {each.rank} is in {tasks}"

    def _is_spare(self, rank: int) -> bool:
        return bool((self._ranks[rank].report or {}).get("spare"))

    def _who_waits(self, others: list[Reported], record: Record) -> str:
        if record in others[0].polls:
            asks = f"{by_number(others, 'asks', 'ask')} for it again and again"
            return f"{ranks_in_words(each.rank for each in others)} {asks} at {record.where}"
        waits = [wait for each in others for wait in each.waits if wait.record.number == record.number]
        places = places_in_words(wait.record.where for wait in waits)
        seconds = max((wait.seconds for wait in waits), default=0.0)
        verb = by_number(others, "waits", "wait")
        return f"{ranks_in_words(each.rank for each in others)} {verb} at {places}, for {duration(seconds)}"


def _longest_of(waiting: list[Reported]) -> list[Reported]:
    """Return the ranks with the longest waits in operations; if there are none, the ranks that wait for tasks."""
    waits = [(each, wait) for each in waiting for wait in each.waits]
    waits = [(each, wait) for each, wait in waits if not wait.record.is_awaited] or waits
    longest = max(wait.seconds for _, wait in waits)
    ranks = {each.rank for each, wait in waits if wait.seconds >= longest / 2}
    return [each for each in waiting if each.rank in ranks]


def _collectives(waiting: list[Reported]) -> list[Record]:
    """Return one record of each collective that ranks wait in."""
    found: dict[tuple[str, int], Record] = {}
    for each in waiting:
        for key, record in each.collectives.items():
            found.setdefault(key, record)
    return list(found.values())


def _abridged(lines: Iterable[str]) -> list[str]:
    """Return the first `MOST` lines, and the number of other lines."""
    found = list(lines)
    more = len(found) - MOST
    return (
        found if more <= 0 else [*found[:MOST], f"and {more} more {by_number(found[MOST:], 'line', 'lines')} like this"]
    )


def _title(record: Record) -> str:
    return f"operation #{record.number} of {record.group_name!r}"
