"""The flight recorder: the last operations of this process, through a hook at the door and along the fast path.

What is kept of an operation is a row: a few values, none of which keeps an array alive. It becomes a `Record` when
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
from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.backend import FastPath
from ...core.hooks import Operation, RemovableHandle
from ...core.operation_list import MESSAGES
from ...core.work import Work
from ..groups_seen import everywhere, key_of, ranks_of
from ..records import Record
from ..stacks import PACKAGE
from .clock import EPOCH

if TYPE_CHECKING:
    from ...core.group import ProcessGroup

SIZE = 2000  # operations
now = time.perf_counter  # with EPOCH it is the time since the epoch

# (traced, name, number, began, ended, dtype, bytes, op, peer, tag, where[, count, failed])
Row: TypeAlias = "tuple[Any, ...] | Entry"
ABOUT, NAME, NUMBER, BEGAN, ENDED, DTYPE, NBYTES, OP, PEER, TAG, WHERE, COUNT, FAILED = range(13)

# Of these the fast path notes the bytes of the first array; this is for how many of it all arrays stand.
TOTALS = {
    "all_gather_single": lambda nbytes, ranks: nbytes + nbytes // ranks,
    "reduce_scatter_single": lambda nbytes, ranks: nbytes * (ranks + 1),
    "all_to_all_single": lambda nbytes, ranks: 2 * nbytes,
}


class TracedGroup:
    """What all rows of a group have in common, and how many operations have passed its door."""

    __slots__ = ("__weakref__", "_group", "collectives", "key", "last", "messages", "name", "ranks")

    def __init__(self, group: ProcessGroup) -> None:
        self.key = key_of(group)
        self.name = group.name
        self.ranks: tuple[int, ...] = ranks_of(group)
        self.collectives = group.door.collectives
        self.messages = group.door.messages
        self.last = (group.sequence_number, group.message_number)
        self._group = weakref.ref(group)

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of collectives and of messages of the group that this rank has begun."""
        group = self._group()
        if group is not None:
            self.last = (group.sequence_number, group.message_number)
        return self.last


class Entry(list[Any]):
    """The row of an operation that ends later; a Work calls `end`, as that of an `Operation`."""

    __slots__ = ("error", "outcome")
    error: BaseException | None
    outcome: Any

    def end(self, error: BaseException | None = None) -> None:
        """Note when it has ended."""
        self[ENDED], self.error = now(), error
        if error is not None:
            self[COUNT:] = [None if len(self) <= COUNT else self[COUNT], True]

    @property
    def duration(self) -> float | None:
        """Seconds from its beginning to when its end was noticed; None before."""
        return self[ENDED] - self[BEGAN] if self[ENDED] else None


