"""A rank's report: the operations that it waits in, and the operations that it has completed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from ..core.backend import FastPath
from ..core.operation_list import OPERATIONS
from .mpi_calls import spec_of
from .records import Record, key_of_operation
from .words import duration, size_in_words

MANY = 7  # with more entries in "recent" that are not of the fast path, older ones may be missing
RUNS = 3  # runs of equal collectives in a description
# Operations that may take the fast path: only their numbers are known, except for the last ones in the ring buffer.
MAY_BE_SMALL = OPERATIONS.keys() & vars(FastPath).keys()
SMALL = f"one of {', '.join(sorted(name for name in MAY_BE_SMALL if not OPERATIONS[name].is_a_message))}"


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Switch garbage collection off: walking over thousands of reports takes longer than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Wait(NamedTuple):
    """An operation that a rank waits in."""

    record: Record
    seconds: float  # since it began


@dataclass
class Reported:
    """The report of one rank."""

    rank: int
    report: Mapping[str, Any] | None
    waits: list[Wait]
    _past: dict[str, dict[int, list[Any]]] = field(default_factory=dict)

    @cached_property
    def polls(self) -> list[Record]:
        """The receives that the program polls, without a call that waits."""
        entries = () if self.report is None or self.waits else self.report["operations"]
        return [record_from(each) for each in entries if each.get("polls")]

    @cached_property
    def keys(self) -> set[tuple[str, int, str]]:
        """The operations that it waits in, or may wait in while the GIL is held."""
        maybe = (self.report or {}).get("operations", ()) if "held" in (self.report or {}) else ()
        return {key_of_operation(each) for each in (*(own for own, _ in self.waits), *map(record_from, maybe))}

    def is_in(self, record: Record) -> bool:
        """Return whether it waits, or may wait, in the same operation."""
        return key_of_operation(record) in self.keys

    @cached_property
    def collectives(self) -> dict[tuple[str, int], Record]:
        """The collectives that it waits in, by group and number."""
        found: dict[tuple[str, int], Record] = {}
        for own, _ in self.waits:
            if not own.is_a_message:
                found.setdefault((own.group, own.number), own)
        return found

    def is_beyond(self, record: Record) -> bool:
        """Return whether it waits in a later collective of the same group."""
        later = (own for own, _ in self.waits if not own.is_a_message and own.group == record.group)
        return not record.is_a_message and any(own.number > record.number for own in later)

    def own(self, record: Record) -> Record | None:
        """Return the collective with `record`'s group and number that this rank waits in, or None."""
        return self.collectives.get((record.group, record.number))

    def history(self, record: Record) -> str:
        """Return text that is equal on ranks with equal collectives in the group of `record`, up to `record`."""
        group, own = self.group(record), self.own(record)
        known: list[Any] = [group.get("since"), group.get("collectives")]
        if own is not None:
            count = own.count if _has_equal_counts(own.name) else own.count >= 0
            known += [own.name, own.dtype, count, own.op, own.peer, own.details, own.async_op, own.state]
        for number, name, dtype, _, *details in group.get("recent", ()):
            known += [number, name, dtype, details if _has_equal_counts(name) else details[1:], len(details)]
        return repr(known)

    def completed(self, record: Record, number: int) -> Record | None:
        """Return the completed collective `number` in the group of `record`; None if it is not known."""
        group = self.group(record)
        if "recent" not in group or not group.get("since", 0) <= number <= group["collectives"]:
            return None
        if record.group not in self._past:
            self._past[record.group] = {each[0]: each for each in group["recent"] if _is_operation(each[1])}
        recent = self._past[record.group]
        if number not in recent:
            slow = [each[0] for each in group["recent"] if len(each) == len(_UNKNOWN)]
            if len(slow) > MANY and number < min((each for each in slow if each in recent), default=number + 1):
                return None
        return _passed(record, number, recent.get(number, _UNKNOWN))

    def calls_before(self, record: Record) -> str:
        """Describe this rank's calls between the previous collective and `record` that are not operations."""
        recent = self.group(record).get("recent", ())
        names = [name for number, name, *_ in recent if number == record.number - 1 and not _is_operation(name)]
        return " and ".join(names) or "nothing"

    def tags_sent(self, group: str) -> dict[int, list[str]]:
        """Return the tags of this rank's last messages in a group, by the receiver's group rank."""
        found: dict[int, set[str]] = {}
        for peer, tag in (self.report or {}).get("groups", {}).get(group, {}).get("sent", ()):
            found.setdefault(peer, set()).add(tag)
        return {peer: sorted(tags, key=lambda tag: (len(tag), tag)) for peer, tags in found.items()}

    def group(self, record: Record) -> Mapping[str, Any]:
        """Return the report's entry for the group of `record`."""
        return (self.report or {}).get("groups", {}).get(record.group, {})  # type: ignore[no-any-return]


