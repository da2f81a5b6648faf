"""The communicators of mpi4py, of subclasses that count the calls of each; programs see no difference.

A call is a Python frame of this module while it lasts, which the watchdog finds on the stack, with its arguments: that
costs the call nothing but the count. Requests are kept until they have ended, so that a wait can be named.
"""

from __future__ import annotations

import copyreg
import inspect
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import cache, cached_property, reduce
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI

from ..core.timeouts import as_seconds
from ..debug.groups_seen import key_from
from ..debug.mpi_calls import CALLS, DUPLICATING, MAKING, STARTS
from ..debug.records import Record
from ..debug.sources import SOURCES, Source
from ..job.failures import ranks_in_the_job

if TYPE_CHECKING:
    from ..core.group import ProcessGroup

REMEMBERED = 8  # names of collectives, for reports
IN_FLIGHT = 64  # requests of a communicator
PREDEFINED = ("COMM_WORLD", "COMM_SELF")
BUFFERS = ("sendbuf", "buf", "recvbuf")
CLASSES = (MPI.Intracomm, MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intercomm)


class Seen:
    """What is known of a communicator, whichever of Python's objects names it."""

    def __init__(self, comm: MPI.Comm, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks  # in MPI.COMM_WORLD
        self.collectives = self.messages = 0
        self.names: deque[str | tuple[str, Any]] = deque(maxlen=REMEMBERED)  # of the last collectives; with the root
        self.requests: deque[Started] = deque(maxlen=IN_FLIGHT)
        _made[ranks] += 1
        self._edition = _made[ranks]
        SEEN.add(self)

    @cached_property
    def key(self) -> str:
        """Return a name that is the same on every rank of the communicator."""
        return key_from("MPI", self.ranks, self._edition)

    @property
    def sequence_number(self) -> int:
        """The number of the last collective."""
        return self.collectives

    @property
    def message_number(self) -> int:
        """The number of the last message of this rank."""
        return self.messages

    def facts(self) -> dict[str, Any]:
        """Return what a report says of it."""
        names = list(self.names)
        first = self.collectives - len(names) + 1
        recent = [_passed(number, name) for number, name in enumerate(names, first)]
        counts = {"collectives": self.collectives, "messages": self.messages, "since": first}
        return {"name": self.name, "ranks": list(self.ranks), **counts, "recent": recent}


def _passed(number: int, called: str | tuple[str, Any]) -> list[Any]:
    """Return what a report says of a collective that has been called."""
    if isinstance(called, str):
        return [number, called, "", 0]
    name, root = called
    return [number, name, "", 0, -1, "", root if isinstance(root, int) else None, False]


# A request, and the call that it stands for: its name, number, arguments without the buffer, and the caller's line.
Started: TypeAlias = tuple[MPI.Request, str, int, tuple[Any, ...], Mapping[str, Any], CodeType, int]

Wrapping: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # of a method and its name

SEEN: weakref.WeakSet[Seen] = weakref.WeakSet()
MADE: list[Callable[[Any, Seen], None]] = []  # who wants to know of each new communicator, on every rank of it
_made: Counter[tuple[int, ...]] = Counter()


@cache
def _signature(name: str) -> inspect.Signature:
    method = next(getattr(base, name) for base in CLASSES if hasattr(base, name))
    return inspect.signature(method)


def _collective(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def collective(self: Any, *arguments: Any, **named: Any) -> Any:
        seen = self._seen
        seen.collectives += 1
        seen.names.append(name)
        return call(self, *arguments, **named)

    return collective


def _rooted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    place = list(_signature(name).parameters).index("root") - 1

    def rooted(self: Any, *arguments: Any, **named: Any) -> Any:
        seen = self._seen
        seen.collectives += 1
        root = arguments[place] if len(arguments) > place else named.get("root", 0)
        seen.names.append((name, root))  # a root that differs may let other ranks pass
        return call(self, *arguments, **named)

    return rooted


def _message(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def message(self: Any, *arguments: Any, **named: Any) -> Any:
        self._seen.messages += 1
        return call(self, *arguments, **named)

    return message


def _starts(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    is_a_message = CALLS[name].is_a_message

    def starts(self: Any, *arguments: Any, **named: Any) -> Any:
        seen = self._seen
        if is_a_message:
            seen.messages += 1
            number = seen.messages
        else:
            seen.collectives += 1
            seen.names.append(name)
            number = seen.collectives
        request = call(self, *arguments, **named)
        caller = sys._getframe(1)
        seen.requests.append((request, name, number, arguments[1:], named, caller.f_code, caller.f_lineno))
        return request

    return starts


def _makes(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def makes(self: Any, *arguments: Any, **named: Any) -> Any:
        seen = self._seen
        seen.collectives += 1
        seen.names.append(name)
        return watched(call(self, *arguments, **named), f"{name} #{seen.collectives} of {seen.name}")

    return makes


def _duplicates(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def duplicates(self: Any, *arguments: Any, **named: Any) -> Any:
        seen = self._seen
        seen.collectives += 1
        seen.names.append(name)
        made, request = call(self, *arguments, **named)
        made._seen = Seen(made, f"{name} #{seen.collectives} of {seen.name}", seen.ranks)  # MPI can't be asked yet
        return made, request

    return duplicates


def _makes_of_some(_: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def makes_of_some(self: Any, *arguments: Any, **named: Any) -> Any:
        return watched(call(self, *arguments, **named), f"Create_group of {self._seen.name}")

    return makes_of_some


def _known(comm: Any, name: str) -> Any:
    """Return the facts of a copy, ``type(comm)(comm)``, which nothing has wrapped."""
    if name != "_seen":
        raise AttributeError(f"{type(comm).__name__!r} object has no attribute {name!r}", name=name, obj=comm)
    like = next((each for each in (getattr(MPI, name) for name in PREDEFINED) if each == comm), None)
    comm._seen = Seen(comm, comm.Get_name(), _members(comm)) if like is None else like._seen
    return comm._seen


def _freeing(call: Callable[[Any], None]) -> Callable[[Any], None]:
    def free(self: Any) -> None:
        """Call `Free` if not null or predefined."""
        if not any(self is getattr(MPI, name) for name in PREDEFINED):  # mpi4py's own objects have a mark
            call(self)

    return free


def _reduce(comm: Any) -> Any:
    """Let pickle take what mpi4py's own class lets it take: the predefined communicators, by name."""
    for name in PREDEFINED:
        predefined = getattr(MPI, name)
        if comm is predefined:
            return name
        if comm == predefined:
            return MPI.Intracomm, (predefined,)
    return plain(comm).__reduce__()  # which is refused


def _watching(base: type[MPI.Comm]) -> Any:
    """Return the subclass of a class of communicators whose calls are counted."""
    methods: dict[str, Any] = {
        "__slots__": ("_seen",),
        "__module__": base.__module__,  # where pickle finds COMM_WORLD
        "__doc__": base.__doc__,
        "__reduce__": _reduce,
        "__getattr__": _known,
        "free": _freeing(base.free),
    }
    return _Watching(base.__name__, (base,), methods | _counting(base, lambda _, call: call))


def _counting(base: type[MPI.Comm], wrapped: Wrapping) -> dict[str, Callable[..., Any]]:
    """Return the methods that count the calls of a class of communicators, and do what `wrapped` makes of its own."""
    methods = {}
    for name in dir(base):
        spec = CALLS.get(name)
        make: Callable[[str, Callable[..., Any]], Callable[..., Any]]
        if name == "Create_group":
            make = _makes_of_some
        elif spec is None:
            continue
        elif name in DUPLICATING:
            make = _duplicates
        elif name in MAKING:
            make = _makes
        elif name in STARTS:
            make = _starts
        elif "root" in spec.arguments:
            make = _rooted
        else:
            make = _message if spec.is_a_message else _collective
        call = getattr(base, name)
        method = make(name, call if make is _makes_of_some else wrapped(name, call))  # these are not numbered
        method.__name__, method.__qualname__, method.__doc__ = name, f"{base.__name__}.{name}", call.__doc__
        method.__dict__["__wrapped__"] = call
        methods[name] = method
    return methods


class _Watching(type):
    """The type of the subclasses: each is equal to mpi4py's own class, as ``type(comm) == MPI.Intracomm`` asks."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.__base__ is other

    def __hash__(cls) -> int:
        return hash(cls.__base__)


WATCHING: dict[type[MPI.Comm], Any] = {base: _watching(base) for base in CLASSES}
MAKERS = (_collective, _rooted, _message, _starts, _makes, _duplicates, _makes_of_some)
CODES = {make("Bcast", print).__code__ for make in MAKERS}


def watched(comm: Any, name: str) -> Any:
    """Return the communicator as one whose calls are counted; what is none stays as it is."""
    if isinstance(comm, tuple):  # of Create_dist_graph with weights, and the like
        return type(comm)(watched(each, name) for each in comm)
    own = WATCHING.get(type(comm))
    if own is None or comm == MPI.COMM_NULL:
        return comm
    watching: Any = comm if type(comm) is own else own(comm)
    watching._seen = Seen(comm, name, _members(comm))
    for each in MADE:
        each(watching, watching._seen)
    return watching


def _members(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks of a communicator in MPI.COMM_WORLD."""
    members = comm.Get_group()
    ranks = ranks_in_the_job(members)
    members.Free()
    return tuple(ranks)


def plain(comm: Any) -> Any:
    """Return the communicator as mpi4py's own class of it."""
    base = next((base for base, own in WATCHING.items() if type(comm) is own), None)
    return comm if base is None else base(comm)


def install(group: ProcessGroup, accelerates: bool = False) -> None:
    """Watch the calls on MPI.COMM_WORLD, MPI.COMM_SELF and what is made of them; the time limit is that of `group`.

    `accelerates`: large reductions of host arrays are hpccomm's.
    """
    layers = _layers(group, accelerates)
    if layers:
        for base, own in WATCHING.items():
            methods = _counting(base, lambda name, call: reduce(lambda inner, layer: layer(name, inner), layers, call))
            for name, method in methods.items():
                setattr(own, name, method)
    for name in PREDEFINED:
        setattr(MPI, name, watched(getattr(MPI, name), name))
    copyreg.pickle(MPI.Intracomm, _reduce)  # its own method would name an object that MPI has no more
    SOURCES.append(Source(group, CODES, record_of, requests_in_flight, _facts))


def _layers(group: ProcessGroup, accelerates: bool) -> list[Wrapping]:
    """Return what is done around each call of mpi4py's, the innermost first."""
    layers: list[Wrapping] = []
    if accelerates:
        from .accelerated import AcceleratedCalls

        layers.append(AcceleratedCalls(as_seconds(group.timeout)).accelerating)
    if group.settings.debug == "DETAIL":
        from .compared import ComparedCalls

        compared = ComparedCalls()
        MADE.append(compared.begin)
        layers.append(compared.comparing)
    if group.settings.trace != "0":
        from ..debug.trace.recorder import recorder
        from .recorded import RecordedCalls

        recording = recorder()
        assert recording is not None  # it has begun with the group
        layers.append(RecordedCalls(recording).recording)
    return layers


# -- what a call on the stack, or a request, is ----------------------------------------------------------------


def record_of(frame: FrameType, where: str) -> Record | None:
    """Return the record of the call that a frame of this module is in; None if its communicator is not known."""
    inside = frame.f_locals
    seen = getattr(inside["self"], "_seen", None)
    if seen is None:
        return None
    return describe(seen, inside["call"].__name__, inside["arguments"], inside["named"], where)[0]


def describe(
    seen: Seen, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any], where: str
) -> tuple[Record, Mapping[str, Any]]:
    """Return the record of the call that has been counted last, and its arguments by name."""
    is_a_message = CALLS[name].is_a_message if name in CALLS else False
    bound = _bound(name, arguments, named)
    return _record(seen, name, seen.messages if is_a_message else seen.collectives, bound, where), bound


def comparable(comm: Any, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any], where: str) -> Record:
    """Return the record of the call that has been counted last, without what may differ in a right program."""
    record, bound = describe(comm._seen, name, arguments, named, where)
    record.async_op = name in STARTS
    is_inter = comm.Is_inter()
    if is_inter:
        record.peer = None  # a rank of the other side
    if is_inter or record.dtype == "bytes" or any(_has_a_datatype(bound.get(each)) for each in BUFFERS):
        record.dtype, record.count = "", -1
    return record


def _has_a_datatype(buffer: Any) -> bool:
    return isinstance(buffer, list | tuple) and any(isinstance(each, MPI.Datatype | str) for each in buffer)


def requests_in_flight() -> list[Record]:
    """Return the records of the requests that have not ended; MPI is not asked."""
    records = []
    for seen in list(SEEN):
        for request, name, number, arguments, named, code, line in list(seen.requests):
            if request != MPI.REQUEST_NULL:
                bound = _bound(name, (None, *arguments), named)
                where = f"{code.co_filename}:{line}"
                records.append(_record(seen, name, number, bound, where, async_op=True))
    return records


def _facts() -> dict[str, dict[str, Any]]:
    return {seen.key: seen.facts() for seen in list(SEEN)}


def _bound(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, with the defaults of the others."""
    try:
        bound = _signature(name).bind(None, *arguments, **named)
    except TypeError:  # the call is about to raise
        return {}
    bound.apply_defaults()
    return bound.arguments


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
        op="" if op is None else _ops().get(op.handle, "an op of the program"),
        peer=peer if isinstance(peer, int) and peer >= 0 else None,
        tag=tag if isinstance(tag, int) and tag != MPI.ANY_TAG else None,
        async_op=async_op,
        where=where,
    )


@cache
def _ops() -> dict[int, str]:
    names = ("MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MAXLOC", "MINLOC", "REPLACE")
    return {getattr(MPI, name).handle: name for name in names}


def _size(arguments: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the dtype, the number of elements and the bytes of the first buffer among the arguments."""
    for name in BUFFERS:
        array = count = arguments.get(name)
        if isinstance(array, list | tuple) and array:
            count = next((each for each in array[1:] if isinstance(each, int)), None)
            array = array[0]
        dtype, size = getattr(array, "dtype", None), getattr(array, "size", None)
        if dtype is not None and isinstance(size, int):
            count = count if isinstance(count, int) else size
            return str(dtype), count, count * dtype.itemsize
        if isinstance(array, bytes | bytearray | memoryview):
            return "bytes", len(array), len(array)
    return "", 0, 0
