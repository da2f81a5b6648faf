"""The call that each thread of this process is in, read from the threads' stacks, at no cost for the threads.

It depends on these frames: the public functions (those in ``hpccomm.__all__`` and the methods of groups) with their
arguments, `Dispatcher.run` of each operation (`self` and `call`), and the waits of Works. The rest of hpccomm uses
`calls_in_flight` and `call_of_thread`, and does not depend on frames.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ..core.dispatcher import Dispatcher, running_tasks
from ..core.group import ProcessGroup
from ..core.late import package
from ..core.operation_list import CALLED, MESSAGES, OF_GRIDS, OF_SEVERAL, OPERATIONS, TASK
from ..core.persistent_work import PersistentWork
from ..core.timeouts import KEEP_TIME, as_seconds
from ..core.work import Work
from ..job.reserve import Reserve
from ..process.excepthook import AbortOnException
from .groups_seen import PACKAGE, works_in_flight
from .mpi_calls import spec_of
from .records import Record, describe, key_of_operation
from .sources import LONGEST_TEXT, SOURCES, Source, named_in, text_of_call

LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
DEBIANS = "/dist-packages/"  # Debian's libraries, which virtual environments may use, too
ASSIGNS = dis.opmap["STORE_SUBSCR"]
JUMPS = {*dis.hasjrel, *dis.hasjabs}
TESTS = {f"{first}est{which}" for first in "Tt" for which in ("", "all", "any", "some")} | {"Get_status", "get_status"}
OWN_THREADS = "hpccomm-"  # the prefix of their names

# The frames that show an operation: the dispatcher, waits, and public functions, the only frames of a fast operation.
DISPATCHER = Dispatcher.run.__code__
POLL = "is_completed"
METHODS_OF_WORKS = ("wait", "synchronize", POLL)  # in all classes of Works
ABORTS = AbortOnException.__call__.__code__
# Waits for an executor's tasks, and for Python's Futures, in functions with the argument `fs`.
WAITS_FOR_TASKS, WAITS_FOR_FUTURES = ("result", "exception", "wait"), ("wait", "as_completed")
FUTURES = os.path.join("concurrent", "futures", "_base.py")
# Calls before there is a group: two make the first one, and a spare waits until it is needed.
WITHOUT_A_GROUP = {"init_process_group": "init_process_group", "from_comm": "ProcessGroup.from_comm", "spare": "spare"}
# Operations and set-ups in which ranks first exchange their arguments by another operation.
GATHER_FIRST = OF_SEVERAL | {f"{name}_init" for name in OF_SEVERAL | OF_GRIDS}
WAITS = re.compile(r"[Ww]ait(all|any|some)?\(")
NAMES_OF_GROUPS = {"self", "group", "parent", "comm", "grid"}  # arguments of functions that ranks call together


def public_functions() -> dict[CodeType, str]:
    """Return the public functions and methods in which ranks may wait for each other: names by code.

    Functions added to the package are included; functions of modules that the program has not used yet are not.
    """
    root = package()
    modules = [sys.modules.get(f"{root.__name__}.{root.LATER.get(name)}", root) for name in root.__all__]
    return _names_by_code(tuple(vars(module).get(name) for module, name in zip(modules, root.__all__)))


@functools.lru_cache(maxsize=1)
def _names_by_code(functions: tuple[Any, ...]) -> dict[CodeType, str]:
    methods = [each for base in ProcessGroup.__mro__ for name, each in vars(base).items() if not name.startswith("_")]
    names = {Reserve.wait.__code__: "spare"}
    for each in (*functions, *methods):
        code = getattr(inspect.unwrap(each), "__code__", None)
        if code is None:
            continue
        if NAMES_OF_GROUPS & set(_argument_names(code)):
            names[code] = code.co_name
    return names


class CallInFlight(NamedTuple):
    """An operation that a thread executes or waits for. It keeps no array alive."""

    key: tuple[Any, ...]  # equal in two looks if it is still the same call
    record: Record
    group: ProcessGroup | None  # None in `init_process_group`
    work: weakref.ref[Any] | None  # the awaited Work
    timeout: float | None  # the call's own, in seconds
    can_raise: bool  # it raises by itself when it takes too long
    is_polled: bool = False  # no thread waits: only polling shows that the program needs the Work


def calls_in_flight(without: int = 0, exactly: bool = False) -> Iterator[CallInFlight]:
    """Yield the call that each thread is in, if ranks may wait for each other there; skip the thread `without`.

    With `exactly` (for a verdict), a wait for requests yields only those that its source text names, if any is known.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    waits = _waits_in_c()
    for thread, frame in sys._current_frames().items():
        call = None if thread == without else _call_in(frame, waits.get(thread))
        is_own = names.get(thread, "").startswith(OWN_THREADS)
        if call is not None and (not is_own or any(map(_is_of_the_program, _outward(frame)))):
            yield call
        elif call is None and not is_own and thread != without:
            yield from _waits_for_requests(frame, exactly)
            yield from _waits_for_tasks(frame)
    del frame  # with Python 3.12 a frame that refers to itself, and those outside of it, would stay


