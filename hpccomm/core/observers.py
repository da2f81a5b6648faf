"""Functions of the layers `debug` and `store` that the core calls; these layers register them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import Membership

_registered: dict[str, Callable[..., Any]] = {}


def register(**functions: Callable[..., Any]) -> None:
    """Register functions that observe groups, or return data to the core.

    ``coming()`` is called before the ranks of a communicator meet to make a group (some may never come),
    ``made(group)`` on every rank of each new group, and ``gone(group, all_come)`` after its ranks have met at its end.
    ``who_is_late()`` returns the verdict on a timed-out wait, and ``place(comm, nodes)`` the place of a group's store.
    """
    _registered.update(functions)


def _call(name: str, *arguments: Any) -> Any:
    return _registered[name](*arguments) if _registered else None


def group_coming() -> None:
    """Announce that this rank is about to meet others on a communicator to make a group."""
    _call("coming")


def new_group(group: Membership) -> None:
    """Announce a new group, on each of its ranks."""
    _call("made", group)


def group_gone(group: Membership, all_come: bool) -> None:
    """Announce that the ranks of a group have met; `all_come` to destroy it. Its communicator still exists."""
    _call("gone", group, all_come)


def who_is_late() -> str:
    """Return the verdict on the late ranks, as further lines of a message; "" without one. It takes seconds."""
    verdict = _call("who_is_late")
    return f"\n{verdict}" if verdict else ""


def place_of_store(comm: Any, nodes: tuple[int, ...]) -> Any:
    """Return the place of the store of a group on `comm`; collective over `comm`."""
    return _call("place", comm, nodes)
