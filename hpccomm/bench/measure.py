"""Timing: contenders take turns, every rank times itself, and the slowest rank counts.

The contenders of one size are interleaved, iteration by iteration, in random order. So a slow phase of a noisy machine
affects all of them, none always runs after the one that empties the caches, and the ratio of their medians is stable.
Each timed batch starts at a barrier; its time is the maximum over the ranks. The quickest contender's batch lasts
`Plan.batch_seconds`, which is long compared with a tick of the clock and with the differences between ranks when they
leave the barrier; the others' batches have as many calls.

Work on GPU arrays is also timed by the host's clock: a batch ends when the host has waited for the stream. The time
until the calls return is stored too.
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
    """The number of calls to measure."""

    iterations: int | None = None  # timed batches of each contender; None: as many as the budget allows
    warmup: int = 5  # untimed calls of each contender at the beginning
    budget: float = 0.5  # seconds for all contenders of one size
    batch: int | None = None  # calls in a batch; None: as many as last batch_seconds
    batch_seconds: float = 100e-6
    fewest: int = 10
    most: int = 1000

    def iterations_of(self, seconds: float) -> int:
        """Return the number of iterations if one iteration of all contenders takes `seconds`."""
        if self.iterations is not None:
            return self.iterations
        return max(self.fewest, min(self.most, int(self.budget / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """The times of one contender: seconds per call on the slowest rank, one for each iteration."""

    samples: np.ndarray
    batch: int
    host: np.ndarray | None = None  # seconds until the calls returned, if the work continues after that

    @property
    def median(self) -> float:
        """The median of the samples."""
        return float(np.median(self.samples))

    @property
    def host_median(self) -> float | None:
        """The median of the host's times."""
        return None if self.host is None else float(np.median(self.host))

    @property
    def minimum(self) -> float:
        """The shortest sample."""
        return float(np.min(self.samples))

    @property
    def p99(self) -> float:
        """The 99th percentile of the samples."""
        return float(np.percentile(self.samples, 99))

    def scaled(self, transfers: int) -> Timing:
        """Return the times per transfer if each call makes `transfers`."""
        return Timing(self.samples / transfers, self.batch, None if self.host is None else self.host / transfers)


def measure(
    calls: Mapping[str, Callable[[], Any]],
    comm: MPI.Intracomm,
    plan: Plan,
    finish: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Return the timing of each of `calls`; every rank of `comm` has the same calls under the same names.

    `finish` waits for work that the calls only start, on the GPU.
    """
    from mpi4py import MPI  # not at the top, because it starts MPI

    if not calls:
        return {}
    names, batch, of_a_call = list(calls), 1, 0.0
    for call in calls.values():
        until_done(call, plan.warmup, finish)
        wanted, seconds = _batch(call, comm, plan, finish)
        of_a_call += seconds / wanted
        batch = max(batch, wanted)  # of all: where ranks run ahead of others, more calls take less time each
    iterations = plan.iterations_of(batch * of_a_call)
    samples = np.empty((2, len(names), iterations))
    shuffled = np.random.default_rng(0)  # the same on every rank
    for i in range(iterations):
        for k in shuffled.permutation(len(names)):
            comm.Barrier()
            samples[:, k, i] = until_done(calls[names[k]], batch, finish)
            samples[:, k, i] /= batch
    slowest = np.empty_like(samples)
    comm.Allreduce(samples, slowest, MPI.MAX)
    host = slowest[1] if finish else [None] * len(names)
    return {name: Timing(slowest[0, k], batch, host[k]) for k, name in enumerate(names)}


def timed(call: Callable[[], Any], times: int) -> float:
    """Return the seconds that `times` calls take on this rank."""
    repeat = itertools.repeat(None, times)
    start = time.perf_counter()
    for _ in repeat:
        call()
    return time.perf_counter() - start


def until_done(call: Callable[[], Any], times: int, finish: Callable[[], None] | None) -> tuple[float, float]:
    """Return the seconds until the work of `times` calls is done, and the seconds until the last call returns."""
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
    """Return the number of calls in a batch, the same on all ranks, and the seconds that the batch takes.

    The quickest of three batches counts: one that makes something for later calls, or waits for a core, looks long.
    """

    def slowest() -> float:
        comm.Barrier()
        return float(max(comm.allgather(until_done(call, batch, finish)[0])))

    batch = plan.batch or 1
    while True:
        seconds = min(slowest() for _ in range(1 if plan.batch else 3))
        if plan.batch or seconds >= plan.batch_seconds or batch >= LARGEST_BATCH:
            return batch, seconds
        wanted = batch * plan.batch_seconds / max(seconds, 1e-9)
        batch = min(LARGEST_BATCH, max(2 * batch, int(wanted * 1.1)))
