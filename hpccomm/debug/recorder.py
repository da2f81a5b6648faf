"""The flight recorder: the last operations of this process, through a hook at the door and along the fast path.

What is kept of an operation is a row: a few values, none of which keeps an array alive. It becomes a `Record` when
somebody asks for it.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core.backend import FastPath
from ..core.hooks import Operation, RemovableHandle
from .attach import everywhere
from .clock import EPOCH
from .records import Record, key_of

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

SIZE = 2000  # operations
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
now = time.perf_counter  # with EPOCH it is the time since the epoch

# (about, name, number, began, ended, dtype, bytes, op, peer, tag, where[, count, failed])
Row: TypeAlias = "tuple[Any, ...] | Entry"
ABOUT, NAME, NUMBER, BEGAN, ENDED, DTYPE, NBYTES, OP, PEER, TAG, WHERE, COUNT, FAILED = range(13)

STARTED = {"iall_reduce": "all_reduce", "isend": "send", "irecv": "recv"}  # of the fast path, and asynchronous
# Of these the fast path notes the bytes of the first array; this is for how many of it all arrays stand.
TOTALS = {
    "all_gather_single": lambda nbytes, ranks: nbytes + nbytes // ranks,
    "reduce_scatter_single": lambda nbytes, ranks: nbytes * (ranks + 1),
    "all_to_all_single": lambda nbytes, ranks: 2 * nbytes,
}


class About:
    """What all rows of a group have in common, and how many operations have passed its door."""

    __slots__ = ("__weakref__", "_group", "collectives", "key", "last", "messages", "name", "ranks")

    def __init__(self, group: ProcessGroup) -> None:
        self.key = key_of(group)
        self.name = group.name
        self.ranks: tuple[int, ...] = group.__dict__.get("_process_ranks", group.ranks)
        self.collectives = group._collectives
        self.messages = group._messages
        self.last = (group.sequence_number, group.message_number)
        self._group = weakref.ref(group)

    def numbers(self) -> tuple[int, int]:
        """Return how many collectives and messages of the group this rank has begun."""
        group = self._group()
        if group is not None:
            self.last = (group.sequence_number, group.message_number)
        return self.last


class Entry(list[Any]):
    """The row of an operation that ends later; a Work calls `end`, as that of an `Operation`."""

    __slots__ = ("error",)

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
        self.groups: dict[str, About] = {}
        self._fast_paths: dict[Any, type[FastPath]] = {}
        self._methods: dict[CodeType, str] = {}  # of recorded fast paths

    def hook_of(self, group: ProcessGroup) -> _GroupHook:
        """Return the hook of one group."""
        about = self.groups[key_of(group)] = About(group)
        return _GroupHook(self, about)

    def records(self) -> list[Record]:
        """Return what is in the ring, in the order in which it began, and what this process is in just now."""
        rows = [*self._inside(), *list(self.rows)]
        return [self._record(row) for row in sorted(rows, key=lambda row: row[BEGAN])]

    def fast_path(self, kind: type[FastPath]) -> type[FastPath]:
        """Return the class of a fast path, with what it takes to record in each of its methods.

        Of the 0.3 us that a record may take two looks at the clock are half, and a call around the method would be a
        quarter. So the methods are made from their own text: `began` before MPI's call, and the row where the
        operation is counted. `dtype` and `nbytes` are noted where the method looks at them anyway.
        """
        if kind in self._fast_paths:
            return self._fast_paths[kind]
        made: dict[str, Any] = {"is_open": False}  # a small persistent operation is to pass the door
        used = {"now": now, "record": self.rows.append, "caller": caller, "Entry": Entry}
        namespace = {**vars(sys.modules[kind.__module__]), **used}
        for name, method in vars(kind).items():
            if hasattr(FastPath, name) and inspect.isfunction(method):
                text = _with_record(name, textwrap.dedent(inspect.getsource(method)), self.stack)
                exec(compile(f"from __future__ import annotations\n{text}", __file__, "exec"), namespace)
                made[name] = function = namespace[name]
                self._methods[function.__code__] = name
        self._fast_paths[kind] = recorded = type(f"Recorded{kind.__name__}", (kind,), made)
        return recorded

    def _inside(self) -> Iterator[Row]:
        """Find the threads that are in the fast path: what they do gets its row when it ends."""
        for outermost in sys._current_frames().values():
            frame: Any = outermost
            while frame is not None:
                name = self._methods.get(frame.f_code)
                if name is not None and "began" in (seen := frame.f_locals) and "ended" not in seen:
                    about, fast = seen["self"]._about, seen["self"]
                    is_message = name in ("send", "recv", "sendrecv")
                    counts = (fast.messages, about.messages) if is_message else (fast.count, about.collectives)
                    root, dst, src = (seen.get(each) for each in ("root", "dst", "src"))
                    peer = next((each for each in (root, dst, src) if each is not None), None)
                    number = 1 + sum(counts)
                    what = seen.get("dtype"), seen.get("nbytes", 0), seen.get("op"), peer, seen.get("tag")
                    yield about, name, number, seen["began"], 0.0, *what, caller(frame) if self.stack else None
                frame = frame.f_back

    def _record(self, row: Row) -> Record:
        about, name, number, began, ended, dtype, nbytes, op, peer, tag, where, *more = row
        count = more[0] if more else None
        if type(row) is tuple and name in TOTALS:
            nbytes = TOTALS[name](nbytes, len(about.ranks))
        return Record(
            STARTED.get(name) or name.removeprefix(ASYNC),
            number,
            about.key,
            about.name,
            dtype="" if dtype is None else str(dtype),
            count=(nbytes // dtype.itemsize if dtype is not None else 0) if count is None else count,
            nbytes=nbytes,
            op=op.upper() if isinstance(op, str) else "" if op is None else str(getattr(op, "name", op)),
            peer=peer if isinstance(peer, int) else None,
            tag=tag,
            async_op=name in STARTED or name.startswith(ASYNC),
            begin=EPOCH + began,
            end=EPOCH + ended if ended else 0.0,
            state="failed" if more[1:] else "completed" if ended else "in flight",
            where="" if where is None else line(*where),
        )


ASYNC = "async "  # before the name in a row


class _GroupHook:
    """Records what passes the door of one group, and follows its fast path."""

    def __init__(self, recorder: Recorder, about: About) -> None:
        self._append = recorder.rows.append
        self._stack = recorder.stack
        self._fast_path = recorder.fast_path
        self._about = about
        self._followed = self._following = FastPath()
        self._open: dict[Operation, Entry] = {}

    def begin(self, operation: Operation) -> None:
        about, group, arrays = self._about, operation.group, operation.arrays
        about.collectives, about.messages = group._collectives, group._messages
        count = nbytes = 0
        for array in arrays:
            size = int(array.size)
            count += size
            nbytes += size * array.dtype.itemsize
        name = ASYNC + operation.name if operation.async_op else operation.name
        dtype, arguments = arrays[0].dtype if arrays else None, operation.arguments
        what = dtype, nbytes, arguments.get("op"), operation.peer, arguments.get("tag")
        where = caller() if self._stack else None
        entry = Entry((about, name, operation.sequence_number, now(), 0.0, *what, where, count))
        self._open[operation] = entry
        self._append(entry)

    def end(self, operation: Operation) -> None:
        self._open.pop(operation).end(operation.error)

    def around(self, fast: FastPath) -> FastPath:
        """Return a fast path that does the same, with a row for each operation."""
        if self._followed is not fast:
            following: Any = object.__new__(self._fast_path(type(fast)))
            for name, value in vars(fast).items():
                setattr(following, name, value)
            following._about = self._about
            self._followed, self._following = fast, following
        return self._following


# -- the fast path -------------------------------------------------------------------------------------------


def _with_record(name: str, text: str, stack: bool) -> str:
    first, *_ = arguments = re.findall(r"(\w+): ", text[: text.index("->")])
    op = "op" if "op" in arguments else None
    peer = next((each for each in ("root", "dst", "src") if each in arguments), None)
    tag = "tag" if "tag" in arguments else None
    where = "caller()" if stack else None
    counted = "messages" if "tag" in arguments else "count"
    door = "messages" if "tag" in arguments else "collectives"
    nbytes = "nbytes + output.nbytes" if name == "sendrecv" else "nbytes"

    def row(number: str, ended: str, more: str = "") -> str:
        return (
            f"(about, {name!r}, {number} + about.{door}, began, {ended}, dtype, {nbytes}, {op}, {peer}, {tag}, "
            f"{where}{more})"
        )

    text = text.replace(f"{first}.nbytes", f"(nbytes := {first}.nbytes)", 1)
    text = text.replace("array.dtype", "(dtype := array.dtype)", 1)
    text = text.replace("    try:\n", "    about = self._about\n    began = now()\n    try:\n", 1)
    failed = row(f"1 + self.{counted}", "now()", ", None, True")
    text = re.sub(r"( +)except MPI.Exception as error:\n", rf"\g<0>\1    record({failed})\n", text)
    counting = re.compile(rf"( +)self\.{counted} \+= 1\n")
    if name in STARTED:
        entry = row(f"self.{counted}", "0.0")
        text = counting.sub(rf"\g<0>\1entry = Entry({entry})\n\1record(entry)\n", text)
        return re.sub(r"( +)return (\w*Work\(.*\))", r"\1work = \2\n\1work._operation = entry\n\1return work", text)
    done = row("number", "ended")
    counted_on = rf"\1ended = now()\n\1self.{counted} = number = self.{counted} + 1\n"
    return counting.sub(rf"{counted_on}\1record({done})\n", text)


# -- where -----------------------------------------------------------------------------------------------------


def caller(frame: Any = None) -> tuple[CodeType, int] | None:
    """Return where the program called: the code and the place in it, of which `line` makes text when asked for."""
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
    """Return what this process has recorded, and what it is in just now: in the order in which it began.

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