def call_of_thread(thread: int) -> CallInFlight | None:
    """Return the call that a thread of the program is in, or a request that it waits for."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    return _call_in(frame, _waits_in_c().get(thread)) or next(_waits_for_requests(frame, exactly=True), None)


def tasks_in_flight() -> Iterator[tuple[Record, float]]:
    """Yield the executor's task that each thread is in, with the seconds since it began.

    A task is not a call in flight: it may take days, and its group's time limit does not apply to it.
    """
    for thread, innermost in sys._current_frames().items():
        if (task := running_tasks.get(thread)) is not None:
            group, number, call, began = task
            record = describe(group, TASK.name, number, {"call": call}, where=program_line(innermost))
            yield record, time.monotonic() - began


def _waits_in_c() -> dict[int, Work | PersistentWork]:
    """Return the Works that threads wait for in C, without a Python frame, by thread."""
    return {work.waiting_thread: work for work in works_in_flight() if work.waiting_thread}


def _call_in(innermost: FrameType, waited_for: Work | PersistentWork | None) -> CallInFlight | None:
    """Return the call that a stack is in; if an operation is a step of another call, return the call of the program."""
    call, can_raise, public = None, False, public_functions()
    others = {code: source for source in SOURCES for code in source.codes}
    if waited_for is not None:
        call = _wait_for(waited_for, program_line(innermost), None, False)
    for frame in _outward(innermost):
        code = frame.f_code
        can_raise = can_raise or code in KEEP_TIME
        if code is DISPATCHER:
            call = _call_in_dispatcher(frame)
        elif code in others:
            call = _call_of_another(frame, others[code]) or call
        elif code.co_name in METHODS_OF_WORKS and code.co_filename.startswith(PACKAGE) and code not in public:
            inside = frame.f_locals
            work = inside.get("self")
            if not isinstance(work, Work | PersistentWork):
                continue
            if code.co_name == POLL:
                work.was_asked = True
            elif work.group is not None:
                ends = work.group.on_timeout == "raise"
                call = _wait_for(work, program_line(frame), _seconds(inside.get("timeout")), ends)
                can_raise = can_raise or (ends and isinstance(work, Work) and work.progress.enforces_timeout)
        elif call is not None and public.get(code) in GATHER_FIRST:  # `call` is a step of that function
            call.record.called = public[code]
        elif code in public and public[code] not in OF_SEVERAL and (call is None or _says_more(code, call.record)):
            call = _call_of_function(frame, public[code]) or call
    return call._replace(can_raise=True) if call is not None and can_raise else call


def _says_more(code: CodeType, record: Record) -> bool:
    """Return True for a group's method whose name differs from the operation in it, and so says more."""
    return "self" in code.co_varnames[:1] and CALLED.get((record.name, False), record.name) != code.co_name


def _call_in_dispatcher(frame: FrameType) -> CallInFlight:
    inside = frame.f_locals
    group, call = inside["self"].group, inside["call"]
    return _call(frame, group, call.name, _last_number(group, call.name), call.named if call.name in OPERATIONS else {})


def _call_of_function(frame: FrameType, name: str) -> CallInFlight | None:
    """Return the call of a function that called no method of a group; its group is an argument, or the world."""
    inside = frame.f_locals
    arguments = {name: inside[name] for name in _argument_names(frame.f_code) if name in inside}
    groups = [arguments.pop(name) for name, each in list(arguments.items()) if isinstance(each, ProcessGroup)]
    group = groups[0] if groups else None
    if group is None and name in WITHOUT_A_GROUP:
        record = Record(WITHOUT_A_GROUP[name], 0, "", "world", where=program_line(frame))
        return CallInFlight((_mark(frame), name), record, None, None, _seconds(arguments.get("timeout")), False)
    if group is None:
        group = package().GroupMember.WORLD
    if not isinstance(group, ProcessGroup):
        return None
    call = _call(frame, group, name, _last_number(group, name) + 1, arguments)  # a fast operation is counted at its end
    return call if name in OPERATIONS else call._replace(can_raise=name == "destroy" or is_in_mismatch_check(group))


