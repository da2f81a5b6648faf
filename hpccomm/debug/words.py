"""Words that reports, recordings and the mismatch check share."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from ..process.together import ranks_by_value as ranks_by_value
from ..process.together import ranks_in_words as ranks_in_words

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
    """Return the singular or the plural of a word, for so many things."""
    return one if len(several) == 1 else more
