"""What the threads of this process are doing, read from their stacks: it costs them nothing.

What is read of other modules: the functions that programs call (those in ``hpccomm.__all__`` and the methods of groups)
with their arguments, the door that each operation passes (its `self` and `call`), and the waits of Works.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ..core.door import Door
from ..core.group import ProcessGroup
from ..core.operation_list import CALLED, MESSAGES, OPERATIONS
from ..core.operations import Operations
from ..core.persistent_work import PersistentWork
from ..core.timeouts import as_seconds
from ..core.work import Work
from .records import Record, describe

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OWN_THREADS = "hpccomm-"  # how their names begin

# The frames that tell of an operation: the door, the method before it (all that there is of a fast one), waits.
DOOR = Door.run.__code__
METHODS: dict[CodeType, str] = {
    getattr(Operations, name).__code__: name for name in OPERATIONS if name in vars(Operations)
}
ABOUT_TO_RAISE: set[CodeType] = set()  # functions that are called when a wait has been too long
WAITS = ("wait", "synchronize")  # of a Work, whichever class it is
ASKS = "is_completed"
WITHOUT_A_GROUP = {"init_process_group": "init_process_group", "on": "ProcessGroup.on"}  # they make the first one
OF_A_GROUP = {"self", "group", "parent", "comm"}  # arguments of the functions that ranks call together


@functools.cache
def public_functions() -> dict[CodeType, str]:
    """Return the public functions and methods in which ranks may wait for each other, by their code.

    It is asked for when the package has been imported, so what is added to it is among them.
    """
    package: Any = sys.modules[__name__.partition(".")[0]]
    methods = [each for base in ProcessGroup.__mro__ for each in vars(base).items()]
    found = {}
    for name, each in [*((name, getattr(package, name)) for name in package.__all__), *methods]:
        code = getattr(inspect.unwrap(each), "__code__", None)
        if code is not None and not name.startswith("_") and OF_A_GROUP & set(code.co_varnames[: _count(code)]):
            found[code] = code.co_name
    return found


class CallInFlight(NamedTuple):
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
    is_polled : bool
        Whether nothing but the program's asking says that it waits.
    """

    key: tuple[Any, ...]
    record: Record
    group: ProcessGroup | None
    work: weakref.ref[Any] | None
    timeout: float | None
    can_raise: bool
    is_polled: bool = False


def operations(without: int = 0) -> Iterator[CallInFlight]:
    """Yield the call that each thread is in, where ranks may wait for each other; `without` is the thread that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        if thread != without:
            found = _call(frame, names.get(thread, "").startswith(OWN_THREADS))
            if found is not None:
                yield found


def of_thread(thread: int) -> CallInFlight | None:
    """Return the call that one of the program's threads is in."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else _call(frame)


def _call(innermost: FrameType, is_own_thread: bool = False) -> CallInFlight | None:
    """Return the call that a thread is executing, from its outermost frame of hpccomm that tells of one.

    An operation that is made of others is the one that the program has called.
    """
    found, raises, public = None, False, public_functions()
    for frame in _outwards(innermost):
        code = frame.f_code
        raises = raises or code in ABOUT_TO_RAISE
        if code is DOOR:
            found = _at_the_door(frame)
        elif code in METHODS:
            if found is None or CALLED.get((found.record.name, False), found.record.name) != METHODS[code]:
                found = _in_a_method(frame, METHODS[code])
        elif code.co_name in WAITS and code.co_filename.startswith(PACKAGE):
            found = _in_a_wait(frame) or found
            raises = raises or _ends_by_itself(frame.f_locals.get("self"))
        elif code.co_name == ASKS and code.co_filename.startswith(PACKAGE):
            _note_that_it_was_asked(frame.f_locals.get("self"))
        elif code in public and (found is None or "self" in code.co_varnames[:1]):
            found = _in_a_function(frame, public[code]) or found
    if found is None or (is_own_thread and not any(map(_is_the_program, _outwards(innermost)))):
        return None
    return found._replace(can_raise=True) if raises else found


def _at_the_door(frame: FrameType) -> CallInFlight:
    inside = frame.f_locals
    group, (name, _, _, arguments) = inside["self"].group, inside["call"]
    described = dict(zip(OPERATIONS[name].arguments, arguments)) if name in OPERATIONS else {}
    number = group.message_number if name in MESSAGES else group.sequence_number
    return _call_of(frame, group, name, number, described)


def _in_a_method(frame: FrameType, name: str) -> CallInFlight:
    arguments = _arguments(frame)
    group = arguments.pop("self")
    number = 1 + (group.message_number if name in MESSAGES else group.sequence_number)  # a fast one counts at its end
    return _call_of(frame, group, name, number, arguments)


def _in_a_function(frame: FrameType, name: str) -> CallInFlight | None:
    """Return a call that is no operation: of the group among its arguments, or else of the world."""
    arguments = _arguments(frame)
    group = next((each for each in arguments.values() if isinstance(each, ProcessGroup)), None)
    if group is None and name not in WITHOUT_A_GROUP:
        group = sys.modules[__name__.partition(".")[0]].GroupMember.WORLD
        if not isinstance(group, ProcessGroup):
            return None
    if group is None:
        record = Record(WITHOUT_A_GROUP[name], 0, "", "world", where=place(frame))
        limit = _seconds(arguments.get("timeout"))
        return CallInFlight((_mark(frame), name), record, None, None, limit, False)
    call = _call_of(frame, group, name, group.sequence_number + 1, arguments)
    return call._replace(can_raise=name == "destroy" or compares(group))


