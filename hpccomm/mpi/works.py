"""Works of MPI requests."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.timeouts import MAIN, pause, pauses
from ..core.work import Progress, Work, both, repeatable
from ..errors import DistBackendError, DistError, RankFailedError, on_rank
from ..job import failures
from ..native import fastpath
from .layout import Finish


class MPIWork(Work):
    """An operation of one MPI request.

    `alive` are the arrays that MPI accesses: mpi4py 4.1 keeps them for some requests but not for others (reductions,
    Iscatterv on the root ...).
    """

    progress = Progress(can_be_left=True)

    def __init__(self, request: MPI.Request, finish: Finish, alive: Any) -> None:
        self._finish = finish  # without super(), which is slow: every message has a Work
        self._request = request
        self.alive = alive

    def poll(self) -> bool:
        """Return whether the request is complete; this also lets MPI make progress."""
        return self._request.Test()

    def block(self) -> None:
        """Wait for the request, while other threads run."""
        wait_for([self._request], [MPI.Status()])

    def receive(self) -> Any:
        """Complete a blocking receive outside the main thread, and return the sender."""
        self.block()
        if self._finish is not None:
            self._finish()
        return self.source

    def translate_error(self, error: Exception) -> Exception:
        """Return the error that the program should see for an error of MPI."""
        translated = as_backend_error(self.op_type, error, self.group.comm if self.group else None)
        if isinstance(translated, RankFailedError):
            failures.unsafe_buffers.append(self.alive)  # a survivor's message may still arrive in it
        return translated


class MPIWorks(MPIWork):
    """An operation of several MPI requests."""

    def __init__(self, requests: list[MPI.Request], finish: Finish, alive: Any) -> None:
        self._finish = finish
        self.alive = alive
        self._requests = requests
        self._statuses: list[MPI.Status] = []

    def poll(self) -> bool:
        """Return whether every request is complete; this also lets MPI make progress."""
        if not any(self._requests):  # interrupted after the requests were complete
            return True
        self._statuses = [MPI.Status() for _ in self._requests]
        return MPI.Request.Testall(self._requests, self._statuses)

    def block(self) -> None:
        """Wait for every request, while other threads run."""
        if any(self._requests):
            self._statuses = [MPI.Status() for _ in self._requests]
            wait_for(self._requests, self._statuses)

    def translate_error(self, error: Exception) -> Exception:
        """Translate like MPIWork; the error is that of one of the requests."""
        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_IN_STATUS:
            codes = [status.Get_error() for status in self._statuses]
            error = MPI.Exception(next(code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)))
        return super().translate_error(error)


class ReceiveWork(MPIWork):
    """A receive: it knows the sender, detects messages that are too short, and can be cancelled."""

    def __init__(self, request: MPI.Request, nbytes: int, finish: Finish, alive: Any) -> None:
        self._finish = finish
        self._request = request
        self.alive = alive
        self._nbytes = nbytes

    def poll(self) -> bool:
        """Poll like MPIWork, and check the message."""
        if self._request:  # null if this was interrupted after the message had come
            self._message = MPI.Status()
            if not self._request.Test(self._message):
                return False
        self.source = check_length("", self._message, self._nbytes)
        return True

    def block(self) -> None:
        """Wait like MPIWork, and check the message."""
        if self._request:
            self._message = MPI.Status()
            wait_for([self._request], [self._message])
        self.source = check_length("", self._message, self._nbytes)

    def cancel(self) -> bool:
        """Cancel the receive (MPI_Cancel); return False if it is matched already: it completes (MPI-4.1 §3.8.4)."""
        if self._request:  # null if this was interrupted
            self._message = MPI.Status()
            self._request.Cancel()
            wait_for([self._request], [self._message])
        return self._message.Is_cancelled()


class ExchangeWork(MPIWorks):
    """Receives, then sends, in flight together. It detects messages that are too short; `sizes`: bytes to receive."""

    def __init__(self, requests: list[Any], sizes: list[int], finish: Finish, *alive: Any) -> None:
        super().__init__(requests, finish, alive)
        self._sizes = sizes

    def poll(self) -> bool:
        """Poll like MPIWorks, and check the messages."""
        is_done = super().poll()
        if is_done:
            self._check()
        return is_done

    def block(self) -> None:
        """Wait like MPIWorks, and check the messages."""
        super().block()
        self._check()

    def _check(self) -> None:
        for status, nbytes in zip(self._statuses, self._sizes):
            check_length("", status, nbytes)


class SendReceiveWork(ExchangeWork):
    """A receive and a send. It can't be cancelled: MPI-4.1 has deprecated the cancelling of sends."""

    def _check(self) -> None:
        self.source = check_length("", self._statuses[0], self._sizes[0])


