"""The table of this process's groups: their keys, their ranks, and hooks on all of them."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, TypeVar

from ..job.failures import ranks_in_the_job

if TYPE_CHECKING:
    from ..core.group import ProcessGroup
    from ..core.hooks import Hook, RemovableHandle
    from ..core.persistent_work import PersistentWork
    from ..core.work import Work

Thing = TypeVar("Thing")


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _Seen:
    def __init__(self, ranks: tuple[int, ...], edition: int) -> None:
        self.ranks = ranks  # the members' ranks in MPI.COMM_WORLD
        self.edition = edition  # counts the groups of these ranks
        self.hooks: dict[object, Hook] = {}  # handles would keep groups alive
        self.code, self.line = _line_outside()

    @cached_property
    def key(self) -> str:
        """Return the group's key, which is the same on every rank."""
        return key_from(self.ranks, self.edition)


def key_from(*facts: object) -> str:
    """Return a short hash of facts that are the same on every rank."""
    from hashlib import blake2b  # not needed when a program starts; the watchdog imports it

    return blake2b(" ".join(map(str, facts)).encode(), digest_size=6).hexdigest()


_seen: dict[weakref.ref[ProcessGroup], _Seen] = {}  # no WeakKeyDictionary: its methods are Python functions
_made: dict[int, int] = {}  # groups of the same ranks, by hash: the tuples themselves may be freed
_everywhere: dict[object, Callable[[ProcessGroup], Hook]] = {}


def add(group: ProcessGroup) -> None:
    """Add a new group to the table; collective."""
    ranks = _process_ranks(group)
    edition = _made[hash(ranks)] = _made.get(hash(ranks), 0) + 1
    _seen[weakref.ref(group, _seen.pop)] = _Seen(ranks, edition)


def _seen_of(group: ProcessGroup) -> _Seen | None:
    return _seen.get(weakref.ref(group))


def _line_outside() -> tuple[CodeType, int]:
    """Return the code and the line number that called hpccomm."""
    frame = sys._getframe(3)  # the caller of `add`
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def made_at(group: ProcessGroup) -> str:
    """Return the line that made a group, ``"train.py:7"``; "" if it is not known."""
    seen = _seen_of(group)
    return "" if seen is None else f"{os.path.basename(seen.code.co_filename)}:{seen.line}"


def groups() -> list[ProcessGroup]:
    """Return the groups of this process; thread-safe."""
    living = [each() for each in _snapshot(_seen)]
    return [group for group in living if group is not None]


def works_in_flight() -> list[Work | PersistentWork]:
    """Return the Works of all groups that have not completed; thread-safe."""
    works: list[Work | PersistentWork] = []
    for group in groups():
        works += [
            *_snapshot(group.dispatcher.in_flight),
            *(each for each in list(group.dispatcher.persistent) if each.is_active),
        ]
        lasts = [getattr(backend, "last_on_gpu", None) for backend in _snapshot(group.dispatcher.backends.values())]
        works += [last for last in lasts if last is not None and last.group is not None]
    return works


def _snapshot(things: Iterable[Thing]) -> list[Thing]:
    while True:
        try:
            return list(things)
        except RuntimeError:  # another thread has changed it
            continue


def key_of(group: ProcessGroup) -> str:
    """Return a key that is the same on every rank of a group; groups of the same members have different keys."""
    seen = _seen_of(group)
    return f"{group.name}:{'-'.join(map(str, group.ranks[:8]))}" if seen is None else seen.key


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group's members in MPI.COMM_WORLD, which identify processes throughout the job."""
    seen = _seen_of(group)
    return group.ranks if seen is None else seen.ranks


def everywhere(hook_of: Callable[[ProcessGroup], Hook]) -> RemovableHandle:
    """Register the hook ``hook_of(group)`` on every group, including groups made later."""
    from ..core.hooks import RemovableHandle

    key = object()
    _everywhere[key] = hook_of

    def remove() -> None:
        del _everywhere[key]
        for group in groups():
            seen = _seen_of(group)
            hook = None if seen is None else seen.hooks.pop(key, None)
            if hook is not None:
                group.dispatcher.remove_hook(hook)

    for group in groups():
        _register(group, key)
    return RemovableHandle(remove)


def register_on(group: ProcessGroup) -> None:
    """Register on a new group the hooks of `everywhere`."""
    for key in _everywhere:
        _register(group, key)


def _register(group: ProcessGroup, key: object) -> None:
    hook = _seen[weakref.ref(group)].hooks[key] = _everywhere[key](group)
    group.register_hook(hook)


def _process_ranks(group: ProcessGroup) -> tuple[int, ...]:
    if group.comm is None:
        return group.ranks
    owner = group.owner
    if owner is not group and (seen := _seen_of(owner)) is not None:
        if group.ranks == owner.ranks:
            return seen.ranks
        return tuple([seen.ranks[owner.group_ranks[rank]] for rank in group.ranks])
    from mpi4py import MPI

    translated = ranks_in_the_job(group.comm)
    return translated if MPI.UNDEFINED not in translated else group.ranks
