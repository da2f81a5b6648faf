"""A barrier that names the ranks that are missing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ..core.timeouts import pause, pauses
from ..errors import DistTimeoutError, here
from ..job import tags

LONGEST_PAUSE = 1e-4  # seconds between two looks


class MonitoredBarrier:
    """Every rank reports to rank 0, which answers all of them: go on, or who is missing.

    A report carries the number of the barrier, so that one which comes too late is not taken for the next
    barrier's. The answer (that number, then the missing ranks) is waiting for a rank that is late. A rank that gives
    up on rank 0 tells it so by the negative number, so that rank 0, once it comes, knows that it was missing.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._ranks = ranks
        self._tag = tags.MONITORED_BARRIER
        self._number = 0

    def __call__(self, timeout: float, wait_all_ranks: bool) -> None:
        """Return when all ranks have called it; raise DistTimeoutError on each that has, if one does not in time."""
        self._number += 1
        deadline = time.monotonic() + timeout
        if self._comm.Get_rank():
            missing = self._report(deadline, timeout)
        else:
            missing = self._collect(deadline, wait_all_ranks)
        if missing:
            plural = len(missing) > 1
            raise DistTimeoutError(
                f"monitored_barrier: rank{'s' * plural} {', '.join(str(self._ranks[rank]) for rank in missing)} "
                f"{'have' if plural else 'has'} not arrived after {timeout:g} s{here()}"
            )

    def _collect(self, deadline: float, wait_all_ranks: bool) -> list[int]:
        """Rank 0: return the ranks that have not reported in time, having told all the others."""
        missing = []
        for rank in range(1, self._comm.Get_size()):
            if not self._heard_from(rank, deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if not missing and any(self._has_given_up(rank) for rank in range(1, self._comm.Get_size())):
            missing = [0]
        answer = np.array([self._number, *missing], np.int64)
        sends = [self._comm.Isend([answer, MPI.INT64_T], rank, self._tag) for rank in range(1, self._comm.Get_size())]
        MPI.Request.Waitall(sends)  # small enough to leave without the receiver
        return missing

    def _heard_from(self, rank: int, deadline: float) -> bool:
        report = np.zeros(1, np.int64)
        while report[0] < self._number:  # an older number is of a rank that came too late to an earlier barrier
            request = self._comm.Irecv([report, MPI.INT64_T], rank, self._tag)
            if not _arrived(request, deadline):
                request.Cancel()
                status = MPI.Status()
                request.Wait(status)
                return not status.Is_cancelled() and report[0] == self._number
        return True

    def _has_given_up(self, rank: int) -> bool:
        if not self._comm.Iprobe(rank, self._tag):
            return False
        self._comm.Recv([np.zeros(1, np.int64), MPI.INT64_T], rank, self._tag)
        return True

    def _report(self, deadline: float, timeout: float) -> list[int]:
        """Other ranks: report, and return what rank 0 answers; rank 0 itself is missing if it does not."""
        report = np.array([self._number], np.int64)
        self._comm.Send([report, MPI.INT64_T], 0, self._tag)
        answer = np.zeros(1 + self._comm.Get_size(), np.int64)
        while answer[0] < self._number:
            status, looks = MPI.Status(), pauses(LONGEST_PAUSE)
            # rank 0 may be about to say who is missing: give it a moment more than it gives the others
            while not self._comm.Iprobe(0, self._tag, status):
                if time.monotonic() > deadline + max(1.0, 0.1 * timeout):
                    self._comm.Send([-report, MPI.INT64_T], 0, self._tag)
                    return [0]
                pause(next(looks))
            self._comm.Recv([answer, MPI.INT64_T], 0, self._tag, status)
        return [int(rank) for rank in answer[1 : status.Get_count(MPI.INT64_T)]]


def _arrived(request: MPI.Request, deadline: float) -> bool:
    looks = pauses(LONGEST_PAUSE)
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        pause(next(looks))
    return True