def wait_for(requests: list[Any], statuses: list[MPI.Status]) -> None:
    """Wait for requests; outside the main thread by MPI_Test, so that the end of the program can stop the thread."""
    if get_ident() == MAIN:
        if len(requests) == 1:  # Waitall would hide the error class
            requests[0].Wait(statuses[0])
        else:
            MPI.Request.Waitall(requests, statuses)
    elif fastpath is not None:
        fastpath.wait_for_requests(*(np.fromiter(map(MPI._addressof, each), np.uintp) for each in (requests, statuses)))
        for request in requests:
            request.Wait()  # mpi4py drops its references to buffers
    else:
        errors = []
        for request, status in zip(requests, statuses, strict=True):
            looks = pauses()
            try:
                while not request.Test(status):
                    pause(next(looks))
            except MPI.Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def wait_for_all(requests: list[Any]) -> None:
    """Wait for requests, as `wait_for` does, without statuses."""
    if get_ident() == MAIN:
        return MPI.Request.Waitall(requests)  # type: ignore[return-value]
    looks = pauses()
    while not MPI.Request.Testall(requests):
        pause(next(looks))


def done(request: MPI.Request | None, finish: Finish, *alive: Any) -> Work | None:
    """Return a Work for the request that an MPI call returned; after a blocking call, finish and return None."""
    if request is not None:
        return MPIWork(request, repeatable(finish), alive)
    if finish is not None:
        repeatable(finish)()
    return None


def all_done(requests: Sequence[MPI.Request | None], finish: Finish, *alive: Any) -> Work | None:
    """Return one Work for the requests of several calls, like `done`."""
    pending = [request for request in requests if request is not None]
    if len(pending) < 2:
        return done(pending[0] if pending else None, finish, *alive)
    return MPIWorks(pending, repeatable(finish), alive)


def joined(works: list[Any], finish: Finish) -> Work | None:
    """Return one Work for MPIWorks, the parts of a composed operation; `finish` runs after the last steps of the parts.

    None instead of a Work: that part is complete.
    """
    requests: list[MPI.Request] = []
    alive = []
    for of_part, its_finish, arrays in [parts_of(work) for work in works if work is not None]:
        requests += of_part
        alive.append(arrays)
        finish = both(its_finish, finish)
    return all_done(requests, finish, alive)


def parts_of(work: MPIWork) -> tuple[list[Any], Finish, Any]:
    """Return the requests, the last step and the arrays of a Work."""
    return work._requests if isinstance(work, MPIWorks) else [work._request], work._finish, work.alive


def received(operation: str, status: MPI.Status, buffer: Any, finish: Finish) -> int:
    """Check and unpack a received message, and return its sender."""
    source = check_length(operation, status, buffer.nbytes)
    if finish is not None:
        finish()
    return source


def check_length(operation: str, status: MPI.Status, expected: int) -> int:
    """Return the sender of a message; raise if it is shorter than its array (MPI itself refuses longer ones)."""
    if status.Get_elements(MPI.BYTE) != expected:
        raise wrong_length(operation, status.Get_elements(MPI.BYTE), expected)
    return status.Get_source()


def wrong_length(operation: str, nbytes: int, expected: int) -> DistBackendError:
    """Return the error of a message that was shorter than its array."""
    return DistBackendError(
        f"the message has {nbytes} bytes, but the array {expected}; at most its first part was written. Send and "
        f"receive arrays of one dtype and size{on_rank()}",
        operation,
    )


def as_backend_error(operation: str, error: Exception, comm: MPI.Intracomm | None) -> Exception:
    """Return a DistBackendError with MPI's text for an error of MPI, and any other error unchanged.

    If ranks have died it is a RankFailedError, and the ranks that wait for them are woken. `comm` is the group's.
    """
    if not isinstance(error, MPI.Exception) or isinstance(error, DistError):
        return error
    return failures.translated(operation, error, comm) or failures.backend_error(operation, error)