_UNKNOWN = [0, SMALL, "", 0]


def _passed(record: Record, number: int, entry: Sequence[Any]) -> Record:
    """Return the completed collective that an entry of "recent" describes, in the group of `record`."""
    _, name, dtype, nbytes, *details = entry
    count, op, peer, async_op = details or (-1, "", None, False)
    passed = Record(name, number, record.group, record.group_name, dtype=dtype, count=count, nbytes=nbytes, op=op)
    passed.peer, passed.async_op, passed.state = peer, async_op, "completed"
    return passed


@cache
def _has_equal_counts(name: str) -> bool:
    spec = spec_of(name)
    return spec is not None and spec.has_equal_counts


def _is_operation(name: str) -> bool:
    return spec_of(name) is not None


def waits_in(report: Mapping[str, Any] | None) -> list[Wait]:
    """Return the operations that a report's rank waits in."""
    if report is None or report.get("left"):
        return []
    return [Wait(record_from(each), each["seconds"]) for each in report["operations"] if each["waits"]]


def record_from(entry: Mapping[str, Any]) -> Record:
    """Return the record of an operation in a report."""
    return Record(**{name: entry[name] for name in Record.__dataclass_fields__ if name in entry})


def tasks_in_words(report: Mapping[str, Any] | None) -> str:
    """Describe a rank's tasks, ``task #3 of 'world' (load(3)), pool.py:9, for 12 s``; "" if there are none."""
    tasks = (report or {}).get("tasks", ())
    return " and in ".join(f"{record_from(each)}, {each['where']}, for {duration(each['seconds'])}" for each in tasks)


def wait_in_words(record: Record, seconds: float, verb: str = "is") -> str:
    """Return ``is in all_reduce #41 of 'world', train.py:91, for 12 s``."""
    if record.is_awaited:
        rank = "" if record.peer is None else f" on rank {record.peer} of the group"
        return f"waits for {record}{rank}, {record.where}, for {duration(seconds)}"
    peer, tag = "", ""
    if record.is_a_message:
        peer = " from any rank" if record.peer is None else f" with rank {record.peer} of the group"
        tag = f", tag {record.tag}" if record.tag is not None else ""
    return f"{verb} in {record}{peer}{tag}, {record.where}, for {duration(seconds)}"


def last_collectives(report: Mapping[str, Any]) -> str:
    """Describe a rank's last collectives in its groups."""
    groups = [each for each in report["groups"].values() if each["collectives"]]
    shown = [(_last_in_words(each) or f"#{each['collectives']}", each["name"]) for each in groups[:4]]
    which = "collectives" if any(" " in words for words, _ in shown) else "collective"
    return f" (its last {which}: {'; '.join(f'{words} of {name!r}' for words, name in shown)})" if shown else ""


def _last_in_words(group: Mapping[str, Any]) -> str:
    """Describe the last three runs of equal collectives that a rank has called in a group; "" if they are not known.

    ``#38 broadcast (8 B float64), #39-#41 all_reduce (4 MiB float32)``
    """
    runs: list[tuple[list[int], list[Any]]] = []  # numbers and common fields; the last run comes first
    number = group["collectives"]
    known = {each[0]: each for each in group.get("recent", ()) if _is_operation(each[1])}
    while number in known and len(runs) <= RUNS:
        what = known[number][1:4]
        if runs and runs[-1][1] == what:
            runs[-1][0].append(number)
        else:
            runs.append(([number], what))
        number -= 1
    shown = []
    for numbers, (name, dtype, nbytes) in reversed(runs[:RUNS]):
        first = f"#{numbers[-1]}-" if len(numbers) > 1 else ""
        shown.append(f"{first}#{numbers[0]} {name}" + (f" ({size_in_words(nbytes)} {dtype})" if dtype else ""))
    return ", ".join(shown)
