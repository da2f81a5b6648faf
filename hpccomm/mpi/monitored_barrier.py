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

    A report is the number of the barrier: one that comes too late is not taken for the next barrier's. The answer is
    that number, then the missing ranks; a late rank finds it waiting. A rank that gives rank 0 up sends it the negative
    number, so that rank 0, once it comes, knows that it was missing.
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
        """Rank 0: tell all others the ranks that have not reported in time, and return them."""
        missing = []
        for rank in range(1, self._comm.Get_size()):
            if not self._heard_from(rank, deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if not missing and any(self._comm.Iprobe(rank, self._tag) for rank in range(1, self._comm.Get_size())):
            missing = [0]  # to that rank; the next barrier skips its message
        answer = np.array([self._number, *missing], np.int64)
        sends = [self._comm.Isend([answer, MPI.INT64_T], rank, self._tag) for rank in range(1, self._comm.Get_size())]
        MPI.Request.Waitall(sends)  # small enough to leave without the receiver
        return missing

    def _heard_from(self, rank: int, deadline: float) -> bool:
        """Receive reports of `rank` up to this barrier's; return whether it came before the deadline."""
        report = np.zeros(1, np.int64)
        while report[0] < self._number:  # others are of ranks that came too late to an earlier one, or gave rank 0 up
            if not self._comes_from(rank, deadline):
                return False
            self._comm.Recv([report, MPI.INT64_T], rank, self._tag)
        return True

    def _report(self, deadline: float, timeout: float) -> list[int]:
        """Other ranks: report, and return the missing ranks: those of rank 0's answer, or rank 0 if none comes."""
        report = np.array([self._number], np.int64)
        self._comm.Send([report, MPI.INT64_T], 0, self._tag)
        answer = np.zeros(1 + self._comm.Get_size(), np.int64)
        while answer[0] < self._number:
            # rank 0 may be about to say who is missing: give it a moment more than it gives the others
            if not self._comes_from(0, deadline + max(1.0, 0.1 * timeout)):
                self._comm.Send([-report, MPI.INT64_T], 0, self._tag)
                return [0]
            status = MPI.Status()
            self._comm.Recv([answer, MPI.INT64_T], 0, self._tag, status)
        return [int(rank) for rank in answer[1 : status.Get_count(MPI.INT64_T)]]

    def _comes_from(self, rank: int, deadline: float) -> bool:
        """Return whether a message of `rank` comes before the deadline."""
        looks = pauses(LONGEST_PAUSE)
        while not self._comm.Iprobe(rank, self._tag):
            if time.monotonic() > deadline:
                return False
            pause(next(looks))
        return True
