"""A cache of 16 entries for each group and kind, for repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

MOST = 16  # of a group, of one kind: the last ones
_of_groups: WeakKeyDictionary[Any, dict[str, dict[Hashable, Any]]] = WeakKeyDictionary()


def cached(group: Any, kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """Return what ``make()`` returns, or has returned for this key.

    Where every rank of the group asks for this kind with the same keys in the same order, `make` is called on all of
    them or on none.
    """
    found = _of_groups.setdefault(group, {}).setdefault(kind, {})
    if key not in found:
        made = make()
        if len(found) == MOST:
            del found[next(iter(found))]
        found[key] = made
    return found[key]  # type: ignore[no-any-return]
