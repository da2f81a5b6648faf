"""Hooks: methods of the program; the dispatcher calls them at the beginning and end of a group's operations."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from .arrays import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .persistent_work import PersistentWork
    from .reduce_op import ReduceOp


@dataclass(eq=False, repr=False)
class Operation:
    """One operation of a group; the argument of hooks.

    Attributes
    ----------
    group : ProcessGroup
    name : str
        ``"all_reduce"``; the start of a persistent operation is ``"all_reduce_start"``.
    sequence_number : int
        Its number among the group's collectives, or among the group's messages on this rank, from 1. A
        collective has the same number on every rank.
    device : str
        The device whose backend does it: ``"cpu"``, ``"cuda"`` ... or ``"objects"``.
    async_op : bool
    arguments : dict
        The arguments of the backend's method, by name: ``{"array": ..., "op": ReduceOp.SUM}``. Ranks are ranks of the
        group. The documentation, "Operations", lists the names.
    error : BaseException or None
        The exception that ended it.
    outcome : object
        In `end`, the result of a blocking operation; for a receive the sender's rank in the group (for Python
        objects: the objects and the rank).
    work : PersistentWork or None
        For the start of a persistent operation, the persistent operation.

    Examples
    --------
    >>> class Watch:
    ...     def begin(self, operation):
    ...         self.seen = operation
    ...     def end(self, operation):
    ...         pass
    >>> watch = Watch()
    >>> with hc.GroupMember.WORLD.register_hook(watch):
    ...     hc.broadcast(np.zeros(3, np.float32), src=0)
    >>> watch.seen.name, watch.seen.nbytes, watch.seen.peer, watch.seen.async_op
    ('broadcast', 12, 0, False)
    """

    group: Any  # a ProcessGroup
    name: str
    sequence_number: int
    device: str
    async_op: bool
    arguments: dict[str, Any]
    hooks: InitVar[Sequence[Hook]] = ()
    work: PersistentWork | None = None
    error: BaseException | None = field(default=None, init=False)
    outcome: Any = field(default=None, init=False)
    began: float = field(default=0.0, init=False)  # a reading of time.perf_counter
    ended: float = field(default=0.0, init=False)

    def __post_init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = list(hooks)

    def begin(self) -> None:
        """Call the hooks' `begin`."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            try:
                hook.begin(self)
            except Exception as error:  # the operation does not begin: the earlier hooks see its end
                self.end(error)
                raise
            self._hooks.append(hook)
        self.began = time.perf_counter()

    def end(self, error: BaseException | None = None) -> None:
        """Call `end` of the same hooks, even of a hook that has been removed meanwhile."""
        self.ended = time.perf_counter()
        self.error = error
        errors = []
        for hook in self._hooks:
            try:
                hook.end(self)
            except Exception as raised:  # the other hooks must see the end
                errors.append(raised)
        if errors:
            raise errors[0]

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the arguments, also those in lists and dicts, but not in Python objects that are sent."""
        arrays: list[Any] = []
        pending = [value for name, value in self.arguments.items() if name not in ("obj", "objects")]
        while pending:
            value = pending.pop(0)
            if isinstance(value, dict):
                pending[:0] = value.values()
            elif isinstance(value, list | tuple):
                pending[:0] = value
            elif hasattr(value, "dtype") and hasattr(value, "size") and not isinstance(value, type):  # float64 has them
                arrays.append(value)
        return arrays

    @property
    def nbytes(self) -> int:
        """The total bytes of all arrays."""
        return sum(count_of(array) * array.dtype.itemsize for array in self.arrays)

    @property
    def op(self) -> ReduceOp | None:
        """The reduction; None if the operation does not reduce."""
        return self.arguments.get("op")

    @property
    def peer(self) -> int | None:
        """The root, destination or source: a rank of the group; None if there is none, or for any source."""
        return next((self.arguments[name] for name in ("root", "dst", "src") if name in self.arguments), None)

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return int(self.group.ranks[self.group.rank])

    @property
    def described(self) -> str:
        """A description of an operation outside groups; "" for an operation of a group."""
        return ""

    @property
    def duration(self) -> float | None:
        """The seconds from its beginning until its end was noticed; None before."""
        return self.ended - self.began if self.began and self.ended else None

    def __repr__(self) -> str:
        return f"<Operation {self.name} #{self.sequence_number} of {self.group.name!r}>"


class Hook(Protocol):
    """The type of hook that `ProcessGroup.register_hook` takes; every operation of the group calls both methods.

    Examples
    --------
    >>> class Count(hc.Hook):
    ...     operations = 0
    ...     def begin(self, operation):
    ...         self.operations += 1
    ...     def end(self, operation):
    ...         pass
    >>> count = Count()
    >>> with hc.GroupMember.WORLD.register_hook(count):
    ...     hc.barrier()
    ...     hc.barrier()
    >>> count.operations
    2
    """

    def begin(self, operation: Operation) -> None:
        """Observe an operation before its transport is called; an exception raised here prevents the operation."""

    def end(self, operation: Operation) -> None:
        """Observe an operation that has ended or failed; an asynchronous one in the thread that notices its end."""


class Timing:
    """A hook that does nothing: with any hook, operations record their beginning and end."""

    def begin(self, operation: Operation) -> None:
        """Do nothing."""

    end = begin


class RemovableHandle:
    """The handle of a registered hook: `remove` or the end of a ``with`` block removes the hook.

    Examples
    --------
    >>> class Say:
    ...     def begin(self, operation):
    ...         print(operation.name)
    ...     def end(self, operation):
    ...         pass
    >>> handle = hc.GroupMember.WORLD.register_hook(Say())
    >>> hc.barrier()
    barrier
    >>> handle.remove()
    >>> hc.barrier()
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.remove()
