"""Timing: contenders take turns, every rank times itself, and the slowest rank counts.

On a noisy machine two numbers measured one after the other differ for many reasons. So the contenders of one size are
interleaved, iteration by iteration, in a random order: what slows the machine down hits all of them, and none always
comes after the one that leaves the caches empty. The ratio of their medians stands. Each timed batch starts at a
barrier; its time is the maximum over the ranks. A batch is as many calls as last `Plan.batch_seconds`, so that neither
the clock nor the ranks' leaving the barrier one after the other matters for the fast ones.

Work on GPU arrays is timed by the same clock of the host, with no event of CUDA's: the calls of a batch are made, and
the batch ends when the host has waited for the stream. The time until the calls have returned is kept beside it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST_BATCH = 1 << 16


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    iterations: int | None = None  # timed batches of each contender; None: what the budget allows
    warmup: int = 5  # calls of each contender before anything is timed
    budget: float = 0.5  # seconds for all contenders of one size
    batch: int | None = None  # calls in a batch; None: as many as last batch_seconds
    batch_seconds: float = 100e-6
    fewest: int = 10
    most: int = 1000

    def iterations_of(self, seconds: float) -> int:
        """Return the number of iterations, if one of all contenders takes `seconds`."""
        if self.iterations is not None:
            return self.iterations
        return max(self.fewest, min(self.most, int(self.budget / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """The times of one contender, in seconds per call, one for each iteration: each the maximum over the ranks."""

    samples: np.ndarray
    batch: int
    host: np.ndarray | None = None  # until the calls had returned, where the work goes on after that

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.samples))

    @property
    def host_median(self) -> float | None:
        """The middle one of the host's."""
        return None if self.host is None else float(np.median(self.host))

    @property
    def minimum(self) -> float:
        """The best one."""
        return float(np.min(self.samples))

    @property
    def p99(self) -> float:
        """The one that 99 of 100 stay below."""
        return float(np.percentile(self.samples, 99))

    def scaled(self, transfers: int) -> Timing:
        """Return the times of one transfer, where a call makes several."""
        return Timing(self.samples / transfers, self.batch, None if self.host is None else self.host / transfers)


def measure(
    calls: Mapping[str, Callable[[], Any]],
    comm: MPI.Intracomm,
    plan: Plan,
    finish: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time each of `calls` on all ranks of `comm`, which make the same calls under the same names.

    `finish` waits for what they have only started: for the GPU.
    """
    from mpi4py import MPI  # which starts MPI: not at the top

    if not calls:
        return {}
    batches = {}
    expected = 0.0
    for name, call in calls.items():
        until_done(call, plan.warmup, finish)
        batches[name], seconds = _batch(call, comm, plan, finish)
        expected += seconds
    iterations = plan.iterations_of(expected)
    names = list(calls)
    samples = np.empty((2, len(names), iterations))
    shuffled = np.random.default_rng(0)  # the same on every rank
    for i in range(iterations):
        for k in shuffled.permutation(len(names)):
            batch = batches[names[k]]
            comm.Barrier()
            samples[:, k, i] = until_done(calls[names[k]], batch, finish)
            samples[:, k, i] /= batch
    slowest = np.empty_like(samples)
    comm.Allreduce(samples, slowest, MPI.MAX)
    host = slowest[1] if finish else [None] * len(names)
    return {name: Timing(slowest[0, k], batches[name], host[k]) for k, name in enumerate(names)}


def timed(call: Callable[[], Any], times: int) -> float:
    """Make a call some times, and return how many seconds they took on this rank."""
    repeat = itertools.repeat(None, times)
    start = time.perf_counter()
    for _ in repeat:
        call()
    return time.perf_counter() - start


def until_done(call: Callable[[], Any], times: int, finish: Callable[[], None] | None) -> tuple[float, float]:
    """Make a call some times; return the seconds until all is done, and until the last call has returned."""
    if finish is None:
        seconds = timed(call, times)
        return seconds, seconds
    start = time.perf_counter()
    host = timed(call, times)
    finish()
    return time.perf_counter() - start, host


def _batch(
    call: Callable[[], Any], comm: MPI.Intracomm, plan: Plan, finish: Callable[[], None] | None
) -> tuple[int, float]:
    """Return the calls in one batch, the same on all ranks, and the seconds that the batch takes."""
    batch = plan.batch or 1
    while True:
        comm.Barrier()
        seconds = max(comm.allgather(until_done(call, batch, finish)[0]))
        if plan.batch or seconds >= plan.batch_seconds or batch >= LARGEST_BATCH:
            return batch, seconds
        wanted = batch * plan.batch_seconds / max(seconds, 1e-9)
        batch = min(LARGEST_BATCH, max(2 * batch, int(wanted * 1.1)))
