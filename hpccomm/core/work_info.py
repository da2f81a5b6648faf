"""WorkInfo: a group's record of one operation in flight. The Work owns its status and reports its end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from .options import Membership
    from .work import Work


class Follower(Protocol):
    """The part of its group's dispatcher that a Work uses."""

    group: Membership | None
    in_flight: dict[Work, None]

    def ended(self, work: Work, status: Any) -> None: ...  # noqa: D102
    def identify(self, error: Any, operation: str, number: int) -> None: ...  # noqa: D102


class WorkInfo(NamedTuple):
    """The operation of a Work, and its group. It is immutable; `debug/` reads it too, from any thread."""

    dispatcher: Follower
    op_type: str = ""
    number: int = 0  # among the group's collectives, or among its messages on this rank
    result: Any = None  # the value of `Work.result`
    peer: int | None = None  # of a message: the group rank at the other end
    timeout: float | None = None  # seconds: the default of `Work.wait`
    tag: int | None = None  # of a message


class NullDispatcher:
    """The dispatcher of a Work that no group follows: a part of another Work, or made by the program."""

    group: Any = None

    def __init__(self) -> None:
        self.in_flight: dict[Work, None] = {}

    def ended(self, *_: Any, **__: Any) -> None:
        """Do nothing: the outer Work reports its end."""

    identify = ended


NOT_FOLLOWED = WorkInfo(NullDispatcher())

# Faster than NamedTuple's own constructor, which is a Python function: each asynchronous operation makes a WorkInfo.
work_info = partial(tuple.__new__, WorkInfo)
