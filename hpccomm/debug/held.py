"""What the threads know, and write, that speak for this process while a call of C holds the GIL (`native/gil_held.h`).

No thread of Python's runs then, nor the watchdog's. Without the compiled extension there are no such threads, and other
ranks get no answer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..native import gil_held
from .groups_seen import groups, key_of

VERSION = 2  # of reports
SUFFIX = ".held"  # of a report that such a thread has written


def answer_in(places: Sequence[Path]) -> None:
    """Answer in these two folders from now on."""
    if gil_held is not None:
        first, second = (os.path.abspath(place) for place in places)
        gil_held.answer_in(first, second)


def know(token: str) -> None:
    """Tell the threads of a question to which there is an answer."""
    if gil_held is not None:
        gil_held.know(token)


def identify_groups() -> None:
    """Tell the threads the names of the groups among all ranks."""
    if gil_held is not None:
        for group in groups():
            group.dispatcher.notes.identify(key_of(group))


def report(text: str) -> dict[str, Any]:
    """Return what one of the threads has written, as a report like those of `report.Reporter`."""
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
