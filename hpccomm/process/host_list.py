"""Slurm's short forms: a list of hosts, ``node[01-03,7],gpu5``, and one number per host, ``2(x3),1``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MOST = 256 * 1024  # as in Slurm (hostlist.c, MAX_RANGES): a longer list is a mistake


def expand(text: str) -> tuple[str, ...]:
    """Return the hosts of a list in order; ValueError if it is malformed.

    The grammar is that of Slurm's src/common/hostlist.c: commas outside brackets divide the text into parts. A part has
    any number of brackets, with text before, between and after them. A bracket has numbers and ranges; the first
    number of a range sets the width.
    """
    hosts: list[str] = []
    for part in _split(text):
        for host in _expand_part(part):
            hosts.append(host)
            if len(hosts) > MOST:
                raise ValueError(f"{text[:80]!r} stands for more than {MOST} hosts")
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if re.search(r"\[[^\]]*(\[|$)|^[^\[]*\]|\][^\[]*\]", text):
        raise ValueError(f"{text[:80]!r} has a bracket without its other half")
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", text)
    return [part.strip() for part in parts if part.strip()]


def _expand_part(part: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        yield part
        return
    before, after = part[: found.start()], part[found.end() :]
    for number in _numbers(found[1], part):
        for rest in _expand_part(after):
            yield before + number + rest


def _numbers(ranges: str, part: str) -> Iterator[str]:
    for piece in ranges.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part[:80]!r} is no list of hosts: {piece!r} is no range")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield str(number).zfill(len(found[1]))


def fold(hosts: Sequence[str]) -> str:
    """Return the short form of a list of hosts; `expand` undoes it."""
    runs: list[tuple[str, list[list[str]]]] = []  # (text before the number, [[first, last], ...])
    for host in hosts:
        digits = (re.search(r"\d*$", host) or [""])[0]
        before = host[: len(host) - len(digits)]
        if not runs or runs[-1][0] != before or not digits or not runs[-1][1][-1][1]:
            runs.append((before, [[digits, digits]]))
            continue
        ranges = runs[-1][1]
        first, last = ranges[-1]
        if digits == str(int(last) + 1).zfill(len(first)):
            ranges[-1][1] = digits
        else:
            ranges.append([digits, digits])
    return ",".join(_folded(before, ranges) for before, ranges in runs)


def _folded(before: str, ranges: list[list[str]]) -> str:
    numbers = [first if first == last else f"{first}-{last}" for first, last in ranges]
    return before + (numbers[0] if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else f"[{','.join(numbers)}]")


def repeated(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as ``2(x3),1``: 2, 2, 2, 1; ValueError if it is malformed."""
    numbers: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if found is None or len(numbers) + int(found[2] or 1) > MOST:
            raise ValueError(f"{text[:80]!r} is not of the form 2(x3),1")
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)