def _call_of(
    frame: FrameType, group: ProcessGroup, name: str, number: int, arguments: Mapping[str, Any]
) -> CallInFlight:
    record = describe(group, name, number, arguments, where=place(frame))
    seconds = arguments.get("timeout")
    ends = seconds is not None or compares(group)
    return CallInFlight((_mark(frame), record.group, name, number), record, group, None, _seconds(seconds), ends)


class _Mark:
    """What is put on the frame of a call: the frame of the next one, maybe at the same address, does not have it."""

    def __call__(self, *_: object) -> None:
        """Be what a frame's `f_trace` has to be; only a debugger would call it."""


def _mark(frame: FrameType) -> object:
    """Return the mark that tells a call from later ones of the same function; None while a debugger is there.

    Python looks at `f_trace` only in threads that are traced, and it goes with its frame. To keep frames themselves
    would keep the program's arrays alive.
    """
    if frame.f_trace is None:
        frame.f_trace = _Mark()
    return frame.f_trace if isinstance(frame.f_trace, _Mark) else None


def _in_a_wait(frame: FrameType) -> CallInFlight | None:
    inside = frame.f_locals
    work, timeout = inside.get("self"), _seconds(inside.get("timeout"))
    if not isinstance(work, Work | PersistentWork) or work.group is None:
        return None
    return _waiting(work, place(frame), timeout, work.group.on_timeout == "raise")


def asked_for(work: Work | PersistentWork) -> CallInFlight:
    """Return the wait for a Work that nobody is seen to wait for: the program asks again and again, or has a Future."""
    return _waiting(work, of_the_program().partition(" in ")[0], None, False, is_polled=True)


def _waiting(
    work: Work | PersistentWork, where: str, timeout: float | None, can_raise: bool, is_polled: bool = False
) -> CallInFlight:
    record = of_work(work, where)
    return CallInFlight((id(work), record.number), record, work.group, weakref.ref(work), timeout, can_raise, is_polled)


def _note_that_it_was_asked(work: Any) -> None:
    if isinstance(work, Work | PersistentWork):
        work.was_asked = True


def _ends_by_itself(work: Any) -> bool:
    """Whether the transport of a Work raises when it has taken too long."""
    return getattr(work, "keeps_time", False) and work.group is not None and work.group.on_timeout == "raise"


def compares(group: ProcessGroup | None) -> bool:
    """Whether this rank waits for others in the mismatch check, which looks at the clock itself."""
    return group is not None and group.door.check is not None and group.door.check.is_waiting


def of_work(work: Work | PersistentWork, where: str = "") -> Record:
    """Return the record of a Work in flight."""
    group: Any = work.group
    if isinstance(work, PersistentWork):
        name, _, _, arguments = work.call
        spec = OPERATIONS[work.op_type]
        number = group.message_number if name in MESSAGES else group.sequence_number
        return describe(group, name, number, dict(zip(spec.arguments, arguments)), where=where, async_op=True)
    record = describe(
        group, work.op_type, work.sequence_number, {"result": work.flight.result}, where=where, async_op=True
    )
    record.peer = work.flight.peer
    return record


def _seconds(timeout: object) -> float | None:
    return as_seconds(timeout) if isinstance(timeout, timedelta | float | int) else None


def _arguments(frame: FrameType) -> dict[str, Any]:
    inside = frame.f_locals
    return {name: inside[name] for name in frame.f_code.co_varnames[: _count(frame.f_code)] if name in inside}


def _count(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


# -- where ---------------------------------------------------------------------------------------------


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_the_program(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((PACKAGE, "<", *LIBRARIES))


def place(frame: FrameType) -> str:
    """Return the line of the program from which this frame of hpccomm was reached: ``"train.py:91"``.

    Where that is no line of the program's own files: the one that called hpccomm.
    """
    outside = None
    for each in _outwards(frame):
        if _is_the_program(each):
            return line(each)
        if outside is None and not each.f_code.co_filename.startswith(PACKAGE):
            outside = each
    return "" if outside is None else line(outside)


def line(frame: FrameType) -> str:
    """Return a frame's file, relative to the working directory where it is in it, and line."""
    file = frame.f_code.co_filename
    with contextlib.suppress(OSError):  # it has been removed
        file = file.removeprefix(os.getcwd() + os.sep)
    return f"{file}:{frame.f_lineno}"


def of_the_program(thread: int | None = None) -> str:
    """Return where in the program a thread (default: the main one) is: ``"train.py:88 in load"``."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    if frame is None:
        return ""
    frames = list(_outwards(frame))
    chosen = next(filter(_is_the_program, frames), frames[0])
    return f"{line(chosen)} in {chosen.f_code.co_name}"


def all_stacks(without: int = 0) -> dict[str, list[str]]:
    """Return the stack of each thread, the innermost line first: ``"train.py:88 in load"``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(thread, str(thread)): [f"{line(each)} in {each.f_code.co_name}" for each in _outwards(frame)]
        for thread, frame in sys._current_frames().items()
        if thread != without
    }