class Recorder:
    """The ring of this process's last operations.

    Attributes
    ----------
    rows : deque
        The oldest first; those of asynchronous operations are there from their beginning, others from their end.
    groups : dict
        By key, what is known of each group.
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
        """Return the records of the ring and of what is in flight, in the order in which they began."""
        rows = [*self._inside(), *list(self.rows)]
        return [self._record(row) for row in sorted(rows, key=lambda row: row[BEGAN])]

    def _inside(self) -> Iterator[Row]:
        """Find the threads that are in a recorded fast path: what they do gets its row when it ends."""
        for outermost in sys._current_frames().values():
            frame: Any = outermost
            while frame is not None:
                name = _recorded.get(frame.f_code)
                seen = frame.f_locals if name is not None else {}
                if "began" in seen and "work" not in seen and "number" not in seen:
                    fast, traced, array = seen["fast"], seen["traced"], seen["array"]
                    done = fast.messages + traced.messages if name in MESSAGES else fast.count + traced.collectives
                    peer = next((seen[each] for each in ("root", "dst", "src") if each in seen), None)
                    what = array.dtype, array.nbytes, seen.get("op"), peer, seen.get("tag")
                    yield traced, name, 1 + done, seen["began"], 0.0, *what, caller(frame) if self.stack else None
                frame = frame.f_back

    def _record(self, row: Row) -> Record:
        traced, name, number, began, ended, dtype, nbytes, op, peer, tag, where, *more = row
        count = more[0] if more else None
        if type(row) is tuple and name in TOTALS:
            nbytes = TOTALS[name](nbytes, len(traced.ranks))
        return Record(
            name.removeprefix(ASYNC),
            number,
            traced.key,
            traced.name,
            dtype="" if dtype is None else str(dtype),
            count=(nbytes // dtype.itemsize if dtype is not None else 0) if count is None else count,
            nbytes=nbytes,
            op=op.upper() if isinstance(op, str) else "" if op is None else str(getattr(op, "name", op)),
            peer=peer if isinstance(peer, int) else None,
            tag=tag,
            async_op=name.startswith(ASYNC),
            begin=EPOCH + began,
            end=EPOCH + ended if ended else 0.0,
            state="failed" if more[1:] else "completed" if ended else "in flight",
            where="" if where is None else line(*where),
        )


ASYNC = "async "  # before the name in a row


class _GroupHook:
    """Records what passes the door of one group, and follows its fast path."""

    def __init__(self, recorder: Recorder, traced: TracedGroup) -> None:
        self._append = recorder.rows.append
        self._stack = recorder.stack
        self._traced = traced
        self._followed = self._following = FastPath()
        self._open: dict[Operation, Entry] = {}

    def begin(self, operation: Operation) -> None:
        traced, group, arrays = self._traced, operation.group, operation.arrays
        traced.collectives, traced.messages = group.door.collectives, group.door.messages
        count = nbytes = 0
        for array in arrays:
            size = int(array.size)
            count += size
            nbytes += size * array.dtype.itemsize
        name = ASYNC + operation.name if operation.async_op else operation.name
        dtype, arguments = arrays[0].dtype if arrays else None, operation.arguments
        what = dtype, nbytes, arguments.get("op"), operation.peer, arguments.get("tag")
        where = caller() if self._stack else None
        entry = Entry((traced, name, operation.sequence_number, now(), 0.0, *what, where, count))
        self._open[operation] = entry
        self._append(entry)

    def end(self, operation: Operation) -> None:
        self._open.pop(operation).end(operation.error)

    def around(self, fast: FastPath) -> FastPath:
        """Return a fast path that does the same, with a row for each operation."""
        if self._followed is not fast:
            where = caller if self._stack else None
            self._followed, self._following = fast, recorded_fast_path(fast, self._traced, self._append, where)
        return self._following


# -- the fast path -------------------------------------------------------------------------------------------


def recorded_fast_path(fast: FastPath, traced: TracedGroup, append: Callable[[Row], None], where: Any) -> FastPath:
    """Return a fast path that does what `fast` does, with a row for each operation.

    Of a row's time two looks at the clock are a third. Functions that share a few variables are quicker than methods
    that look them up, and one around all of them would cost as much again; so each is written out. `is_open` stays
    false: a small persistent operation is to pass the door. What raises has no row.
    """

    do_broadcast = fast.broadcast

    def broadcast(array: Any, root: int) -> bool:
        began = now()
        if not do_broadcast(array, root):
            return False
        number, at = fast.count + traced.collectives, where and where()
        append((traced, "broadcast", number, began, now(), array.dtype, array.nbytes, None, root, None, at))
        return True

    do_all_reduce = fast.all_reduce

    def all_reduce(array: Any, op: Any) -> bool:
        began = now()
        if not do_all_reduce(array, op):
            return False
        number, at = fast.count + traced.collectives, where and where()
        append((traced, "all_reduce", number, began, now(), array.dtype, array.nbytes, op, None, None, at))
        return True

    do_reduce = fast.reduce

    def reduce(array: Any, root: int, op: Any) -> bool:
        began = now()
        if not do_reduce(array, root, op):
            return False
        number, at = fast.count + traced.collectives, where and where()
        append((traced, "reduce", number, began, now(), array.dtype, array.nbytes, op, root, None, at))
        return True

    do_all_gather_single = fast.all_gather_single

    def all_gather_single(output: Any, array: Any) -> bool:
        began = now()
        if not do_all_gather_single(output, array):
            return False
        number, at = fast.count + traced.collectives, where and where()
        append((traced, "all_gather_single", number, began, now(), output.dtype, output.nbytes, None, None, None, at))
        return True

    do_reduce_scatter_single = fast.reduce_scatter_single

    def reduce_scatter_single(output: Any, array: Any, op: Any) -> bool:
        began = now()
        if not do_reduce_scatter_single(output, array, op):
            return False
        number, at = fast.count + traced.collectives, where and where()
        append((traced, "reduce_scatter_single", number, began, now(), output.dtype, output.nbytes, op, None, None, at))
        return True

    do_all_to_all_single = fast.all_to_all_single

    def all_to_all_single(output: Any, array: Any) -> bool:
        began = now()
        if not do_all_to_all_single(output, array):
            return False
        number, at = fast.count + traced.collectives, where and where()
        append((traced, "all_to_all_single", number, began, now(), array.dtype, array.nbytes, None, None, None, at))
        return True

    do_send, do_recv, do_sendrecv = fast.send, fast.recv, fast.sendrecv

    def send(array: Any, dst: int, tag: int) -> bool:
        began = now()
        if not do_send(array, dst, tag):
            return False
        number, at = fast.messages + traced.messages, where and where()
        append((traced, "send", number, began, now(), array.dtype, array.nbytes, None, dst, tag, at))
        return True

    def recv(array: Any, src: int | None, tag: int) -> int | None:
        began = now()
        sender = do_recv(array, src, tag)
        if sender is not None:
            number, at = fast.messages + traced.messages, where and where()
            append((traced, "recv", number, began, now(), array.dtype, array.nbytes, None, src, tag, at))
        return sender

    def sendrecv(array: Any, dst: int, output: Any, src: int | None, tag: int, recv_tag: int | None) -> int | None:
        began = now()
        sender = do_sendrecv(array, dst, output, src, tag, recv_tag)
        if sender is not None:
            number, at = fast.messages + traced.messages, where and where()
            nbytes = array.nbytes + output.nbytes
            append((traced, "sendrecv", number, began, now(), array.dtype, nbytes, None, dst, tag, at))
        return sender

    def iall_reduce(array: Any, op: Any) -> Work | None:
        began, work = now(), fast.iall_reduce(array, op)
        if work is not None:
            number, dtype = fast.count + traced.collectives, array.dtype
            row = [
                traced,
                "async all_reduce",
                number,
                began,
                0.0,
                dtype,
                array.nbytes,
                op,
                None,
                None,
                where and where(),
            ]
            append(entry := Entry(row))
            work.operation = entry  # type: ignore[assignment]  # all that a Work does with it is to end it
        return work

    def isend(array: Any, dst: int, tag: int) -> Work | None:
        began, work = now(), fast.isend(array, dst, tag)
        if work is not None:
            number, dtype = fast.messages + traced.messages, array.dtype
            row = [traced, "async send", number, began, 0.0, dtype, array.nbytes, None, dst, tag, where and where()]
            append(entry := Entry(row))
            work.operation = entry  # type: ignore[assignment]
        return work

    def irecv(array: Any, src: int | None, tag: int) -> Work | None:
        began, work = now(), fast.irecv(array, src, tag)
        if work is not None:
            number, dtype = fast.messages + traced.messages, array.dtype
            row = [traced, "async recv", number, began, 0.0, dtype, array.nbytes, None, src, tag, where and where()]
            append(entry := Entry(row))
            work.operation = entry  # type: ignore[assignment]
        return work

    path = FastPath()
    blocking = broadcast, all_reduce, reduce, all_gather_single, reduce_scatter_single, all_to_all_single
    for function in (*blocking, send, recv, sendrecv, iall_reduce, isend, irecv):
        setattr(path, function.__name__, function)
        _recorded[function.__code__] = function.__name__
    return path


_recorded: dict[CodeType, str] = {}  # the functions of recorded fast paths


# -- where -----------------------------------------------------------------------------------------------------


def caller(frame: Any = None) -> tuple[CodeType, int] | None:
    """Return the code of the program that called and the place in it, of which `line` makes text when asked for."""
    frame = frame or sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line(code: CodeType, instruction: int) -> str:
    """Return ``"train.py:91"``: relative to the working directory where it is in it."""
    number = code.co_firstlineno
    for start, end, at in code.co_lines():
        if start <= instruction < end and at is not None:
            number = at
    return f"{code.co_filename.removeprefix(os.getcwd() + os.sep)}:{number}"


# -- what programs call ----------------------------------------------------------------------------------------

_recorder: Recorder | None = None  # the one of this process, also when it has stopped
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
