"""Subclasses of mpi4py's communicators that count each communicator's calls; programs see no difference.

During a call, the stack has a frame of this module, in which the watchdog finds the arguments: the call pays only for
the count. Requests are kept until they complete, so that a report can name the request that a rank waits for.
"""

from __future__ import annotations

import copyreg
import inspect
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, reduce, wraps
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..debug import start
from ..debug.groups_seen import key_from
from ..debug.mpi_calls import CALLS, DUPLICATING, MAKING, POLLS, STARTS
from ..debug.records import Record
from ..debug.sources import SOURCES, Source
from ..debug.words import as_ranges
from ..job.failures import ranks_in_the_job
from ..mpi4py.stand_ins import stand_in
from .persistent import Prequest, persistent, started

if TYPE_CHECKING:
    from ..core.group import ProcessGroup
    from .hooked import HookedCalls

REMEMBERED = 8  # names of collectives, for reports
IN_FLIGHT = 64  # requests kept for each communicator
POLLED_WITHIN = 2.0  # seconds
MOST_POLLS = 16  # sources and tags in a report of a communicator's probes
PREDEFINED = ("COMM_WORLD", "COMM_SELF")
BUFFERS = ("sendbuf", "buf", "recvbuf")
CLASSES = (MPI.Intracomm, MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intercomm)


class Seen:
    """The facts about a communicator, shared by all Python objects for it."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks  # in MPI.COMM_WORLD
        self.sequence_number = self.message_number = 0  # of the last collective, and of the last message of this rank
        self.has_met = False  # before its first reduction of objects
        self.names: deque[str | tuple[str, Any]] = deque(maxlen=REMEMBERED)  # of the last collectives, some with a root
        self.requests: deque[Started] = deque(maxlen=IN_FLIGHT)
        self.polled: set[Polled] = set()
        self.polled_before: set[Polled] = set()
        _made[hash(ranks)] += 1
        self._edition = _made[hash(ranks)]
        SEEN.add(self)

    @cached_property
    def key(self) -> str:
        """Return a name that is the same on all ranks of the communicator."""
        return key_from("MPI", self.ranks, self._edition)

    def facts(self) -> dict[str, Any]:
        """Return the communicator's entry in a report."""
        names = list(self.names)
        first = self.sequence_number - len(names) + 1
        recent = [_passed(number, name) for number, name in enumerate(names, first)]
        counts = {"collectives": self.sequence_number, "messages": self.message_number, "since": first}
        return {"name": self.name, "ranks": as_ranges(self.ranks), **counts, "recent": recent}


def _passed(number: int, called: str | tuple[str, Any]) -> list[Any]:
    """Return a collective's entry in a report."""
    if isinstance(called, str):
        return [number, called, "", 0]
    name, root = called
    return [number, name, "", 0, -1, "", root if isinstance(root, int) else None, False]


# A request and its call: name, number, and all arguments but the first (an array of any size). They are not in a tuple
# of their own, which would cost each call 15 ns. Arrays among them become dtype and size: they may be large, and the
# request may have completed long ago.
Started: TypeAlias = tuple[Any, ...]
KEPT = {True: "({0}.dtype, {0}.size) if type({0}) is _ndarray else None, "}  # True: for a buffer

Polled: TypeAlias = tuple[str, Any, Any]  # an unsuccessful probe, its source and its tag

Wrapping: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # takes a method and its name

SEEN: weakref.WeakSet[Seen] = weakref.WeakSet()
MADE: list[Callable[[Any, Seen], None]] = []  # called on every rank of each new communicator
_polls_from = 0.0  # start of the interval in which `polled` collects
_made: Counter[int] = Counter()  # communicators with the same ranks, by the hash of the ranks

