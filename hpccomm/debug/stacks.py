"""What the threads of this process are doing, read from their stacks: it costs them nothing."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ..core.group import ProcessGroup
from ..core.operation_list import MESSAGES, OPERATIONS
from ..core.operations import Operations
from ..core.persistent_work import PersistentWork
from ..core.timeouts import as_seconds
from ..core.watched import WATCHED
from ..core.work import Work
from .records import Record, describe

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# The frames that tell of an operation: the door, the method before it (all that there is of a fast one), waits.
DOOR = ProcessGroup._run.__code__
METHODS: dict[CodeType, str] = {
    getattr(Operations, name).__code__: name for name in OPERATIONS if name in vars(Operations)
}
ABOUT_TO_RAISE: set[CodeType] = set()  # functions that are called when a wait has been too long
WAITS = ("wait", "is_completed", "synchronize")  # of a Work, whichever class it is


class Doing(NamedTuple):
    """What one thread is in: an operation, or a wait for one.

    Attributes
    ----------
    key : tuple
        The same at two looks: the same operation, still there.
    record : Record
    group : ProcessGroup or None
        None in `init_process_group`.
    work : weakref of Work, or None
        The one that is waited for. Nothing here keeps an array alive.
    timeout : float or None
        Seconds that the call itself was given.
    can_raise : bool
        Whether it looks at the clock itself.
    """

    key: tuple[Any, ...]
    record: Record
    group: ProcessGroup | None
    work: weakref.ref[Any] | None
    timeout: float | None
    can_raise: bool


def operations(without: int = 0) -> Iterator[Doing]:
    """Find what the threads are in; `without` is the thread that asks."""
    for thread, frame in sys._current_frames().items():
        if thread != without:
            found = _operation(thread, frame)
            if found is not None:
                yield found


def of_thread(thread: int) -> Doing | None:
    """Find what one thread is in."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else _operation(thread, frame)


def _operation(thread: int, innermost: FrameType) -> Doing | None:
    """Return what a thread is in: the outermost frame that tells of something, but the door before its method."""
    found, raises = None, False
    for frame in _outwards(innermost):
        code = frame.f_code
        raises = raises or code in ABOUT_TO_RAISE
        if code is DOOR:
            found = _at_the_door(thread, frame)
        elif code in METHODS and (found is None or found.record.name != METHODS[code]):
            found = _in_a_method(thread, frame, METHODS[code])
        elif code.co_name in WAITS and code.co_filename.startswith(PACKAGE):
            found = _in_a_wait(frame) or found
            raises = raises or _ends_by_itself(frame.f_locals.get("self"))
        elif code in WATCHED:
            found = _in_another_function(thread, frame, WATCHED[code])
    return found._replace(can_raise=True) if found is not None and raises else found


def _at_the_door(thread: int, frame: FrameType) -> Doing:
    inside = frame.f_locals
    group, (name, _, _, arguments) = inside["self"], inside["call"]
    described = dict(zip(OPERATIONS[name].arguments, arguments)) if name in OPERATIONS else {}
    number = group.message_number if name in MESSAGES else group.sequence_number
    return _doing(thread, frame, group, name, number, described)


def _in_a_method(thread: int, frame: FrameType, name: str) -> Doing:
    inside = dict(frame.f_locals)
    group = inside.pop("self")
    number = 1 + (group.message_number if name in MESSAGES else group.sequence_number)  # a fast one counts at its end
    return _doing(thread, frame, group, name, number, inside)


def _doing(
    thread: int, frame: FrameType, group: ProcessGroup, name: str, number: int, described: dict[str, Any]
) -> Doing:
    record = describe(group, name, number, described, where=place(frame))
    seconds = described.get("timeout")
    ends = seconds is not None or _compares(group)
    return Doing((thread, id(group), name, number), record, group, None, _seconds(seconds), ends)


def _in_a_wait(frame: FrameType) -> Doing | None:
    inside = frame.f_locals
    work, timeout = inside.get("self"), _seconds(inside.get("timeout"))
    if not isinstance(work, Work | PersistentWork) or work.group is None:
        return None
    group = work.group
    record = of_work(work, where=place(frame))
    return Doing((id(work), record.number), record, group, weakref.ref(work), timeout, group.on_timeout == "raise")


def _ends_by_itself(work: Any) -> bool:
    """Whether the transport of a Work raises when it has taken too long."""
    return getattr(work, "keeps_time", False) and work.group is not None and work.group.on_timeout == "raise"


def _in_another_function(thread: int, frame: FrameType, name: str) -> Doing:
    inside = frame.f_locals
    group = next(
        (inside[each] for each in ("self", "group", "world") if isinstance(inside.get(each), ProcessGroup)), None
    )
    if group is None:
        record = Record(name, 0, "", "world", where=place(frame))
    else:
        record = describe(group, name, group.sequence_number + 1, {}, where=place(frame))
    is_new = name in ("init_process_group", "new_group", "split_group")
    timeout = _seconds(inside.get("timeout")) if is_new else None
    ends = name == "destroy" or _compares(group)
    return Doing((thread, id(group), name, record.number), record, group, None, timeout, ends)


def _compares(group: ProcessGroup | None) -> bool:
    """Whether this rank waits for others in the mismatch check, which looks at the clock itself."""
    return group is not None and group._check is not None and group._check.is_waiting


def of_work(work: Work | PersistentWork, where: str = "") -> Record:
    """Return the record of a Work in flight."""
    group: Any = work.group
    if isinstance(work, PersistentWork):
        name, _, _, arguments = work.call
        spec = OPERATIONS[work.op_type]
        number = group.message_number if name in MESSAGES else group.sequence_number
        return describe(group, name, number, dict(zip(spec.arguments, arguments)), where=where, async_op=True)
    record = describe(group, work.op_type, work.sequence_number, {"result": work._result}, where=where, async_op=True)
    record.peer = work._peer
    return record


def _seconds(timeout: object) -> float | None:
    return as_seconds(timeout) if isinstance(timeout, timedelta | float | int) else None


# -- where ---------------------------------------------------------------------------------------------


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def place(frame: FrameType) -> str:
    """Return the line of the program from which this frame of hpccomm was reached: ``"train.py:91"``."""
    for each in _outwards(frame):
        if not each.f_code.co_filename.startswith(PACKAGE):
            return line(each)
    return ""


def line(frame: FrameType) -> str:
    """Return a frame's file, relative to the working directory where it is in it, and line."""
    file = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{frame.f_lineno}"


def of_the_program(thread: int | None = None) -> str:
    """Return what a thread (default: the main one) is in of the program's own files: ``"train.py:88 in load"``."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    if frame is None:
        return ""
    frames = list(_outwards(frame))
    own = (each for each in frames if not each.f_code.co_filename.startswith((PACKAGE, "<", *LIBRARIES)))
    chosen = next(own, frames[0])
    return f"{line(chosen)} in {chosen.f_code.co_name}"


def all_stacks(without: int = 0) -> dict[str, list[str]]:
    """Return the stack of each thread, the innermost line first: ``"train.py:88 in load"``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(thread, str(thread)): [f"{line(each)} in {each.f_code.co_name}" for each in _outwards(frame)]
        for thread, frame in sys._current_frames().items()
        if thread != without
    }
