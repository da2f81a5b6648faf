"""Hooks: methods of a program that the dispatcher calls at the beginning and the end of every operation of a group."""

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
    """One operation of a group, as hooks see it.

    Attributes
    ----------
    group : ProcessGroup
    name : str
        ``"all_reduce"``; the start of a persistent operation is ``"all_reduce_start"``.
    sequence_number : int
        Its number among the collectives of its group, or among the messages of its group on this rank, from 1. The
        same number is the same collective on every rank.
    device : str
        The device whose backend does it: ``"cpu"``, ``"cuda"`` ... or ``"objects"``.
    async_op : bool
    arguments : dict
        The arguments of the backend's method, by name: ``{"array": ..., "op": ReduceOp.SUM}``. Ranks in it are ranks of
        the group. The names of each operation are in the documentation, "Operations".
    error : BaseException or None
        The exception that ended it.
    outcome : object
        In `end`, the result of a blocking operation; of a receive that is the sender's rank in the group (for Python
        objects: these, and the rank).
    work : PersistentWork or None
        The persistent operation, of one of its starts.

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
            except Exception as error:  # the operation does not begin: for those who have been told, it has ended
                self.end(error)
                raise
            self._hooks.append(hook)
        self.began = time.perf_counter()

    def end(self, error: BaseException | None = None) -> None:
        """Call the `end` of the same hooks, also of one that has been removed meanwhile."""
        self.ended = time.perf_counter()
        self.error = error
        errors = []
        for hook in self._hooks:
            try:
                hook.end(self)
            except Exception as raised:  # the other hooks have seen the begin
                errors.append(raised)
        if errors:
            raise errors[0]

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the arguments, those of lists and of dicts one by one."""
        arrays: list[Any] = []
        pending = list(self.arguments.values())
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
        """The bytes of all arrays together."""
        return sum(count_of(array) * array.dtype.itemsize for array in self.arrays)

    @property
    def op(self) -> ReduceOp | None:
        """The reduction, of an operation that reduces."""
        return self.arguments.get("op")

    @property
    def peer(self) -> int | None:
        """The root, the destination or the source: a rank of the group; None where there is none, and for "any"."""
        return next((self.arguments[name] for name in ("root", "dst", "src") if name in self.arguments), None)

    @property
    def described(self) -> str:
        """The operation in words, where it is not one of a group; otherwise ""."""
        return ""

    @property
    def duration(self) -> float | None:
        """The seconds from its beginning to when its end was noticed; None before."""
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
        """See an operation before its transport is called; an exception raised here keeps it from starting."""

    def end(self, operation: Operation) -> None:
        """See an operation that has ended, well or not: an asynchronous one in the thread that notices."""


class Timing:
    """A hook that does nothing: with one, operations know when they began and ended."""

    def begin(self, operation: Operation) -> None:
        """Do nothing."""

    end = begin


class RemovableHandle:
    """The handle of a registered hook: `remove` takes the hook away, and so does the end of a ``with`` block.

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
        """Take the hook away; doing it twice does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.remove()
