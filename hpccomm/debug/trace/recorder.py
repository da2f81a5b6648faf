"""The flight recorder: the last operations of this process, from a hook and from the fast path's ring buffer.

No record keeps an array alive.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from ...core.backend import FastPath
from ...core.hooks import Operation, RemovableHandle
from ...native import fastpath
from ..groups_seen import PACKAGE, everywhere, key_of, ranks_of
from ..records import EPOCH, Record, record_of_operation
from ..ring import last, line, ring_records
from .clock import now

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

SIZE = 2000  # operations
FEW = 64  # with fewer groups, vanished ones are not removed


class Numbered(Protocol):
    """An object that counts its operations on this rank: a process group, or a communicator under ``hpccomm run``."""

    @property
    def name(self) -> str:
        """The name in records."""

    @property
    def sequence_number(self) -> int:
        """The number of the last collective."""

    @property
    def message_number(self) -> int:
        """The number of the last message."""


class OtherRecords(Protocol):
    """Records of operations outside hpccomm's groups."""

    def records(self) -> list[Record]:
        """Return the last records, including those in flight."""

    def mark(self) -> Any:
        """Return a value that changes with every operation that begins."""


class TracedGroup:
    """A recorded group."""

    __slots__ = ("__weakref__", "_group", "_numbers", "has_all_messages", "key", "name", "ranks")

    def __init__(self, group: Numbered, key: str, ranks: tuple[int, ...], has_all_messages: bool = True) -> None:
        self.key = key
        self.has_all_messages = has_all_messages
        self.name = group.name
        self.ranks = ranks
        self._numbers = (group.sequence_number, group.message_number)
        self._group = weakref.ref(group)

    @property
    def is_there(self) -> bool:
        """True until the group is collected or destroyed: garbage may stay for a long time."""
        group = self._group()
        return group is not None and not getattr(group, "is_destroyed", False)

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of collectives and of messages that this rank has begun in the group."""
        group = self._group()
        if group is not None:
            self._numbers = (group.sequence_number, group.message_number)
        return self._numbers


class Recorder:
    """The last operations of this process."""

    def __init__(self, size: int = SIZE, stack: bool = False) -> None:
        self.stack = stack
        self.groups: dict[str, TracedGroup] = {}  # by key: living ones, and those that have records
        self.others: list[OtherRecords] = []
        self.size = size  # operations that are kept
        self._entries: deque[Record] = deque(maxlen=size)  # operations that passed the dispatcher
        self._places: dict[int, tuple[str, str]] = {}  # operations of fast paths: their groups' keys and names
        self._most = FEW  # with fewer groups, none is removed
        self._since = last()
        self._kept: dict[int, Record] | None = None  # the fast paths' records, once stopped
        if fastpath is not None:
            fastpath.keep(size, True, caller if stack else None)

    def hook_of(self, group: ProcessGroup) -> _GroupHook:
        """Return the hook for one group."""
        traced = TracedGroup(group, key_of(group), ranks_of(group))
        self._add(traced)
        return _GroupHook(self, traced)

    def trace(self, group: Numbered, key: str, ranks: tuple[int, ...]) -> None:
        """Add a group whose operations no hook sees."""
        if key not in self.groups:
            self._add(TracedGroup(group, key, ranks, has_all_messages=False))

    def _add(self, traced: TracedGroup) -> None:
        if len(self.groups) >= self._most:
            used = {record.group for record in self.records()}
            self.groups = {key: each for key, each in self.groups.items() if each.is_there or key in used}
            for place in [place for place, (key, _) in list(self._places.items()) if key not in self.groups]:
                del self._places[place]
            self._most = max(FEW, 2 * len(self.groups))
        self.groups[traced.key] = traced

    def stop(self) -> None:
        """Keep the records; the ring buffer continues with less detail."""
        self._kept = ring_records(self._places, self._since)
        if fastpath is not None:
            fastpath.keep(0, False, None)

    def records(self) -> list[Record]:
        """Return the last operations, including those in flight, in the order in which they began."""
        fast = ring_records(self._places, self._since)
        if self._kept is not None:
            for serial in self._kept.keys() & fast.keys():  # it may have completed since `stop`
                self._kept[serial].end, self._kept[serial].state = fast[serial].end, fast[serial].state
            fast = self._kept
        found = [replace(each) for each in [*self._entries, *fast.values()]]
        found += [record for each in self.others for record in each.records()]
        return sorted(found, key=lambda record: record.begin)[-self.size :]

    def mark(self) -> tuple[Any, ...]:
        """Return a value that changes with every operation that begins."""
        entries = self._entries
        fast = last() if self._kept is None else max(self._kept, default=0)
        return entries[-1] if entries else None, fast, *(each.mark() for each in self.others)


class _GroupHook:
    """The hook that records those operations of one group that pass its dispatcher."""

    def __init__(self, recorder: Recorder, traced: TracedGroup) -> None:
        self._recorder, self._traced = recorder, traced
        self._open: dict[Operation, Record] = {}

    def begin(self, operation: Operation) -> None:
        place = caller() if self._recorder.stack else None
        where = "" if place is None else line(*place)
        record = self._open[operation] = record_of_operation(operation, begin=now(), where=where)
        self._recorder._entries.append(record)

    def end(self, operation: Operation) -> None:
        record = self._open.pop(operation)
        if operation.began:
            record.begin = EPOCH + operation.began  # the time that `get_duration` counts from
        record.end, record.state = EPOCH + operation.ended, "completed" if operation.error is None else "failed"

    def follows(self, fast: FastPath) -> bool:
        """Return whether the ring buffer records the fast path without this hook; the dispatcher calls it."""
        if fast.place:
            self._recorder._places[fast.place] = self._traced.key, self._traced.name
        return fast.place > 0


# -- the program's line ----------------------------------------------------------------------------------------


def caller() -> tuple[CodeType, int] | None:
    """Return the code object and the instruction that called hpccomm; `line` formats them."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


