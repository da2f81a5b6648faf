"""The flight recorder: the last operations of this process, seen by a hook at the door and around the fast path.

Of each operation a row is kept: a few values, none of which keeps an array alive. A row becomes a `Record` when
somebody asks for it.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...core.backend import FastPath
from ...core.hooks import Operation, RemovableHandle
from ...core.operation_list import MESSAGES, OPERATIONS
from ..groups_seen import everywhere, key_of, ranks_of
from ..records import Record
from ..stacks import PACKAGE
from .clock import EPOCH

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

SIZE = 2000  # operations
DETAILS = ("op", "root", "dst", "src", "tag")  # arguments that rows keep
now = time.perf_counter  # with EPOCH it is the time since the epoch

# (kind, number, began, ended, dtype, nbytes, details, where, count, has_failed). On the fast path the count is None: it
# follows from dtype and nbytes.
Row: TypeAlias = "tuple[Any, ...] | Entry"
BEGAN, ENDED, HAS_FAILED = 2, 3, 9


class Kind(NamedTuple):
    """The constants of all rows of one operation of one group; `details` are the names of the values that a row has."""

    traced: TracedGroup
    name: str
    async_op: bool
    details: tuple[str, ...]


class TracedGroup:
    """A group that is recorded, and the numbers of operations that have passed its door."""

    __slots__ = ("__weakref__", "_group", "_numbers", "collectives", "key", "messages", "name", "ranks")

    def __init__(self, group: ProcessGroup) -> None:
        self.key = key_of(group)
        self.name = group.name
        self.ranks: tuple[int, ...] = ranks_of(group)
        self.collectives = group.door.collectives
        self.messages = group.door.messages
        self._numbers = (group.sequence_number, group.message_number)
        self._group = weakref.ref(group)

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of collectives and of messages of the group that this rank has begun."""
        group = self._group()
        if group is not None:
            self._numbers = (group.sequence_number, group.message_number)
        return self._numbers


class Entry(list[Any]):
    """The row of an operation that ends later; a Work ends it as it ends an `Operation`."""

    __slots__ = ("error", "outcome")
    error: BaseException | None
    outcome: Any

    def end(self, error: BaseException | None = None) -> None:
        """Note the time of the end, and whether the operation has failed."""
        self[ENDED], self[HAS_FAILED], self.error = now(), error is not None, error

    @property
    def duration(self) -> float | None:
        """Seconds from the beginning to when the end was noticed; None before."""
        return self[ENDED] - self[BEGAN] if self[ENDED] else None


class Recorder:
    """The ring of this process's last operations.

    Attributes
    ----------
    rows : deque
        The oldest first; those of asynchronous operations are there from their beginning, others from their end.
    groups : dict
        The traced groups, by key.
    """

    def __init__(self, size: int = SIZE, stack: bool = False) -> None:
        self.rows: deque[Row] = deque(maxlen=size)
        self.stack = stack
        self.groups: dict[str, TracedGroup] = {}

    def hook_of(self, group: ProcessGroup) -> _GroupHook:
        """Return the hook of one group."""
        traced = self.groups[key_of(group)] = TracedGroup(group)
        return _GroupHook(self, traced)

    def records(self) -> list[Record]:
        """Return the last operations, those in flight among them, in the order in which they began."""
        rows = [*self._in_flight_on_the_fast_path(), *list(self.rows)]
        return [_record(row) for row in sorted(rows, key=lambda row: row[BEGAN])]

    def _in_flight_on_the_fast_path(self) -> Iterator[Row]:
        """Yield a row for each thread that is in `recorded`, which appends its row only at the end."""
        for outermost in sys._current_frames().values():
            frame: Any = outermost
            while frame is not None:
                seen = frame.f_locals if frame.f_code in _codes else {}
                if (
                    "began" in seen
                    and "outcome" not in seen
                    and all(hasattr(each, "dtype") for each in seen["arguments"][:1])
                ):
                    kind, arguments, at = seen["kind"], seen["arguments"], caller(frame) if self.stack else None
                    number = 1 + kind.traced.numbers()[kind.name in MESSAGES]
                    nbytes = sum(each.nbytes for each in arguments if hasattr(each, "nbytes"))
                    what = arguments[0].dtype if arguments else None, nbytes, arguments[seen["details"]]
                    yield kind, number, seen["began"], 0.0, *what, at, None, False
                frame = frame.f_back


def _record(row: Row) -> Record:
    kind, number, began, ended, dtype, nbytes, values, where, count, has_failed = row
    details = dict(zip(kind.details, values))
    op = details.get("op")
    peer = details.get("root", details.get("dst", details.get("src")))
    return Record(
        kind.name,
        number,
        kind.traced.key,
        kind.traced.name,
        dtype="" if dtype is None else str(dtype),
        count=nbytes // dtype.itemsize if count is None and dtype is not None else count or 0,
        nbytes=nbytes,
        op=op.upper() if isinstance(op, str) else "" if op is None else str(getattr(op, "name", op)),
        peer=peer if isinstance(peer, int) else None,
        tag=details.get("tag"),
        async_op=kind.async_op,
        begin=EPOCH + began,
        end=EPOCH + ended if ended else 0.0,
        state="failed" if has_failed else "completed" if ended else "in flight",
        where="" if where is None else line(*where),
    )


