"""Made-up reports of many ranks that hang, by situation. As a program: what a verdict on them takes.

python -m tests.debug.many_ranks 10000
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpccomm.core.hooks import Operation
from hpccomm.debug import held
from hpccomm.debug.culprits import verdict
from hpccomm.debug.report import read
from hpccomm.debug.sizes import sizes_by_rank
from hpccomm.debug.words import as_ranges

NODE = 128  # ranks
STACK = [f"/home/user/env/lib/python3.11/site-packages/solver/{name}.py:{line} in {name}" for line, name in
         enumerate(("main", "run", "step", "halo", "exchange", "reduce"), 100)]  # fmt: skip

Report = dict[str, Any]
_ranges = functools.cache(as_ranges)  # the same for all members


def waits(name: str, number: int, group: str = "world", **fields: Any) -> Report:
    """Return the operation of a report that its rank waits in."""
    known = {
        "name": name, "number": number, "group": group, "group_name": group, "dtype": "float32", "count": 1 << 20,
        "nbytes": 4 << 20, "op": "SUM", "peer": None, "tag": None, "async_op": False, "begin": 0.0, "end": 0.0,
        "state": "in flight", "where": "train.py:91", "details": "", "sizes": None, "called": "", "seconds": 600.0,
        "waits": True,
    }  # fmt: skip
    return {**known, **fields}


def receives(number: int, source: int | None, tag: int = 0) -> Report:
    """Return a receive that its rank waits in."""
    return waits("recv", number, op="", peer=source, tag=tag)


def report(rank: int, size: int, *operations: Report, groups: dict[str, range] | None = None, **fields: Any) -> Report:
    """Return a report as `Reporter.write` leaves it; `fields` may have the last collective of groups in "reached"."""
    groups = groups or {"world": range(size)}
    reached = {each["group"]: each["number"] for each in operations if each["name"] != "recv"}
    reached.update(fields.pop("reached", {}))
    nbytes = fields.pop("nbytes", 4 << 20)
    first = rank - rank % NODE

    def facts(key: str) -> Report:
        last = reached.get(key, 40)
        recent = [[number, "all_reduce", "float32", nbytes] for number in range(max(1, last - 7), last)]
        known = {"name": key, "ranks": _ranges(groups[key]), "made_at": "train.py:12"}
        return {**known, "collectives": last, "messages": 0, "recent": recent, "sent": []}

    known = {
        "version": held.VERSION, "rank": rank, "size": size, "host": f"node{first}", "pid": 1000 + rank,
        "time": 1.7e9, "reason": "asked", "program": "data.py:7 in load", "stands": 0.0, "left": False, "spare": False,
        "has_threads": False, "ended": "", "operations": list(operations), "tasks": [],
        "groups": {key: facts(key) for key in groups},
        "neighbours": {"running": [[first, min(first + NODE, size), 1]]}, "threads": {"MainThread": STACK},
        "memory": 1 << 30, "bytes": None, "answers": "0 00",
    }  # fmt: skip
    return {**known, **fields}


def one_late_rank(size: int) -> tuple[Iterator[Report], list[int]]:
    """Rank 7 computes; the others are in an all_reduce, in one of five groups."""
    groups = {key: range(size) for key in ("world", "data", "checks", "io", "halo")}
    rest = (report(rank, size, waits("all_reduce", 41), groups=groups) for rank in range(size) if rank != 7)
    return _with(rest, report(7, size, groups=groups)), [7]


def a_lost_message(size: int) -> tuple[Iterator[Report], list[int]]:
    """Rank 7 waits for a message of rank 0; the others are in a barrier."""
    rest = (report(rank, size, waits("barrier", 41)) for rank in range(size) if rank != 7)
    return _with(rest, report(7, size, receives(3, 0))), [0, 7]


def crossed_groups(size: int) -> tuple[Iterator[Report], list[int]]:
    """Half of the ranks are in one group, the others in another one of all ranks."""
    groups = {"a": range(size), "b": range(size)}
    reports = (report(rank, size, waits("barrier", 41, "ab"[rank >= size // 2]), groups=groups) for rank in range(size))
    return reports, [0, size // 2]


def half_is_gone(size: int) -> tuple[Iterator[Report], list[int]]:
    """Every second rank leaves no report: its process has died."""
    seen = {"neighbours": {"dead": [[1, size, 2]]}}
    return (report(rank, size, waits("barrier", 41), **seen) for rank in range(0, size, 2)), list(range(1, size, 2))


def a_ring(size: int) -> tuple[Iterator[Report], list[int]]:
    """Each rank waits for the next one; the numbers of their receives differ."""
    return (report(rank, size, receives(rank, (rank + 1) % size)) for rank in range(size)), list(range(size))


def from_any_rank(size: int) -> tuple[Iterator[Report], list[int]]:
    """Every rank waits for a message of any other, and rank 7 computes."""
    sent = [[0, "9"]]
    rest = (_sent(report(rank, size, receives(rank + 1, None, tag=5)), sent) for rank in range(size) if rank != 7)
    return _with(rest, report(7, size)), [7]


def differing(size: int) -> tuple[Iterator[Report], list[int]]:
    """Rank 7 calls another operation of a group that has the ranks the other way round."""
    groups, name = {"world": range(size)[::-1]}, {True: "broadcast", False: "all_reduce"}
    return (report(rank, size, waits(name[rank == 7], 41), groups=groups) for rank in range(size)), [7]


def differing_sizes(size: int) -> tuple[Iterator[Report], list[int]]:
    """Rank 7 computes, and each rank has had another size in each collective."""
    rest = (
        report(rank, size, waits("gather", 41, count=rank, op=""), nbytes=4 * rank) for rank in range(size) if rank != 7
    )
    return _with(rest, report(7, size)), [7]


def parts_that_do_not_fit(size: int) -> tuple[Iterator[Report], list[int]]:
    """Each rank sends another number of elements to each other; rank 7 expects other numbers."""

    def sizes(rank: int) -> Any:
        counts = [rank * other % 1009 for other in range(size)]
        arguments = {"input_counts": counts, "output_counts": [each + (rank == 7) for each in counts]}
        group: Any = SimpleNamespace(rank=rank, size=size)
        return sizes_by_rank(Operation(group, "all_to_all_single", 41, "cpu", False, arguments))

    calls = (waits("all_to_all_single", 41, op="", sizes=sizes(rank)) for rank in range(size))
    return (report(rank, size, each) for rank, each in enumerate(calls)), [7]


def one_ahead(size: int) -> tuple[Iterator[Report], list[int]]:
    """Rank 7 has left an operation that all others are in."""
    return (report(rank, size, waits("all_reduce", 41 + (rank == 7))) for rank in range(size)), [7]


def not_waited_for(size: int) -> tuple[Iterator[Report], list[int]]:
    """Every second rank has begun an operation, and does not wait for it."""
    reports = (report(rank, size, waits("all_reduce", 41, waits=rank % 2 == 0)) for rank in range(size))
    return reports, list(range(1, size, 2))


def rows(size: int) -> tuple[Iterator[Report], list[int]]:
    """Ranks in a square: each row is in an operation of its own but one, which waits for a late rank of its column."""
    side = int(size**0.5)

    def groups(rank: int) -> dict[str, range]:
        row, column = divmod(rank, side)
        return {f"row {row}": range(row * side, row * side + side), f"column {column}": range(column, side**2, side)}

    def all_of_them() -> Iterator[Report]:
        for rank in range(side**2):
            row, column = divmod(rank, side)
            calls = [waits("barrier", 41, f"column {column}" if row == 1 else f"row {row}")]
            yield report(rank, size, *([] if rank == 0 else calls), groups=groups(rank))

    return all_of_them(), sorted({0, *range(side**2, size)} if side**2 == size else {0})


def _with(reports: Iterator[Report], last: Report) -> Iterator[Report]:
    yield from reports
    yield last


def _sent(made: Report, sent: list[list[int]]) -> Report:
    made["groups"]["world"]["sent"] = sent
    return made


NAMED = (one_late_rank, a_lost_message, crossed_groups)
SITUATIONS: tuple[Callable[[int], tuple[Iterator[Report], list[int]]], ...] = (
    *NAMED, half_is_gone, a_ring, from_any_rank, differing, differing_sizes,
    parts_that_do_not_fit, one_ahead, not_waited_for, rows,
)  # fmt: skip


def write(folder: Path, reports: Iterator[Report]) -> int:
    """Write reports as ranks do, and return their bytes."""
    total = 0
    for each in reports:
        total += (folder / f"rank{each['rank']}.json").write_text(json.dumps(each, separators=(",", ":")))
    return total


def main(arguments: list[str] | None = None) -> None:
    """Print the bytes of the reports, and the seconds of this process to read them and to make the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[100, 1000, 10000])
    for size in parser.parse_args(arguments).ranks:
        for situation in SITUATIONS:
            with tempfile.TemporaryDirectory() as name:
                nbytes = write(Path(name), situation(size)[0])
                began = time.process_time()
                reports = read(Path(name))
                between = time.process_time()
                found = verdict(reports, size)
                ended = time.process_time()
            sys.stdout.write(
                f"{size:7} ranks, {situation.__name__:16} {nbytes / 1e6:8.1f} MB, read {between - began:6.2f} s, "
                f"verdict {ended - between:6.2f} s, {len(found.lines)} lines\n"
            )


if __name__ == "__main__":
    main()