# -- the public functions ----------------------------------------------------------------------------------------

_recorder: Recorder | None = None  # of this process; stays after it has stopped
_handle: RemovableHandle | None = None  # set while it records


def recorder() -> Recorder | None:
    """Return this process's recorder, or None before the first recording."""
    return _recorder


def begin(size: int, stack: bool) -> Recorder:
    """Start recording, unless this process records already."""
    global _recorder, _handle
    if _recorder is None or _handle is None:
        _recorder = Recorder(size, stack)
        _handle = everywhere(_recorder.hook_of)
    return _recorder


def _stop() -> None:
    global _handle
    if _handle is not None and _recorder is not None:
        _handle.remove()
        _recorder.stop()
        _handle = None


def record(size: int = SIZE, *, stack: bool = False) -> RemovableHandle:
    """Record the operations of every group of this process from now on, like ``HPCCOMM_TRACE=1`` from the start.

    Each rank records for itself and may call it at any time. A second call while it records has no effect.

    Parameters
    ----------
    size : int
        The number of operations that are kept; older ones are dropped.
    stack : bool
        Whether to record the program's line of each call, like ``HPCCOMM_TRACE=stack``.

    Returns
    -------
    RemovableHandle
        Its ``remove()``, or the end of a ``with`` block, ends the recording. The records stay until the next
        recording begins.

    Examples
    --------
    >>> import hpccomm.debug
    >>> with hpccomm.debug.record():
    ...     hc.all_reduce(np.ones(4))
    ...     hc.broadcast(np.zeros(3, np.float32), src=0)
    >>> for each in hpccomm.debug.recorded():
    ...     print(each, each.op, each.peer, each.state)
    all_reduce #1 of 'world' (32 B float64) SUM None completed
    broadcast #2 of 'world' (12 B float32)  0 completed
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"record: size is {size!r}; expected a number of operations, 1 or more")
    if _handle is not None:
        return RemovableHandle(lambda: None)
    begin(size, stack)
    return RemovableHandle(_stop)


def recorded() -> list[Record]:
    """Return the records of this process, including those in flight, in the order in which they began.

    Returns
    -------
    list of Record
        Empty if nothing was recorded.

    Examples
    --------
    >>> import hpccomm.debug
    >>> with hpccomm.debug.record(size=2):
    ...     for _ in range(5):
    ...         hc.barrier()
    >>> [(each.name, each.number) for each in hpccomm.debug.recorded()]  # the last two
    [('barrier', 4), ('barrier', 5)]
    >>> all(each.begin <= each.end for each in hpccomm.debug.recorded())
    True
    """
    return [] if _recorder is None else _recorder.records()