class _GroupHook:
    """The hook that records the operations of one group, at its door and on its fast path."""

    def __init__(self, recorder: Recorder, traced: TracedGroup) -> None:
        self._append = recorder.rows.append
        self._stack = recorder.stack
        self._traced = traced
        self._fast = self._recorded = FastPath()
        self._open: dict[Operation, Entry] = {}

    def begin(self, operation: Operation) -> None:
        traced, door, arrays, arguments = self._traced, operation.group.door, operation.arrays, operation.arguments
        traced.collectives, traced.messages = door.collectives, door.messages
        counts = [int(array.size) for array in arrays]
        nbytes = sum(count * array.dtype.itemsize for count, array in zip(counts, arrays))
        details = tuple(name for name in DETAILS if name in arguments)
        kind = Kind(traced, operation.name, operation.async_op, details)
        what = arrays[0].dtype if arrays else None, nbytes, [arguments[name] for name in details]
        where = caller() if self._stack else None
        entry = Entry((kind, operation.sequence_number, now(), 0.0, *what, where, sum(counts), False))
        self._open[operation] = entry
        self._append(entry)

    def end(self, operation: Operation) -> None:
        self._open.pop(operation).end(operation.error)

    def around(self, fast: FastPath) -> FastPath:
        """Return the fast path with a row for each operation; the door calls it."""
        if self._fast is not fast:
            where = caller if self._stack else None
            self._fast, self._recorded = fast, recorded_fast_path(fast, self._traced, self._append, where)
        return self._recorded


# -- the fast path -------------------------------------------------------------------------------------------


LISTS = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_reduce_coalesced"}


def recorded_fast_path(fast: FastPath, traced: TracedGroup, append: Callable[[Row], None], where: Any) -> FastPath:
    """Return a fast path that does the same as `fast`, and appends a row for each operation.

    `is_open` stays false: a small persistent operation is to pass the door. What raises has no row.
    """
    path = FastPath()  # which leaves lists of arrays to the door
    for name in OPERATIONS.keys() & vars(FastPath).keys() - LISTS:
        setattr(path, name, _recorded(getattr(fast, name), fast, traced, name, append, where))
    for name in ("all_reduce", "send", "recv"):
        setattr(path, f"i{name}", _recorded(getattr(fast, f"i{name}"), fast, traced, name, append, where, True))
    return path


def _recorded(
    do: Callable[..., Any],
    fast: FastPath,
    traced: TracedGroup,
    name: str,
    append: Callable[[Row], None],
    where: Any,
    is_async: bool = False,
) -> Callable[..., Any]:
    names, is_message = OPERATIONS[name].arguments, name in MESSAGES
    second = max(names.index("array"), names.index("output")) if "output" in names else 0  # array, if there are two
    details = slice(1, 5, 3) if name == "sendrecv" else slice(1 + (second > 0), None)  # all but the arrays
    kind = Kind(traced, name, is_async, names[details])

    def recorded(*arguments: Any) -> Any:
        began = now()
        outcome = do(*arguments)
        if outcome is None or outcome is False:  # a receive may come from rank 0
            return outcome
        at, dtype, nbytes = where and where(), None, 0
        if arguments:  # a barrier has none
            dtype, nbytes = arguments[0].dtype, arguments[0].nbytes
        if second:
            nbytes += arguments[second].nbytes
        number = fast.messages + traced.messages if is_message else fast.count + traced.collectives
        ended = 0.0 if is_async else now()
        row: Row = (kind, number, began, ended, dtype, nbytes, arguments[details], at, None, False)
        if is_async:
            outcome.operation = row = Entry(row)
            if outcome.is_told:  # that of a rank alone
                row.end()
        append(row)
        return outcome

    _codes.add(recorded.__code__)
    return recorded


_codes: set[CodeType] = set()  # of `recorded`: the frame of a thread inside it is read


# -- where -----------------------------------------------------------------------------------------------------


def caller(frame: Any = None) -> tuple[CodeType, int] | None:
    """Return the code of the program that called hpccomm, and the instruction in it; `line` makes text of them."""
    frame = frame or sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line(code: CodeType, instruction: int) -> str:
    """Return the file and the line of an instruction, ``"train.py:91"``; below the working directory it is relative."""
    number = next((at for start, end, at in code.co_lines() if start <= instruction < end and at), code.co_firstlineno)
    return f"{code.co_filename.removeprefix(os.getcwd() + os.sep)}:{number}"


# -- what programs call ----------------------------------------------------------------------------------------

_recorder: Recorder | None = None  # of this process, also when it has stopped
_handle: RemovableHandle | None = None  # while it records


def recorder() -> Recorder | None:
    """Return this process's recorder, None before there was one."""
    return _recorder


def begin(size: int, stack: bool) -> Recorder:
    """Begin to record, unless this process is recording."""
    global _recorder, _handle
    if _recorder is None or _handle is None:
        _recorder = Recorder(size, stack)
        _handle = everywhere(_recorder.hook_of)
    return _recorder


def _stop() -> None:
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def record(size: int = SIZE, *, stack: bool = False) -> RemovableHandle:
    """Record the operations of every group of this process from now on, as ``HPCCOMM_TRACE=1`` does from the start.

    Each rank records for itself, and calls it where it wants to. If it is recording already, it goes on as it did.

    Parameters
    ----------
    size : int
        How many of the last operations are kept.
    stack : bool
        Whether the line of the program that called is noted, as with ``HPCCOMM_TRACE=stack``.

    Returns
    -------
    RemovableHandle
        Its ``remove()``, or the end of a ``with`` block, ends the recording. What was recorded stays until the next
        one begins.

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
    """Return the records of this process, those in flight included, in the order in which they began.

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
