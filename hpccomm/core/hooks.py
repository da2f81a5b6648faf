"""Hooks: what a program can hang on the one door that every operation of a group passes."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from .arrays import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .group import ProcessGroup
    from .persistent_work import PersistentWork
    from .reduce_op import ReduceOp


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
        Whose backend does it: ``"cpu"``, ``"cuda"`` ... or ``"objects"``.
    async_op : bool
    arguments : dict
        What the backend is called with, by name: ``{"array": ..., "op": ReduceOp.SUM}``. Ranks in it are ranks of the
        group. The names of each operation are in the documentation, "Operations".
    error : BaseException or None
        What went wrong, when it has ended.
    outcome : object
        In `end`, what a blocking operation has returned; of a receive that is the sender's rank in the group (for
        Python objects: these, and the rank).
    work : PersistentWork or None
        What is started, where a persistent operation is.

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

    __slots__ = (
        "__weakref__",
        "_hooks",
        "arguments",
        "async_op",
        "began",
        "device",
        "ended",
        "error",
        "group",
        "name",
        "outcome",
        "sequence_number",
        "work",
    )

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        sequence_number: int,
        device: str,
        async_op: bool,
        arguments: dict[str, Any],
        hooks: Sequence[Hook] = (),
        work: PersistentWork | None = None,
    ) -> None:
        self.group = group
        self.name = name
        self.sequence_number = sequence_number
        self.device = device
        self.async_op = async_op
        self.arguments = arguments
        self.error: BaseException | None = None
        self.began = self.ended = 0.0  # readings of time.perf_counter
        self.outcome: Any = None
        self.work = work
        self._hooks = list(hooks)

    def begin(self) -> None:
        """Tell the hooks that it is about to begin."""
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
        """Tell the same hooks that it has ended, also one that has been removed meanwhile."""
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
        """The arrays among the arguments, those of lists one by one."""
        found: list[Any] = []
        pending = list(self.arguments.values())
        while pending:
            value = pending.pop(0)
            if isinstance(value, list | tuple):
                pending[:0] = value
            elif hasattr(value, "dtype") and hasattr(value, "size") and not isinstance(value, type):  # float64 has them
                found.append(value)
        return found

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
        for name in ("root", "dst", "src"):
            if name in self.arguments:
                return self.arguments[name]  # type: ignore[no-any-return]
        return None

    @property
    def duration(self) -> float | None:
        """Seconds from its beginning to when its end was noticed; None before."""
        return self.ended - self.began if self.began and self.ended else None

    def __repr__(self) -> str:
        return f"<Operation {self.name} #{self.sequence_number} of {self.group.name!r}>"


class Hook(Protocol):
    """What `ProcessGroup.register_hook` takes; both methods are called on every operation of the group.

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
        """Called before the transport is; what it raises keeps the operation from starting."""

    def end(self, operation: Operation) -> None:
        """Called when the operation has ended, well or not: of an asynchronous one in the thread that notices."""


class Timing:
    """A hook that does nothing: with one, operations know when they began and ended."""

    def begin(self, operation: Operation) -> None:
        """Nothing."""

    def end(self, operation: Operation) -> None:
        """Nothing."""


class RemovableHandle:
    """What `register_hook` returns: `remove` takes the hook away again, and so does the end of a ``with`` block.

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
