"""NonMember: a group as seen by a rank outside it.

It is not a subclass of ProcessGroup, so it inherits no operation; its operations come from the list of operations.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeAlias

from ..errors import NonMemberWarning, on_rank
from .group import ProcessGroup
from .members import abridged
from .operation_list import OPERATIONS
from .options import DEFAULT_TIMEOUT
from .persistent_work import PersistentWork
from .registry import BackendConfig
from .renamed import Renamed
from .work import CompletedWork

Group: TypeAlias = "ProcessGroup | NonMember"


class NonMember:
    """The result of `new_group` on a rank outside the group.

    Its operations do nothing: the first one warns, with its name, and each returns None, or with
    ``async_op=True`` a completed Work.

    Attributes
    ----------
    rank, size : int
        -1, as in c10d.
    ranks : tuple of int
        The global ranks of the members; empty if this rank can't know them (after `split_group`).
    name : str
    config : BackendConfig

    Examples
    --------
    >>> outside = hc.NonMember()
    >>> hc.get_rank(outside), hc.get_world_size(outside)
    (-1, -1)
    >>> outside == hc.GroupMember.NON_GROUP_MEMBER
    True
    """

    rank = local_rank = -1
    size = -1
    comm = None
    is_destroyed = False
    sequence_number = message_number = 0
    group_ranks: Mapping[int, int] = MappingProxyType({})  # empty, because this rank can't send to members
    description = ""
    timeout: timedelta = DEFAULT_TIMEOUT
    all_to_all_sparse = Renamed("exchange_sparse")

    def __init__(self, ranks: Sequence[int] = (), name: str = "", config: BackendConfig | None = None) -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.config = config or BackendConfig()
        self._has_warned = False

    def warn(self, operation: str) -> None:
        """Warn, once per group, that `operation` does nothing on this rank."""
        if not self._has_warned:
            self._has_warned = True
            message = f"{operation}: this rank is not in {self!r}; nothing is done{on_rank()}"
            warnings.warn(message, NonMemberWarning, stacklevel=4)

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of a global rank; ValueError if it is not a member."""
        if global_rank not in self.ranks:
            raise ValueError(f"rank {global_rank} is not a member of {self!r} ({abridged(self.ranks)}){on_rank()}")
        return self.ranks.index(global_rank)

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a group rank; ValueError if there is no such rank."""
        if not 0 <= group_rank < len(self.ranks):
            raise ValueError(f"group rank is {group_rank}; {self!r} has {len(self.ranks)} ranks{on_rank()}")
        return self.ranks[group_rank]

    def peer(self, *_: object) -> int:
        """Return any rank: nothing is sent to it."""
        return 0

    root = source = peer

    def destroy(self) -> None:
        """Do nothing: there is nothing to destroy on this rank."""

    def __enter__(self) -> NonMember:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NonMember)  # as in c10d: `group == GroupMember.NON_GROUP_MEMBER`

    def __hash__(self) -> int:
        return hash(NonMember)

    def __repr__(self) -> str:
        return f"<NonMember of {self.name!r}>"


class _MessageOfNobody(CompletedWork):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def source_rank(self) -> int:
        """Return MPI.PROC_NULL."""
        return self._rank


class NothingToStart(PersistentWork):
    """The persistent operation on a rank outside the group, and of a message to or from MPI.PROC_NULL."""

    def start(self) -> None:
        """Do nothing."""

    def free(self) -> None:
        """Do nothing."""


def done_work(name: str, source: int | None = None) -> CompletedWork:
    """Return a completed Work for an operation that does nothing; `source` is its `source_rank()`."""
    work = _MessageOfNobody(source) if source is not None else CompletedWork()
    work.info = work.info._replace(op_type=name)
    work.is_completed()
    return work


def _nothing(name: str) -> Callable[..., Any]:
    """Return NonMember's method for an operation of ProcessGroup."""
    method = getattr(ProcessGroup, name)

    @functools.wraps(method)
    def operation(group: NonMember, *arguments: Any, **options: Any) -> Any:
        group.warn(name)
        if name.endswith("_init"):
            return NothingToStart()
        if name in ("isend", "irecv"):
            return done_work(name[1:])
        is_async = inspect.signature(method).bind(group, *arguments, **options).arguments.get("async_op", False)
        return done_work(name) if is_async else None

    return operation


for _name in (*OPERATIONS, *(f"{name}_init" for name in OPERATIONS), "peer_view", "isend", "irecv", "agree"):
    if hasattr(ProcessGroup, _name):
        setattr(NonMember, _name, _nothing(_name))
