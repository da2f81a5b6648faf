"""Requests of hpccomm's operations: real MPI requests, which a thread completes when their Works complete.

Over NCCL, messages between GPUs that cross must begin in the same group call (ncclGroupStart): a message that began
alone would block the stream, and the others with it. So non-blocking messages are collected until the program waits for
one of them or makes another call. ``MPI.Request`` becomes a class whose static methods notice such waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Literal, cast

from mpi4py import MPI

from ..core.calls import Call
from ..core.dispatcher import batch
from ..core.group import ProcessGroup
from ..core.joined_work import JoinedWork
from ..core.work import Work
from ..errors import DistError, on_rank
from .calls import Step
from .stand_ins import LikeItsBase, from_handles, stand_in

if TYPE_CHECKING:
    from mpi4py.MPI import Prequest as _Base
else:
    _Base = object  # `install` adds mpi4py's classes as the other base

PREQUEST = MPI.Prequest


class Messages:
    """The messages of a group that the program has called for but that have not begun."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.waiting: list[tuple[list[Call], OfAWork]] = []

    def begin(self, calls: list[Call] | None = None) -> list[Work]:
        """Begin all messages together with those of `calls`; return the Works of `calls`."""
        waiting, self.waiting = self.waiting, []
        together = [call for each, _ in waiting for call in each] + (calls or [])
        works = batch([(self.group.dispatcher, call) for call in together])
        for each, request in waiting:
            own, works = works[: len(each)], works[len(each) :]
            request.follow(own[0] if len(own) == 1 else _Sendrecv(own))
        return works


class _Sendrecv(JoinedWork):
    @property
    def source(self) -> int | None:  # type: ignore[override]
        """The sender of the received message."""
        return self._works[-1].source


class OfAWork(_Base):
    """The common part of the requests: a Work, and the handle of a generalized request (MPI-4.1 §13.2)."""

    _work: Work | None = None
    _messages: Messages | None = None  # set while the request waits to begin

    def open(self, step: Step, messages: Messages | None = None) -> None:
        """Create the MPI request; the operation begins now, or later with `messages`."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise DistError(
                f"requests of GPU arrays need MPI_THREAD_MULTIPLE, which MPI was not initialised with; leave "
                f"mpi4py.rc.thread_level as it is{on_rank()}"
            )
        works: list[Work] = []

        def fill(status: MPI.Status) -> None:
            (work,) = works
            if work.exception() is not None:
                raise MPI.Exception(MPI.ERR_OTHER)
            fill_status(status, step, work.source)

        general = MPI.Grequest.Start(fill)
        is_ended = threading.Lock()

        def end(_: object = None) -> None:
            if is_ended.acquire(blocking=False):
                general.Complete()

        self._works, self._end, self._messages = works, end, messages
        # An mpi4py request stores one handle: copy the generalized request's handle into this object.
        ctypes.memmove(MPI._addressof(self), MPI._addressof(general), MPI._sizeof(MPI.Request))

    def follow(self, work: Work) -> None:
        """Attach the Work of the operation that has begun."""
        self._messages, self._work = None, work
        self._works.append(work)
        work.get_future().add_done_callback(self._end)

    def begin(self) -> None:
        """Begin the operation if it has not begun."""
        if self._messages is not None:
            self._messages.begin()

    def finish(self) -> None:
        """Wait for the Work in the calling thread, which completes it sooner than the progress thread."""
        self.begin()
        if self._work is not None:
            self._work.wait()
            self._end()
            self._work = None

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait for the operation; for GPU arrays, the current stream waits and the host does not."""
        self.finish()
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return True if the operation has completed."""
        return self._may_have_ended() and super().Test(status)

    def _may_have_ended(self) -> bool:
        self.begin()
        if self._work is not None and not self._work.is_completed():
            return False
        self.finish()
        return True

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Wait for the operation."""
        self.finish()
        return super().wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """Return True if the operation has completed, and mpi4py's object: None for an operation on arrays."""
        return super().test(status) if self._may_have_ended() else (False, None)


