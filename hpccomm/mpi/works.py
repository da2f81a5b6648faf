"""Works around MPI requests."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ..core.work import Work
from ..errors import DistBackendError, DistError, here
from .layout import Finish


class MPIWork(Work):
    """An operation of one or more MPI requests.

    `alive` are the arrays whose memory MPI works on: mpi4py's requests keep the buffers of some operations alive and
    not those of others (mpi4py 4.1: not those of reductions, of the root of Iscatterv, ...).
    """

    def __init__(self, requests: list[MPI.Request], finish: Finish, *alive: Any) -> None:
        super().__init__(finish)
        self.alive = alive
        self._requests = requests

    def poll(self) -> bool:
        """Say whether every request is complete; this also lets MPI make progress."""
        if len(self._requests) == 1:
            return self._requests[0].Test()
        return MPI.Request.Testall(self._requests, self._statuses())

    def block(self) -> None:
        """Wait for every request; other threads run meanwhile."""
        if len(self._requests) == 1:
            self._requests[0].Wait()
        else:
            MPI.Request.Waitall(self._requests, self._statuses())

    def _statuses(self) -> list[MPI.Status]:
        self.statuses = [MPI.Status() for _ in self._requests]
        return self.statuses

    def explain(self, error: Exception) -> Exception:
        """Turn MPI's exceptions into DistBackendError."""
        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_IN_STATUS:
            codes = [status.Get_error() for status in self.statuses]
            error = MPI.Exception(next(code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)))
        return as_backend_error(self.op_type, error)


class ReceiveWork(MPIWork):
    """A receive (the first request), maybe with a send beside it.

    It knows the sender, notices short messages, and can be taken back.
    """

    def __init__(self, requests: list[MPI.Request], nbytes: int, finish: Finish, *alive: Any) -> None:
        super().__init__(requests, finish, *alive)
        self._nbytes = nbytes

    def poll(self) -> bool:
        """As MPIWork; then look at the message."""
        if not MPI.Request.Testall(self._requests, self._statuses()):
            return False
        self._inspect()
        return True

    def block(self) -> None:
        """As MPIWork; then look at the message."""
        statuses = self._statuses()
        if len(statuses) == 1:
            self._requests[0].Wait(statuses[0])
        else:
            MPI.Request.Waitall(self._requests, statuses)
        self._inspect()

    def _inspect(self) -> None:
        self._source = self.statuses[0].Get_source()
        check_length(self.op_type, self.statuses[0], self._nbytes)

    def cancel(self) -> None:
        """Take the receive back (MPI_Cancel); it may have been matched already, and then completes."""
        if len(self._requests) > 1:  # MPI-4.1 has deprecated the cancelling of sends
            super().cancel()
        self._requests[0].Cancel()
        MPI.Request.Waitall(self._requests)


def check_length(operation: str, status: MPI.Status, expected: int) -> None:
    """Raise if a message was shorter than the array it was received into (MPI itself refuses longer ones)."""
    received = status.Get_elements(MPI.BYTE)
    if received != expected:
        raise DistBackendError(
            f"{operation}: the message has {received} bytes, but the array {expected}; only its first part was "
            f"written. Send and receive arrays of one dtype and size{here()}"
        )


def as_backend_error(operation: str, error: Exception) -> Exception:
    """Return a DistBackendError that says what MPI says, or `error` itself if it is not MPI's."""
    if not isinstance(error, MPI.Exception) or isinstance(error, DistError):
        return error
    hint = ""
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        hint = "; an array here is smaller than what another rank sent: do sizes and dtypes agree on all ranks?"
    return DistBackendError(f"{operation}: MPI reports: {error.Get_error_string().strip()}{hint}{here()}")
