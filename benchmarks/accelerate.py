"""Accelerate: mpi4py's reductions, with and without `hpccomm run --accelerate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import hpccomm as hc
import hpccomm.mpi4py as hm
from hpccomm.bench.measure import Plan

from . import beside, study
from .beside import Step

CELL = np.dtype(np.float64)
METHODS = ("Allreduce", "Reduce", "Reduce_scatter_block", "Scan")


def steps(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> Iterator[Step]:
    """Yield the times of each reduction and size, on every rank; the size is that of the sent array."""
    assert world.comm is not None
    comm = world.comm.Dup()
    accelerated = hm.Comm(comm, accelerate=True)
    for method in METHODS:
        for nbytes in sizes:
            sent, received = buffers(method, nbytes, world.size)
            calls: dict[str, Callable[[], Any]] = {
                name: partial(getattr(each, method), sent, received)
                for name, each in {"hpccomm": accelerated, "mpi4py": comm}.items()
            }
            yield beside.step(method, sent.nbytes, calls, comm, plan)
    accelerated.Free()  # frees `comm`, too


def buffers(method: str, nbytes: int, ranks: int) -> tuple[Any, Any]:
    """Return an input of about `nbytes`, and an output for the method's result."""
    part = max(1, nbytes // CELL.itemsize // ranks)
    return np.ones(part * ranks, CELL), np.empty(part if method == "Reduce_scatter_block" else part * ranks, CELL)


def text(found: Sequence[Step]) -> str:
    """Return the tables."""
    return beside.text("a reduction of mpi4py with accelerate=True, and without", "array", found)


if __name__ == "__main__":
    study.main(__doc__, steps, text)
