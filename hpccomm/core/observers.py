"""The observers of this process's groups, and the sources of what the core asks for: debug and store register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import Membership

_registered: dict[str, Callable[..., Any]] = {}


def register(**functions: Callable[..., Any]) -> None:
    """Register the functions for what happens to groups, and for what the core asks.

    ``coming()`` is called before the ranks of a communicator meet to make a group: some may never come; ``made(group)``
    on every rank of each new group, and ``gone(group)`` at its end, when its ranks have met. ``who_is_late()`` returns
    the verdict on a wait that has timed out, and ``place(comm, nodes)`` the place of a group's store.
    """
    _registered.update(functions)


def _call(name: str, *arguments: Any) -> Any:
    return _registered[name](*arguments) if _registered else None


def group_coming() -> None:
    """Announce that this rank is about to meet others on a communicator, to make a group of them."""
    _call("coming")


def new_group(group: Membership) -> None:
    """Announce a new group, on every rank of it."""
    _call("made", group)


def group_gone(group: Membership) -> None:
    """Announce that the ranks of a group have met to destroy it; its communicator is still there."""
    _call("gone", group)


def who_is_late() -> str:
    """Return the verdict on the late ranks, as further lines of a message; "" if there is none. It takes seconds."""
    verdict = _call("who_is_late")
    return f"\n{verdict}" if verdict else ""


def place_of_store(comm: Any, nodes: tuple[int, ...]) -> Any:
    """Return the place of the store of a group on `comm`; every rank of `comm` calls this."""
    return _call("place", comm, nodes)