# The methods are compiled with mpi4py's parameters: taking any arguments would take three times as long.
COUNTED = """
    _seen = self._seen
    _seen.sequence_number += 1
    _seen.names.append({name!r})
"""
BODIES = {
    "collective": COUNTED + "    return _call(self, {arguments})",
    "rooted": """
    _seen = self._seen
    _seen.sequence_number += 1
    _seen.names.append(({name!r}, root))  # a root that differs may let other ranks pass
    return _call(self, {arguments})
""",
    "message": """
    self._seen.message_number += 1
    return _call(self, {arguments})
""",
    "poll": """
    _found = _call(self, {arguments})
    if not _found:
        self._seen.polled.add(({name!r}, source, tag))
    return _found
""",
    "started collective": """
    _seen = self._seen
    _seen.sequence_number = _number = _seen.sequence_number + 1
    _seen.names.append({name!r})
    _request = _call(self, {arguments})
    _seen.requests.append((_request, {name!r}, _number, {all_but_the_first}))
    return _request
""",
    "started message": """
    _seen = self._seen
    _seen.message_number = _number = _seen.message_number + 1
    _request = _call(self, {arguments})
    _seen.requests.append((_request, {name!r}, _number, {all_but_the_first}))
    return _request
""",
    "persistent collective": COUNTED
    + "    return _persistent(_call(self, {arguments}), _seen, {name!r}, ({each_of_them}))",
    "persistent message": """
    return _persistent(_call(self, {arguments}), self._seen, {name!r}, ({each_of_them}))
""",
    "making": COUNTED
    + """    return _watched(_call(self, {arguments}), f"{name} #{{_seen.sequence_number}} of {{_seen.name}}")""",
    "duplicating": COUNTED
    + """
    _made, _request = _call(self, {arguments})
    _name_of_made = f"{name} #{{_seen.sequence_number}} of {{_seen.name}}"
    _made._seen = _Seen(_name_of_made, _seen.ranks)  # MPI can't be asked yet
    return _made, _request
""",
    "making of some": """
    return _watched(_call(self, {arguments}), f"{name} of {{self._seen.name}}")
""",
}
CODES: set[CodeType] = set()  # of these methods


@cache
def _parameters(name: str) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a call, without the communicator."""
    method = next(getattr(base, name) for base in CLASSES if hasattr(base, name))
    return tuple(inspect.signature(method).parameters.values())[1:]


def _compiled(kind: str, name: str, call: Callable[..., Any]) -> FunctionType:
    """Compile a method of a kind that counts its call and then calls `call`."""
    arguments = [each.name for each in _parameters(name)]
    defaults = {f"_{each.name}": each.default for each in _parameters(name) if each.default is not each.empty}
    head = "".join(f", {each}=_{each}" if f"_{each}" in defaults else f", {each}" for each in arguments)
    all_but_the_first = "".join(KEPT.get(each in BUFFERS, "{0}, ").format(each) for each in arguments[1:])
    each_of_them = "".join(f"{each}, " for each in arguments)
    body = BODIES[kind].format(
        name=name, arguments=", ".join(arguments), each_of_them=each_of_them, all_but_the_first=all_but_the_first
    )
    names: dict[str, Any] = {
        "_call": call,
        "_ndarray": np.ndarray,
        "_name": name,
        "_persistent": _persistent,
        "_watched": watched,
        "_Seen": Seen,
    }
    names |= defaults | {"__name__": __name__}
    file = f"{__file__} <{name}>"  # a traceback finds no lines in this file
    exec(compile(f"def {name}(self{head}):{body}", file, "exec"), names)
    method: FunctionType = names[name]
    if name not in POLLS:  # polls do not wait
        CODES.add(method.__code__)
    return method


def _persistent(request: MPI.Prequest, seen: Seen, name: str, arguments: tuple[Any, ...]) -> Any:
    bound = {each.name: argument for each, argument in zip(_parameters(name), arguments, strict=True)}
    return persistent(request, seen, name, arguments[1:], _size(bound))


def _copying(base: type[MPI.Comm]) -> Callable[..., Any]:
    def new(cls: type[Any], comm: Any = None) -> Any:
        """Return another object for a communicator (``type(comm)(comm)``); a __getattr__ would slow down each call."""
        if comm is None:  # mpi4py calls it so in Dup and similar methods
            return base.__new__(cls)
        self: Any = base.__new__(cls, comm)
        self._seen = _known(comm)
        return self

    return new


def _known(comm: Any) -> Seen:
    """Return the facts about a communicator, from any object for it."""
    for each in (comm, *(getattr(MPI, name) for name in PREDEFINED)):
        if each == comm:
            with suppress(AttributeError):
                return object.__getattribute__(each, "_seen")  # type: ignore[no-any-return]
    return Seen(comm.Get_name(), ranks_in_the_job(comm)) if comm != MPI.COMM_NULL else Seen("COMM_NULL", ())


def _missing(self: Any, name: str) -> Any:
    """Return the facts about a communicator that mpi4py, or the program's subclass, has made without them."""
    if name != "_seen":
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    self._seen = seen = _known(self)
    return seen


