"""Records of the calls on watched communicators, in the format of the recorder of operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..debug.mpi_calls import CALLS, STARTS
from ..debug.records import Record
from ..debug.ring import line
from ..debug.trace import recorder as recorders
from ..debug.trace.clock import now
from .persistent import STARTED

if TYPE_CHECKING:
    from ..debug.trace.recorder import Recorder
    from .communicators import Seen

IN_FLIGHT = 1000  # requests whose completion is awaited


class RecordedCalls:
    """The last calls on this process's watched communicators."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._records: deque[Record] = deque(maxlen=recorder.size)
        self._started: deque[tuple[MPI.Request, Record]] = deque(maxlen=IN_FLIGHT)
        recorder.others.append(self)
        STARTED.append(self._start)

    def recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return mpi4py's method, wrapped to record its calls; the call has been counted before."""
        if name.endswith("_init") and CALLS[name].is_a_message:
            return call

        def recorded(comm: Any, *arguments: Any) -> Any:
            record = self._begin(comm, name, arguments)
            try:
                outcome = call(comm, *arguments)
            except BaseException:
                record.end, record.state = now(), "failed"
                raise
            if name in STARTS:
                self._started.append((outcome, record))
            else:
                record.end, record.state = now(), "completed"
            return outcome

        return update_wrapper(recorded, call)

    def _begin(self, comm: Any, name: str, arguments: tuple[Any, ...]) -> Record:
        from .communicators import comparable

        return self._keep(comm._seen, comparable(comm, name, arguments, self._where()))

    def _start(self, request: Any) -> None:
        """Record the start of a persistent request."""
        from .communicators import record_of_request

        record = record_of_request(request.as_started(), request.seen, self._where())
        self._started.append((request, self._keep(request.seen, record)))

    def _where(self) -> str:
        place = recorders.caller() if self._recorder.stack else None
        return "" if place is None else line(*place)

    def _keep(self, seen: Seen, record: Record) -> Record:
        self._see_what_has_ended()
        self._recorder.trace(seen, seen.key, seen.ranks)
        self._records.append(record)
        record.begin = now()
        return record

    def _see_what_has_ended(self) -> None:
        """Mark completed requests, without calling MPI."""
        for _ in range(len(self._started)):
            request, record = started = self._started.popleft()
            if request != MPI.REQUEST_NULL and getattr(request, "number", record.number) == record.number:
                self._started.append(started)
            else:
                record.end, record.state = now(), "completed"

    def records(self) -> list[Record]:
        """Return the last calls, including those in flight."""
        self._see_what_has_ended()
        return [replace(record) for record in list(self._records)]

    def mark(self) -> Any:
        """Return a value that changes with every call."""
        return self._records[-1].begin if self._records else None
