"""A cache of 16 entries for each group and kind, for repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

MOST = 16  # entries per group and kind; a new entry replaces the oldest
_of_groups: WeakKeyDictionary[Any, dict[str, dict[Hashable, Any]]] = WeakKeyDictionary()


def cached(group: Any, kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of ``make()``, cached by `key`.

    If all ranks of the group look up the same keys of a kind in the same order, `make` runs on all of them or on none.
    """
    found = _of_groups.setdefault(group, {}).setdefault(kind, {})
    if key not in found:
        made = make()
        if len(found) == MOST:
            del found[next(iter(found))]
        found[key] = made
    return found[key]  # type: ignore[no-any-return]
