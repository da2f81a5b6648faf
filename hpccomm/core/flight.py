"""Flight: what a group knows of one operation in flight. The Work owns its status, and tells the door of its end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from .group import ProcessGroup
    from .work import Work, WorkStatus


class Owner(Protocol):
    """What a Work knows of the door that it has come through."""

    group: ProcessGroup
    in_flight: dict[Work, None]

    def ended(self, work: Work, status: WorkStatus) -> None:
        """Hear that a Work has failed, or that one has ended that hooks follow; the Work calls it, once."""

    def identify(self, error: Exception, operation: str, number: int) -> None:
        """Fill in which operation of the group a transport's error is about."""


class Flight(NamedTuple):
    """Which operation of which group a Work is. `debug/` reads it too, from any thread; it never changes."""

    door: Owner
    op_type: str = ""
    number: int = 0  # among the collectives, or the messages, of the group on this rank
    result: Any = None  # what `Work.result` gives back
    peer: int | None = None  # of a message: the rank of the group at its other end
    patience: float | None = None  # seconds that `wait` waits where it is not told


class Nobody:
    """The door of a Work that no group follows: a part of another one, or one that a program has made."""

    group: Any = None

    def __init__(self) -> None:
        self.in_flight: dict[Work, None] = {}

    def ended(self, work: Work, status: WorkStatus) -> None:
        """Nobody listens."""

    def identify(self, error: Exception, operation: str, number: int) -> None:
        """Leave it to the Work that this one is a part of."""


NOT_FOLLOWED = Flight(Nobody())

# NamedTuple's own constructor is a function in Python, and there is one Flight for every asynchronous operation.
flight_of = partial(tuple.__new__, Flight)