def _meeting(barrier: Callable[[Any], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def reduces(self: Any, *arguments: Any) -> Any:
        """Meet before the first: mpi4py then duplicates the communicator with the GIL held; no thread can report."""
        if not self._seen.has_met:
            barrier(self)
            self._seen.has_met = True
        return call(self, *arguments)

    return reduces


def _freeing(call: Callable[[Any], None]) -> Callable[[Any], None]:
    def free(self: Any) -> None:
        """Call `Free` if not null or predefined."""
        if not any(self is getattr(MPI, name) for name in PREDEFINED):  # mpi4py marks its own predefined objects
            call(self)

    return free


def _reduce(comm: Any) -> Any:
    """Let pickle accept only communicators that mpi4py's own class pickles: the predefined ones, by name."""
    for name in PREDEFINED:
        predefined = getattr(MPI, name)
        if comm is predefined:
            return name
        if comm == predefined:
            return MPI.Intracomm, (predefined,)
    return plain(comm).__reduce__()  # which pickle refuses


def _watching(base: type[MPI.Comm]) -> Any:
    """Return the subclass of a communicator class that counts calls."""
    methods: dict[str, Any] = {
        "__slots__": ("_seen",),
        "__reduce__": _reduce,
        "__new__": _copying(base),
        "__getattr__": _missing,
        "free": _freeing(base.free),
    }
    return stand_in(base, methods | _counting(base, lambda _, call: call))


def _counting(base: type[MPI.Comm], wrapped: Wrapping) -> dict[str, FunctionType]:
    """Return methods that count the calls of a communicator class and call mpi4py's methods, wrapped with `wrapped`."""
    methods = {}
    for name in dir(base):
        if name != "Create_group" and name not in CALLS and name not in POLLS:
            continue
        call = getattr(base, name)
        if name in ("allreduce", "reduce", "scan", "exscan"):
            call = wraps(call)(_meeting(base.Barrier, call))
        is_numbered = name in CALLS  # other calls are invisible to other ranks
        method = _compiled(_kind(name), name, wrapped(name, call) if is_numbered else call)
        method.__qualname__, method.__doc__ = f"{base.__name__}.{name}", call.__doc__
        method.__dict__["__wrapped__"] = call
        methods[name] = method
    return methods


def _kind(name: str) -> str:
    """Return the key in BODIES for a call."""
    if name == "Create_group":
        return "making of some"
    if name in POLLS:
        return "poll"
    if name in DUPLICATING:
        return "duplicating"
    if name in MAKING:
        return "making"
    what = "message" if CALLS[name].is_a_message else "collective"
    if name.endswith("_init"):
        return f"persistent {what}"
    if name in STARTS:
        return f"started {what}"
    return "rooted" if "root" in CALLS[name].arguments else what


def watched(comm: Any, name: str) -> Any:
    """Return the communicator as an object that counts calls; return other objects unchanged."""
    if isinstance(comm, tuple):  # the result of Create_dist_graph with weights, for example
        return type(comm)(watched(each, name) for each in comm)
    own = WATCHING.get(type(comm))
    if own is None or comm == MPI.COMM_NULL:
        return comm
    watching: Any = comm if type(comm) is own else own.__base__.__new__(own, comm)
    watching._seen = Seen(name, ranks_in_the_job(comm))
    for each in MADE:
        each(watching, watching._seen)
    return watching


def plain(comm: Any) -> Any:
    """Return the communicator as an object of mpi4py's own class."""
    base = next((base for base, own in WATCHING.items() if type(comm) is own), None)
    return comm if base is None else base(comm)


WATCHING: dict[type[MPI.Comm], Any] = {base: _watching(base) for base in CLASSES}


def install(group: ProcessGroup, accelerates: bool = False) -> None:
    """Watch the calls on MPI.COMM_WORLD, MPI.COMM_SELF and communicators made from them, with `group`'s time limit.

    `accelerates`: hpccomm does large reductions of host arrays.
    """
    _put_around_calls(_layers(group, accelerates))
    for name in PREDEFINED:
        setattr(MPI, name, watched(getattr(MPI, name), name))
    MPI.Prequest = Prequest  # type: ignore[misc]
    copyreg.pickle(MPI.Intracomm, _reduce)  # its own method would name a class that is no longer in MPI
    start.listen_to_sigterm()
    SOURCES.append(
        Source(group, CODES, record_of, requests_in_flight, polls, _facts, lambda hook: _hooked().register(hook))
    )


LAYERS: list[Wrapping] = []  # wrappers of mpi4py's calls, the innermost first


def _put_around_calls(layers: Sequence[Wrapping]) -> None:
    LAYERS.extend(layers)
    if layers:
        for base, own in WATCHING.items():
            methods = _counting(base, lambda name, call: reduce(lambda inner, layer: layer(name, inner), LAYERS, call))
            for name, method in methods.items():
                setattr(own, name, method)


@cache
def _hooked() -> HookedCalls:
    """Return the hooks; the first one puts wrappers around all calls."""
    from .hooked import HookedCalls

    hooked = HookedCalls()
    _put_around_calls([hooked.hooking])
    return hooked


def _layers(group: ProcessGroup, accelerates: bool) -> list[Wrapping]:
    """Return the wrappers of mpi4py's calls, the innermost first."""
    layers: list[Wrapping] = []
    if accelerates:
        from .accelerated import AcceleratedCalls

        layers.append(AcceleratedCalls(group).accelerating)
    if group.settings.debug == "DETAIL":
        from .compared import ComparedCalls

        compared = ComparedCalls()
        MADE.append(compared.begin)
        layers.append(compared.comparing)
    if group.settings.trace != "0":
        from ..debug.trace.recorder import recorder
        from .recorded import RecordedCalls

        recording = recorder()
        assert recording is not None  # `group` has started it
        layers.append(RecordedCalls(recording).recording)
    return layers


# -- records of calls and requests -------------------------------------------------------------------------


def record_of(frame: FrameType, where: str) -> Record | None:
    """Return the record of the call in a frame of this module; None if its communicator is not known."""
    inside, name = frame.f_locals, frame.f_globals["_name"]
    seen = getattr(inside["self"], "_seen", None)
    if seen is None:
        return None
    return describe(seen, name, [inside[each.name] for each in _parameters(name)], where)[0]


def describe(seen: Seen, name: str, arguments: Sequence[Any], where: str) -> tuple[Record, Mapping[str, Any]]:
    """Return the record of the call that was counted last, and its arguments by name."""
    is_a_message = CALLS[name].is_a_message if name in CALLS else False
    bound = {each.name: argument for each, argument in zip(_parameters(name), arguments, strict=True)}
    return _record(seen, name, seen.message_number if is_a_message else seen.sequence_number, bound, where), bound


def comparable(comm: Any, name: str, arguments: Sequence[Any], where: str) -> Record:
    """Return the record of the call that was counted last, without arguments that may differ between ranks."""
    record, bound = describe(comm._seen, name, arguments, where)
    record.async_op = name in STARTS
    is_inter = comm.Is_inter()
    if is_inter:
        record.peer = None  # a rank of the remote group
    if is_inter or record.dtype in ("", "bytes") or any(_has_details(bound.get(each)) for each in BUFFERS):
        record.dtype, record.count = "", -1
    return record


def _has_details(buffer: Any) -> bool:
    """Whether a buffer has a datatype or more than one count, so that ranks may give one size in different forms."""
    return isinstance(buffer, list | tuple) and not all(isinstance(each, int | np.integer) for each in buffer[1:])


def requests_in_flight(only: Sequence[object] = ()) -> list[Record]:
    """Return the records of incomplete requests: those in `only` if there are any, otherwise all. Does not call MPI."""
    records, named = [], []
    for seen in list(SEEN):
        for each in [*list(seen.requests), *started(seen)]:
            request = each[0]
            if request != MPI.REQUEST_NULL:
                records.append(record_of_request(each, seen))
                if any(request is one for one in only):
                    named.append(records[-1])
    return named or records


def polls() -> list[Record]:
    """Return the unsuccessful probes of the last seconds; called about once a second."""
    global _polls_from
    is_later = time.monotonic() > _polls_from + POLLED_WITHIN
    _polls_from = time.monotonic() if is_later else _polls_from
    records = []
    for seen in list(SEEN):
        if is_later:
            seen.polled_before, seen.polled = seen.polled, set()
        probes = seen.polled | seen.polled_before
        if len(probes) > MOST_POLLS:
            probes = {(name, MPI.ANY_SOURCE, MPI.ANY_TAG) for name, _, _ in probes}
        for name, source, tag in probes:
            records.append(_record(seen, name, 0, {"source": source, "tag": tag}, ""))
    return records


def record_of_request(started: Started, seen: Seen, where: str = "") -> Record:
    """Return the record of a started call."""
    request, name, number, *arguments = started
    bound = {each.name: argument for each, argument in zip(_parameters(name)[1:], arguments, strict=True)}
    record = _record(seen, name, number, bound, where, async_op=True)
    if isinstance(request, Prequest) and hasattr(request, "size"):
        record.dtype, record.count, record.nbytes = request.size
    return record


def _facts() -> dict[str, dict[str, Any]]:
    return {seen.key: seen.facts() for seen in list(SEEN)}


def _record(
    seen: Seen, name: str, number: int, arguments: Mapping[str, Any], where: str, async_op: bool = False
) -> Record:
    dtype, count, nbytes = _size(arguments)
    op, peer, tag = arguments.get("op"), None, None
    if "root" in arguments:
        peer = arguments["root"]
    elif "source" in arguments and "dest" not in arguments:
        peer, tag = arguments["source"], arguments.get("tag")
    elif "dest" in arguments:
        peer, tag = arguments["dest"], arguments.get("tag", arguments.get("sendtag"))
    return Record(
        name,
        number,
        seen.key,
        seen.name,
        dtype=dtype,
        count=count,
        nbytes=nbytes,
        op="" if op is None else _ops().get(getattr(op, "handle", None), "an op of the program"),
        peer=peer if isinstance(peer, int) and peer >= 0 else None,
        tag=tag if isinstance(tag, int) and tag != MPI.ANY_TAG else None,
        async_op=async_op,
        where=where,
    )


@cache
def _ops() -> dict[int | None, str]:
    names = ("MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MAXLOC", "MINLOC", "REPLACE")
    return {getattr(MPI, name).handle: name for name in names}


def _size(arguments: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the dtype, the number of elements and the bytes of the first buffer among the arguments."""
    for name in BUFFERS:
        array = count = arguments.get(name)
        if isinstance(array, tuple) and isinstance(array[0], np.dtype):  # stored by KEPT
            return str(array[0]), array[1], array[1] * array[0].itemsize
        if isinstance(array, list | tuple) and array:
            count = next((int(each) for each in array[1:] if isinstance(each, int | np.integer)), None)
            array = array[0]
        dtype, size = getattr(array, "dtype", None), getattr(array, "size", None)
        if dtype is not None and isinstance(size, int):
            count = count if isinstance(count, int) else size
            return str(dtype), count, count * dtype.itemsize
        if isinstance(array, bytes | bytearray | memoryview):
            return "bytes", len(array), len(array)
    return "", 0, 0
