"""NonMember: what a rank outside a group holds in the group's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from ..errors import here
from .group import ProcessGroup


class NonMember:
    """What `new_group` returns on a rank outside the group: every operation on it warns once and returns None.

    Examples
    --------
    >>> outside = hc.NonMember()
    >>> hc.get_rank(outside), hc.get_world_size(outside)
    (-1, -1)
    >>> outside == hc.GroupMember.NON_GROUP_MEMBER
    True
    """

    rank = -1
    size = -1

    def __init__(self, ranks: Sequence[int] = (), name: str = "") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self._warned = False

    def __getattr__(self, operation: str) -> Callable[..., None]:
        if operation.startswith("_") or not hasattr(ProcessGroup, operation):
            raise AttributeError(operation)

        def nothing(*_: object, **__: object) -> None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{operation}: this rank is not in {self!r}; nothing is done{here()}", RuntimeWarning, stacklevel=3
                )

        return nothing

    def peer(self, *_: object) -> int:
        """Return a rank that nothing is sent to."""
        return -1

    root = peer

    def destroy(self) -> None:
        """Do nothing: there is nothing to destroy on this rank."""

    def __enter__(self) -> NonMember:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NonMember)  # as c10d: `group == GroupMember.NON_GROUP_MEMBER`

    def __hash__(self) -> int:
        return hash(NonMember)

    def __repr__(self) -> str:
        return f"<NonMember of {self.name!r}>"