class OfRepeatedWork(OfAWork):
    """An ``MPI.Prequest`` that begins `operation` at each start. Without an operation it behaves like mpi4py's own."""

    operation: Callable[[OfRepeatedWork], object] | None = None

    def Start(self) -> None:
        """Begin the operation."""
        if self.operation is None:
            return super().Start()
        if self._messages is not None or (self._work is not None and not self._work.has_ended()):
            raise DistError(f"Start: this request has begun before, and has not ended: Wait() first{on_rank()}")
        self.operation(self)
        return None

    def Free(self) -> None:
        """Forget the operation, which must not be in flight."""
        if self.operation is None:
            return super().Free()
        self.operation = _freed
        return None


def _freed(_: OfRepeatedWork) -> None:
    raise DistError(f"Start: this request has been freed{on_rank()}")


def fill_status(status: MPI.Status | None, step: Step, source: int | None) -> None:
    """Set a Status to the received message."""
    if status is None:
        return
    array = step.received
    status.Set_source(MPI.PROC_NULL if array is None or source is None else source)
    status.Set_tag(MPI.ANY_TAG if array is None else step.tag)
    status.Set_elements(MPI.BYTE, 0 if array is None else array.nbytes)
    status.Set_cancelled(False)


# -- MPI.Request and MPI.Prequest ---------------------------------------------------------------------

_WAITS_FOR_ALL = ("Waitall", "waitall")
_OTHER_WAITS = ("Waitany", "Waitsome", "Testall", "Testany", "Testsome")
_STATIC = (*_WAITS_FOR_ALL, *_OTHER_WAITS, *map(str.lower, _OTHER_WAITS))


def _looking(name: str, own: Callable[..., Any]) -> Any:
    """Return a static method that begins hpccomm's requests; the variants that wait for all also finish them."""

    def look(requests: Any, *arguments: Any, **named: Any) -> Any:
        ours = [each for each in requests if isinstance(each, OfAWork)]
        for each in ours:
            each.begin()
        if name in _WAITS_FOR_ALL:
            for each in ours:
                each.finish()
        return own(requests, *arguments, **named)

    return staticmethod(update_wrapper(look, own))


def _of_any(name: str, own: type, base: Any) -> Any:
    """Return a method that takes any request: `own`'s for its instances, mpi4py's for others."""
    ours, plain = getattr(own, name), getattr(base, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return (ours if isinstance(self, own) else plain)(self, *arguments, **named)

    return update_wrapper(method, plain)


def _start_all(requests: list[MPI.Prequest]) -> None:
    """Start all requests."""
    for each in requests:
        each.Start()


def install() -> None:
    """Replace ``MPI.Request`` and ``MPI.Prequest``; requests of GPU arrays have exactly these classes."""
    if not isinstance(cast(Any, MPI.Request), LikeItsBase):
        statics: dict[str, Any] = {
            name: _looking(name, getattr(MPI.Request, name)) for name in _STATIC if hasattr(MPI.Request, name)
        }
        waits = ("Wait", "Test", "wait", "test")
        own = {"Startall": staticmethod(_start_all)} | from_handles(MPI.Prequest)
        own |= {name: _of_any(name, OfRepeatedWork, MPI.Prequest) for name in (*waits, "Start", "Free")}
        MPI.Prequest = stand_in(MPI.Prequest, statics | own, OfRepeatedWork)  # type: ignore[misc]
        own = from_handles(MPI.Request) | {name: _of_any(name, OfAWork, MPI.Request) for name in waits}
        MPI.Request = stand_in(MPI.Request, statics | own, OfAWork)  # type: ignore[misc]


def as_prequest(made: Any) -> Any:
    """Return the result of an mpi4py call; a persistent request becomes an ``MPI.Prequest``."""
    if type(made) is PREQUEST:
        return MPI.Prequest(made)
    if type(made) is cast(Any, MPI.Prequest).__base__:  # from a communicator that hpccomm run watches
        made.__class__ = MPI.Prequest
    return made