def _call_of_another(frame: FrameType, source: Source) -> CallInFlight | None:
    record = source.record_of(frame, program_line(frame))
    if record is None:
        return None
    return CallInFlight((_mark(frame), *key_of_operation(record)), record, source.group, None, None, False)


def _waits_for_requests(innermost: FrameType, exactly: bool) -> Iterator[CallInFlight]:
    """Yield the pending receives of a thread that is blocked in mpi4py's Wait.

    Sends are yielded only if there is no receive: a send may have completed without a wait.
    """
    for source in SOURCES:
        text = text_of_call(innermost)
        if WAITS.search(text) and (records := list(source.in_flight(named_in(text, innermost) if exactly else ()))):
            spec = OPERATIONS["recv"]
            for record in [each for each in records if spec_of(each.name) is spec] or records:
                record.where = program_line(innermost)
                key = _mark(innermost), innermost.f_lasti, *key_of_operation(record)
                yield CallInFlight(key, record, source.group, None, None, False)


def _waits_for_tasks(innermost: FrameType) -> Iterator[CallInFlight]:
    """Yield the executor's tasks that a thread waits for: those that workers have, or else the first one.

    Tasks have no time limit: see `tasks_in_flight`.
    """
    for frame in _outward(innermost):
        waiters = _waits_of_a_frame(frame)
        tasks = [task for each in waiters if hasattr(each, "tasks_waited_for") for task in each.tasks_waited_for()]
        for task in [task for task in tasks if task.worker is not None] or tasks[:1]:
            record = describe(task.group, TASK.name, 0, {"call": task.call}, where=program_line(frame))
            record.peer = task.worker
            yield CallInFlight((_mark(frame), id(task)), record, task.group, None, None, False)
        if tasks:
            return


def _waits_of_a_frame(frame: FrameType) -> list[Any]:
    code = frame.f_code
    if code.co_name in WAITS_FOR_TASKS and code.co_filename.startswith(PACKAGE):
        return [frame.f_locals.get("self")]
    if code.co_name in WAITS_FOR_FUTURES and code.co_filename.endswith(FUTURES):
        return list(frame.f_locals.get("fs", ()))
    return []


def _call(frame: FrameType, group: ProcessGroup, name: str, number: int, arguments: Mapping[str, Any]) -> CallInFlight:
    record = describe(group, name, number, arguments, where=program_line(frame))
    timeout = arguments.get("timeout")
    can_raise = timeout is not None or is_in_mismatch_check(group)
    key = _mark(frame), record.group, name, number
    return CallInFlight(key, record, group, None, _seconds(timeout), can_raise)


def _last_number(group: ProcessGroup, name: str) -> int:
    return group.message_number if name in MESSAGES else group.sequence_number


class _Mark:
    """A mark on a call's frame: the frame of the next call, perhaps at the same address, does not have it."""

    def __call__(self, *_: object) -> None:
        """Do nothing: a frame's `f_trace` must be callable, but only a debugger would call it."""


def _mark(frame: FrameType) -> object:
    """Return the mark that distinguishes a call from later calls of the same function; None under a debugger.

    Python uses `f_trace` only in traced threads, and frees it with its frame. Keeping the frames themselves would keep
    the program's arrays alive.
    """
    if frame.f_trace is None:
        frame.f_trace = _Mark()
    return frame.f_trace if isinstance(frame.f_trace, _Mark) else None


def polled_call(work: Work | PersistentWork, where: str) -> CallInFlight:
    """Return the call for a Work that no thread waits for: the program polls it, or has its Future."""
    return _wait_for(work, where, None, False)._replace(is_polled=True)


def _wait_for(work: Work | PersistentWork, where: str, timeout: float | None, can_raise: bool) -> CallInFlight:
    record = record_of(work, where)
    return CallInFlight((id(work), record.number), record, work.group, weakref.ref(work), timeout, can_raise)


def is_in_mismatch_check(group: ProcessGroup | None) -> bool:
    """Return whether this rank waits for others in a group's mismatch check, which has a time limit of its own."""
    return group is not None and group.dispatcher.check is not None and group.dispatcher.check.is_waiting


def record_of(work: Work | PersistentWork, where: str = "") -> Record:
    """Return the record of a Work in flight."""
    group: Any = work.group
    if isinstance(work, PersistentWork):
        name, number = work.call.name, _last_number(group, work.call.name)
        return describe(group, name, number, work.call.named, where=where, async_op=True)
    named = {"result": work.info.result}
    record = describe(group, work.op_type, work.sequence_number, named, where=where, async_op=True)
    record.peer, record.tag = work.info.peer, work.info.tag
    return record


