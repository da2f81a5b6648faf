"""The interface to the threads that answer while a call of C holds the GIL (`native/gil_held.h`).

Python's threads do not run then, and neither does the watchdog. Without the compiled extension there are no such
threads, and other ranks get no answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..native import gil_held
from .groups_seen import groups, key_of

VERSION = 2  # of reports
SUFFIX = ".held"  # suffix of a report by such a thread


def answer_in(places: Sequence[Path]) -> None:
    """Make the threads answer in these two folders from now on."""
    if gil_held is not None:
        first, second = (os.path.abspath(place) for place in places)
        gil_held.answer_in(first, second)


def know(token: str) -> None:
    """Make the threads ignore a question that has been answered."""
    if gil_held is not None:
        gil_held.know(token)


def clock() -> float:
    """Return time.monotonic() without the time in which this process was stopped, as by ``scontrol suspend``."""
    return time.monotonic() - (0.0 if gil_held is None else gil_held.stopped())


def identify_groups() -> None:
    """Give the threads the keys of this process's groups."""
    if gil_held is not None:
        for group in groups():
            group.dispatcher.notes.identify(key_of(group))


def report(text: str) -> dict[str, Any]:
    """Convert a report by one of the threads to the form of `report.Reporter`."""
    head, _, stacks = text.partition("stacks\n")
    facts: dict[str, list[str]] = {}
    for line in head.splitlines():
        name, _, value = line.partition(" ")
        facts.setdefault(name, []).append(value)
    rank, _, size = facts["rank"][0].partition(" of ")
    operations, known = [], {}
    for line in facts.get("operation", ()):
        seconds, number, name, key, group_name = line.split(" ", 4)
        operations.append(
            {"name": name, "number": int(number), "group": key, "group_name": group_name, "seconds": float(seconds)}
            | {"waits": False, "where": facts["place"][0].partition(" in ")[0]}
        )
    for line in facts.get("group", ()):
        collectives, messages, key, group_name = line.split(" ", 3)
        known[key] = {"name": group_name, "collectives": int(collectives), "messages": int(messages)}
    return {
        "version": VERSION,
        "rank": int(rank),
        "size": int(size),
        "host": facts["host"][0],
        "pid": int(facts["pid"][0]),
        "time": float(facts["time"][0]),
        "reason": "asked",
        "answers": facts["answers"][0],
        "program": facts["place"][0],
        "held": float(facts["seconds"][0]),
        "stands": 0.0,
        "left": False,
        "spare": False,
        "ended": "",
        "tasks": [],
        "neighbours": {},
        "operations": operations,
        "groups": known,
        "threads": {"all, while the GIL is held": stacks.splitlines()},
    }
