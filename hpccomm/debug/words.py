"""Text functions that reports, recordings and the mismatch check share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from ..process.together import ranks_by_value as ranks_by_value
from ..process.together import ranks_in_words as ranks_in_words

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
LARGEST_JOB = 1 << 22  # the most ranks that a file may name


def tag_in_words(name: str, tag: int) -> str:
    """Return the tag of a message of the operation `name`; messages of objects have tags of their own."""
    return f"{tag} of objects" if name.endswith("_object_list") else f"{tag}"


def as_ranges(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks, in their order, as arguments of ranges: ``[[0, 10000, 1]]`` for 10,000 consecutive ranks."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank:
            found[-1][1] += found[-1][2]
        elif found and found[-1][1] == found[-1][0] + 1 and found[-1][2] == 1 and rank != found[-1][0]:
            step = rank - found[-1][0]
            found[-1][1:] = [rank + step, step]
        else:
            found.append([rank, rank + 1, 1])
    return found


def from_ranges(ranges: Iterable[Sequence[int]], most: int) -> list[int]:
    """Return the ranks that `as_ranges` has encoded; raise ValueError if there are more than `most`."""
    found = [range(*each) for each in ranges]
    if sum(map(len, found)) > most:
        raise ValueError(f"a report names more than {most} ranks")
    return [rank for each in found for rank in each]


def places_in_words(places: Iterable[str]) -> str:
    """Return ``train.py:88 and train.py:91``."""
    return " and ".join(sorted({place for place in places if place})) or "an unknown line"


def duration(seconds: float) -> str:
    """Return ``62 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size_in_words(nbytes: float) -> str:
    """Return ``4 MiB`` for 4194304."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {UNITS[unit]}"


def by_number(several: Sized, one: str, more: str) -> str:
    """Return the singular or the plural of a word for this number of things."""
    return one if len(several) == 1 else more


def printable(text: str) -> str:
    """Return text from files without control characters that a terminal would obey."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
