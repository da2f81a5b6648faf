"""Startup: the time to start Python with its imports, MPI, the world group, and another group."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

import hpccomm as hc
from hpccomm.bench.command import say
from hpccomm.bench.measure import timed
from hpccomm.process.proc import of_process


@dataclass(frozen=True)
class Step:
    """One step of the start; the slowest rank's median in ms."""

    step: str
    milliseconds: float


def startup(repetitions: int = 5) -> list[Step]:
    """Measure the steps. Every rank calls it before init_process_group, ideally before importing mpi4py.MPI."""
    import sys

    steps = []
    age = process_age()
    if age is not None:
        steps.append(("process start to here: Python, imports (10 ms steps)", [age]))
    if "mpi4py.MPI" not in sys.modules:
        steps.append(("import mpi4py.MPI: MPI_Init", [timed(lambda: __import__("mpi4py.MPI"), 1)]))
    from mpi4py import MPI

    inits, barriers, groups, ends = [], [], [], []
    for _ in range(repetitions):
        MPI.COMM_WORLD.Barrier()
        inits.append(timed(hc.init_process_group, 1))
        barriers.append(timed(hc.barrier, 1))
        hc.barrier()
        groups.append(timed(hc.new_group, 1))
        hc.barrier()
        ends.append(timed(hc.destroy_process_group, 1))
    steps += [
        ("init_process_group, the first time", inits[:1]),
        ("init_process_group, again", inits[1:] or inits),
        ("the first operation of a group: barrier", barriers),
        ("new_group of all ranks", groups),
        ("destroy_process_group, with that group", ends),
    ]
    slowest = np.array([np.median(times) for _, times in steps])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return [Step(name, float(seconds) * 1e3) for (name, _), seconds in zip(steps, slowest, strict=True)]


def process_age() -> float | None:
    """Return the age of this process in seconds; None without /proc."""
    try:
        started = int(of_process("self")[1][19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def table(steps: list[Step]) -> str:
    """Return the table of the steps."""
    lines = ["init: what the start of a program takes, slowest rank", f"{'time':>10}  step", f"{'(ms)':>10}"]
    return "\n".join([*lines, *(f"{each.milliseconds:>10.3f}  {each.step}" for each in steps)])


if __name__ == "__main__":
    say(table(startup()))
