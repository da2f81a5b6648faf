"""What `hpccomm run` adds to calls: python tests/run/cost.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hpccomm.run.communicators import watched

ROUNDS, CALLS = 30, 5000


def seconds(call: Callable[[Any], object], comm: Any) -> float:
    """Return the duration of one call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        call(comm)
    return (time.perf_counter() - began) / CALLS


def main() -> None:
    """Print the medians, of rounds in which both take turns."""
    x, y = np.ones(1), np.empty(1)
    own = MPI.COMM_SELF.Dup()
    both = own, watched(MPI.COMM_SELF.Dup(), "mine")
    calls: dict[str, Callable[[Any], object]] = {
        "Allreduce": lambda comm: comm.Allreduce(x, y),
        "Isend, Irecv, 2 Waits": lambda comm: [request.Wait() for request in (comm.Irecv(y, 0), comm.Isend(x, 0))],
    }
    for name, call in calls.items():
        taken = [[seconds(call, comm) for comm in both] for _ in range(ROUNDS)]
        before, after = (statistics.median(times) * 1e6 for times in zip(*taken, strict=True))
        print(f"{name}: {before:.2f} us, watched {after:.2f} us")


if __name__ == "__main__":
    main()
