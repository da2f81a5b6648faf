"""The observers of this process's groups, and the sources of what the core asks for: debug and store register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .group import ProcessGroup

_coming: list[Callable[[], None]] = []
_made: list[Callable[[ProcessGroup], None]] = []
_gone: list[Callable[[ProcessGroup], None]] = []
_sources: dict[str, Callable[..., Any]] = {}


def on_new_group(
    coming: Callable[[], None], made: Callable[[ProcessGroup], None], gone: Callable[[ProcessGroup], None]
) -> None:
    """Call ``made(group)`` on every rank of each new group, and ``gone(group)`` at its end, when its ranks have met.

    ``coming()`` is called before the ranks of a communicator meet to make one: some may never come.
    """
    _coming.append(coming)
    _made.append(made)
    _gone.append(gone)


def group_coming() -> None:
    """Announce that this rank is about to meet others on a communicator, to make a group of them."""
    for coming in _coming:
        coming()


def new_group(group: ProcessGroup) -> None:
    """Announce a new group, on every rank of it."""
    for made in _made:
        made(group)


def group_gone(group: ProcessGroup) -> None:
    """Announce that the ranks of a group have met to destroy it; its communicator is still there."""
    for gone in _gone:
        gone(group)


def answer_with(who_is_late: Callable[[], str], place: Callable[..., Any]) -> None:
    """Take `who_is_late` for the verdict on a wait that has timed out, and `place` for the place of a group's store."""
    _sources.update(who_is_late=who_is_late, place=place)


def who_is_late() -> str:
    """Return the verdict on the late ranks, as further lines of a message; "" if there is none. It takes seconds."""
    verdict = _sources["who_is_late"]() if _sources else ""
    return f"\n{verdict}" if verdict else ""


def place_of_store(comm: Any, nodes: tuple[int, ...]) -> Any:
    """Return the place of the store of a group on `comm`; every rank of `comm` calls this."""
    return _sources["place"](comm, nodes) if _sources else None