def _seconds(timeout: object) -> float | None:
    return as_seconds(timeout) if isinstance(timeout, timedelta | float | int) else None


def _argument_names(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# -- lines ---------------------------------------------------------------------------------------------


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_the_program(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    is_code = file == "<string>" and frame.f_globals.get("__name__") == "__main__"  # python -c
    return is_code or not (file.startswith((PACKAGE, "<", *LIBRARIES)) or DEBIANS in file)


def program_line(frame: FrameType) -> str:
    """Return the program's line that led to a frame of hpccomm, ``"train.py:91"``.

    If no file of the program is on the stack, return the line that called hpccomm.
    """
    outside = None
    for each in _outward(frame):
        if _is_of_the_program(each):
            return line_of(each)
        if outside is None and not each.f_code.co_filename.startswith(PACKAGE):
            outside = each
    return "" if outside is None else line_of(outside)


def line_of(frame: FrameType) -> str:
    """Return a frame's file and line."""
    return f"{file_of(frame)}:{frame.f_lineno}"


def file_of(frame: FrameType) -> str:
    """Return a frame's file; below the working directory, the path is relative."""
    file = frame.f_code.co_filename
    with contextlib.suppress(OSError):  # the working directory has been removed
        file = file.removeprefix(os.getcwd() + os.sep)
    return file


def place_in_program() -> tuple[str, str]:
    """Return the program's line that the main thread is in, and the function with the expression that it executes.

    ``("train.py:88", "load, in input()")``; the function may be followed by an exception that is being handled.
    """
    frame = _frame_of_the_program()
    if frame is None:
        return "", ""
    text = text_of_call(frame)
    if frame.f_code.co_code[frame.f_lasti] == ASSIGNS:  # the text is only the target of the assignment
        text += " = ..."
    function = f"{frame.f_code.co_name}, in {text}" if "(" in text or "[" in text else frame.f_code.co_name
    return line_of(frame), f"{function}{_exception_of_the_main_thread()}"


def asks_again_and_again() -> bool:
    """Return whether the main thread is in a loop that polls requests."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not TESTS & set(frame.f_code.co_names):
        return False
    steps = list(dis.get_instructions(frame.f_code))
    asked = [each.offset for each in steps if each.argval in TESTS]
    loops = [(each.argval, each.offset) for each in steps if each.opcode in JUMPS and each.argval <= each.offset]
    return any(first <= frame.f_lasti <= last and any(first <= at <= last for at in asked) for first, last in loops)


def exception_that_ends() -> str:
    """Return ``"by KeyboardInterrupt at train.py:88"`` while the main thread prints the program's last exception."""
    for frame in _outward(sys._current_frames().get(threading.main_thread().ident or 0)):
        if frame.f_code is ABORTS:
            trace = traceback.walk_tb(frame.f_locals.get("trace"))
            places = [f"{file_of(each)}:{line}" for each, line in trace if _is_of_the_program(each)]
            return f"by {frame.f_locals['kind'].__name__}{' at ' * bool(places)}{''.join(places[-1:])}"
    return ""


def line_in_program() -> str:
    """Return the line of `place_in_program` without the rest, which takes longer."""
    frame = _frame_of_the_program()
    return "" if frame is None else line_of(frame)


def _frame_of_the_program() -> FrameType | None:
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    return next(filter(_is_of_the_program, _outward(innermost)), innermost)


def threads_of_the_program() -> list[threading.Thread]:
    """Return this process's Python threads, except hpccomm's own."""
    return [each for each in threading.enumerate() if not each.name.startswith(OWN_THREADS)]


def _exception_of_the_main_thread() -> str:
    """Return the exception that the main thread is handling, ``", on KeyError: 'a'"``; it may explain a hang.

    For example, it left the `with` block of a file that all ranks close together. No code of the exception runs.
    """
    exceptions: dict[int | None, Any] = getattr(sys, "_current_exceptions", dict)()
    error = exceptions.get(threading.main_thread().ident)
    error = error[1] if isinstance(error, tuple) else error  # before Python 3.12
    if not isinstance(error, BaseException):
        return ""
    texts = [repr(each) for each in error.args[:1] if type(each) in (str, int)]
    return f", on {type(error).__name__}: {', '.join(texts)[:LONGEST_TEXT]}".removesuffix(": ")


def all_stacks(without: int = 0) -> dict[str, list[str]]:
    """Return the stack of each thread but `without`, the innermost line first: ``"train.py:88 in load"``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(thread, str(thread)): [f"{line_of(each)} in {each.f_code.co_name}" for each in _outward(frame)]
        for thread, frame in sys._current_frames().items()
        if thread != without
    }
