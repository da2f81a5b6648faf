"""Persistent and partitioned requests of watched communicators: each start counts as a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..debug.mpi_calls import CALLS
from ..mpi4py.stand_ins import from_handles, stand_in

if TYPE_CHECKING:
    from .communicators import Seen, Started

BASE = MPI.Prequest
STARTED: list[Callable[[Any], None]] = []  # called at each start
_KNOWN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # keyed by id: requests compare by handle


def _start(self: Any) -> None:
    _number(self)
    BASE.Start(self)


def _start_all(requests: list[Any]) -> None:
    for each in requests:
        _number(each)
    BASE.Startall(requests)


def _wait(self: Any, status: MPI.Status | None = None) -> Any:
    outcome = BASE.Wait(self, status)
    self.number = 0
    return outcome


def _test(self: Any, status: MPI.Status | None = None) -> bool:
    is_done = BASE.Test(self, status)
    if is_done:
        self.number = 0
    return is_done


def _number(request: Any) -> None:
    """Count a start; ignore requests that no watched communicator has made."""
    seen: Seen | None = getattr(request, "seen", None)
    if seen is None:
        return
    if CALLS[request.name].is_a_message:
        seen.message_number = number = seen.message_number + 1
    else:
        seen.sequence_number = number = seen.sequence_number + 1
        seen.names.append(request.name)
    request.number = number
    for each in STARTED:
        each(request)


def _as_started(self: Any) -> Started:
    return self, self.name, self.number, *self.arguments


def _methods() -> dict[str, Any]:
    own: dict[str, Any] = {"Start": _start, "Wait": _wait, "Test": _test, "Startall": _start_all}
    methods = {name: update_wrapper(method, getattr(BASE, name)) for name, method in own.items()}
    methods["Startall"] = staticmethod(methods["Startall"])  # type: ignore[assignment]
    methods |= from_handles(BASE)
    methods["as_started"] = _as_started  # type: ignore[assignment]
    return methods


Prequest: Any = stand_in(BASE, _methods())


def persistent(request: Any, seen: Seen, name: str, arguments: tuple[Any, ...], size: tuple[str, int, int]) -> Any:
    """Return a request whose starts are counted; `arguments` lacks the first one, of which `size` is the size."""
    watched = Prequest(request)
    watched.seen, watched.name, watched.arguments, watched.size = seen, name, arguments, size
    watched.number = 0  # of the last start, until the request is known to be complete
    _KNOWN[id(watched)] = watched
    return watched


def started(seen: Seen) -> list[Started]:
    """Return a communicator's started requests that are not known to be complete.

    After a Waitall of several requests, their completion is not known.
    """
    mine = [each for each in list(_KNOWN.values()) if each.seen is seen and each.number]
    return [_as_started(each) for each in mine]
