"""The view of a running job for ``hpccomm top``: a table of its ranks, and one of its groups.

It is made of two reports of each rank and knows no terminal, so tests make one of 10,000 ranks.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .culprits import LEAST, MOST, Search, Verdict
from .words import by_number, duration, printable, ranks_by_value, ranks_in_words, size_in_words

LONG = 5.0  # seconds of a wait from which on there is a verdict
MOST_RANKS = 50  # in JSON: with more, ranks that do the same are one entry
MOST_GROUPS = 5
SHARE_OF_VERDICT = 4  # the verdict has at most a quarter of the lines
HEAD = ("RANKS", "FOR", "OPS/S", "BYTES/S", "MEMORY", "WAITS FOR", "DOES")
WIDTHS = (12, 7, 6, 11, 9, 10)  # of all columns but the last
HEAD_OF_GROUPS = f"{'GROUP':22} {'RANKS':>7} {'LAST':>9} {'COLLECTIVES/S':>14} {'MESSAGES/S':>11}"
COUNTS = ("collectives", "messages")


@dataclass
class Row:
    """Ranks that do the same: a line of the table."""

    ranks: list[int]
    does: str
    seconds: float | None  # the longest of them; None if it is not known
    waits_for: list[int]
    operations_per_second: float | None  # mean of the ranks
    bytes_per_second: float | None  # sum of the ranks
    memory: int  # bytes of the largest rank; 0 if it is not known
    is_to_blame: bool


@dataclass
class Group:
    """A group of the job: a line of the second table."""

    name: str
    ranks: int
    last: int  # the number of its last collective
    collectives_per_second: float | None
    messages_per_second: float | None  # of all ranks


class View:
    """The state of a job, from one report of each rank, and the rates since the `before` view."""

    def __init__(self, reports: Sequence[Mapping[str, Any]], before: View | None = None) -> None:
        self.size = int(reports[-1]["size"])
        self.reports = {int(each["rank"]): each for each in reports}
        self.time = max(each["time"] for each in reports)
        self._before = {} if before is None else before.reports
        self._search = Search.of(reports, self.size)
        self._waits = {rank: self._search.longest_wait_of(rank) for rank in range(self.size)}
        self._does = {rank: self._in_words(rank) for rank in range(self.size)}
        seconds = (wait.seconds if wait else self._stands(rank) for rank, wait in self._waits.items())
        self.verdict = self._search.decide() if max(seconds) >= LONG else Verdict()
        self._culprits = set(self.verdict.culprits)

    def _in_words(self, rank: int) -> str:
        if (wait := self._waits[rank]) is not None:
            return f"{wait.record.where} {replace(wait.record, dtype='')}".strip()  # without its size
        if self.reports.get(rank, {}).get("spare"):
            return "waits as a spare"
        words = self._search.activity(rank, in_short=True).replace(" without that", "")
        return re.sub(r"^it is (in the program at )?", "", words)

    def _stands(self, rank: int) -> float:
        """Return the seconds that a rank has been in one call of C."""
        return float(self.reports.get(rank, {}).get("stands", 0.0))

    # -- rates -----------------------------------------------------------------------------------------------

    def _since(self, rank: int) -> tuple[Mapping[str, Any], Mapping[str, Any], float] | None:
        """Return a rank's report, its earlier one, and the seconds in between; None without two reports."""
        now, before = self.reports.get(rank), self._before.get(rank)
        seconds = now["time"] - before["time"] if now and before else 0.0
        return (now, before, seconds) if now and before and seconds > 0 else None

    def _operations(self, rank: int, count: str, group: str | None = None) -> float | None:
        """Return a rank's operations per second in a group, or in all groups; `count` is one of COUNTS."""
        if (since := self._since(rank)) is None:
            return None
        now, before = (report["groups"] for report in since[:2])
        counts = (now[key][count] - before.get(key, {}).get(count, 0) for key in (now if group is None else [group]))
        return float(sum(counts) / since[2])

    def _bytes(self, rank: int) -> float | None:
        if (since := self._since(rank)) is None:
            return None
        now, before = (each.get("bytes") for each in since[:2])
        return None if now is None or before is None else float(max(0, now - before) / since[2])

    # -- rows ------------------------------------------------------------------------------------------------

    def rows(self, most: int) -> list[Row]:
        """Return a row for each rank, if there are at most `most`, or for ranks that do the same.

        If those are too many, operations with other numbers count as the same.
        """
        classes: list[list[int]] = []
        for kind in (int, self._activity, lambda rank: re.sub(r" #\d+", "", self._activity(rank)[0])):
            classes = list(ranks_by_value((rank, kind(rank)) for rank in range(self.size)).values())
            if len(classes) <= most:
                return [self._row(ranks) for ranks in classes]
        classes.sort(key=lambda ranks: (ranks[0] not in self._culprits, -len(ranks)))
        return [self._row(ranks) for ranks in classes]

    def _activity(self, rank: int) -> tuple[str, Any, bool]:
        """Return a value that is equal for ranks that do the same, and wait for the same ranks."""
        wait = self._waits[rank]
        return self._does[rank], wait and (wait.record.group, wait.record.peer), rank in self._culprits

    def _row(self, ranks: list[int]) -> Row:
        waits = [wait for rank in ranks if (wait := self._waits[rank]) is not None]
        records = {self._activity(rank): wait.record for rank in ranks if (wait := self._waits[rank]) is not None}
        awaited = map(self._search.awaited_in, list(records.values())[:MOST])  # each needs a look at all ranks
        own = set(ranks) if len(ranks) == 1 else set()
        stands = max(map(self._stands, ranks))
        collectives, messages = (_known(self._operations(rank, count) for rank in ranks) for count in COUNTS)
        rates = _known(map(self._bytes, ranks))
        return Row(
            ranks,
            self._does[ranks[0]],
            max((wait.seconds for wait in waits), default=stands if stands >= LEAST else None),
            sorted({rank for each in awaited for rank in each} - own),
            (sum(collectives) + sum(messages)) / len(collectives) if collectives else None,
            sum(rates) if rates else None,
            max(self.reports.get(rank, {}).get("memory", 0) for rank in ranks),
            bool(self._culprits.intersection(ranks)),
        )

    def groups(self) -> list[Group]:
        """Return the groups, those of most operations first."""
        members: dict[str, list[int]] = {}
        for rank, report in self.reports.items():
            for key in report["groups"]:
                members.setdefault(key, []).append(rank)
        found = []
        for key, ranks in members.items():
            known = [self.reports[rank]["groups"][key] for rank in ranks]
            collectives, messages = (_known(self._operations(rank, count, key) for rank in ranks) for count in COUNTS)
            last, most = max(each["collectives"] for each in known), max(collectives, default=None)
            found.append(Group(known[0]["name"], len(ranks), last, most, sum(messages) if messages else None))
        return sorted(found, key=lambda each: (-(each.collectives_per_second or 0.0), -each.last))

    # -- output ----------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON; ranks that do the same are together."""
        return {
            "time": self.time,
            "size": self.size,
            "reports": len(self.reports),
            "culprits": self.verdict.culprits,
            "lines": self.verdict.lines,
            "ranks": [asdict(row) for row in self.rows(MOST_RANKS)],
            "groups": [asdict(group) for group in self.groups()],
        }

    def lines(self, columns: int, lines: int) -> list[str]:
        """Return the lines of a screen of this size."""
        hosts = {each["host"] for each in self.reports.values()}
        head = f"{len(self.reports)} of {self.size} ranks on {len(hosts)} {by_number(hosts, 'node', 'nodes')}"
        found = [f"{head}, {time.strftime('%H:%M:%S', time.localtime(self.time))}"]
        wrapped = [part for line in self.verdict.lines for part in textwrap.wrap(line, columns)]
        found += wrapped[: max(1, lines // SHARE_OF_VERDICT)]
        groups = self.groups()
        last = ["", HEAD_OF_GROUPS, *map(_group_in_words, groups[:MOST_GROUPS])]
        last += [f"and {len(groups) - MOST_GROUPS} more groups"] if len(groups) > MOST_GROUPS else []
        room = max(2, lines - len(found) - len(last) - 2)
        rows = self.rows(room)
        found += ["", _columns(*HEAD)]
        if len(rows) > room:
            rest = [rank for row in rows[room - 1 :] for rank in row.ranks]
            rows, last = rows[: room - 1], [f"and {len(rest)} more ranks in {len(rows) - room + 1} other lines", *last]
        return [printable(line)[:columns] for line in (*found, *map(_row_in_words, rows), *last)][:lines]


def _known(rates: Iterable[float | None]) -> list[float]:
    return [each for each in rates if each is not None]


def _row_in_words(row: Row) -> str:
    return _columns(
        f"{'*' * row.is_to_blame}{_numbers(row.ranks)}",
        "" if row.seconds is None else duration(row.seconds),
        _rate(row.operations_per_second),
        "-" if row.bytes_per_second is None else f"{size_in_words(row.bytes_per_second)}/s",
        size_in_words(row.memory) if row.memory else "-",
        _numbers(row.waits_for) if row.waits_for else "",
        row.does,
    )


def _group_in_words(group: Group) -> str:
    rates = f"{_rate(group.collectives_per_second):>14} {_rate(group.messages_per_second):>11}"
    return f"{group.name[:22]:22} {group.ranks:>7} {f'#{group.last}':>9} {rates}"


def _columns(*texts: str) -> str:
    ranks, *numbers, awaited, does = (text[:width] for text, width in zip(texts, (*WIDTHS, None)))
    right = " ".join(f"{text:>{width}}" for text, width in zip(numbers, WIDTHS[1:]))
    return f"{ranks:{WIDTHS[0]}} {right}  {awaited:{WIDTHS[-1]}} {does}"


def _numbers(ranks: Sequence[int]) -> str:
    return ranks_in_words(ranks).partition(" ")[2]


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
