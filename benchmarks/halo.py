"""Halo: one step of a ring of blocks with a ghost on each side, compared with hand-written mpi4py code.

The array is cut along the first axis (contiguous faces), along the middle one of three (faces made of runs), or along
the last one (faces with a gap after each element). The hand-written variants are persistent requests on contiguous
copies of the faces, the same with Isend and Irecv, and subarray types in Neighbor_alltoallw, which copies nothing in
Python. "node-shared" is hpccomm with a block from `hc.empty_shared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import hpccomm as hc
from hpccomm.bench.measure import Plan

from . import beside, study
from .beside import Step

THICKNESS = 4  # a rank's own cells along the cut axis
CELL = np.dtype(np.float64)
CUTS = {"first": 0, "middle": 1, "last": 1}  # the number of the cut axis, of 2 axes or (middle) 3


def steps(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> Iterator[Step]:
    """Yield the times of each cut and size, on every rank."""
    assert world.comm is not None
    with hc.new_grid(0, periodic=True, group=world) as ring:
        cart = world.comm.Create_cart([world.size], [True])
        for cut, axis in CUTS.items():
            for nbytes in sizes:
                block = blocks(cut, nbytes)
                shared = hc.empty_shared(block.shape, CELL, group=ring)
                halos = [hc.halo_exchange_init(each, ring, axes=(axis,), corners=False) for each in (block, shared)]
                calls: dict[str, Callable[[], Any]] = {
                    "hpccomm": halos[0].run,
                    "node-shared": halos[1].run,
                    "one call": partial(hc.halo_exchange, block, ring, axes=(axis,), corners=False),
                    **by_hand(cart, block, axis),
                }
                yield beside.step(f"cut along the {cut} axis", face_of(block, axis, 1).nbytes, calls, cart, plan)
                for halo in halos:
                    halo.free()
        cart.Free()


def blocks(cut: str, nbytes: int) -> Any:
    """Return a block with ghosts whose faces have about `nbytes`."""
    cells = max(1, nbytes // CELL.itemsize)
    if cut == "middle":
        side = max(1, int(cells**0.5))
        return np.ones((cells // side, THICKNESS + 2, side), CELL)
    shape = (THICKNESS + 2, cells) if cut == "first" else (cells, THICKNESS + 2)
    return np.ones(shape, CELL)


def face_of(block: Any, axis: int, index: int) -> Any:
    """Return a layer of the block."""
    return block[(slice(None),) * axis + (slice(index, index + 1 or None),)]


def by_hand(cart: Any, block: Any, axis: int) -> dict[str, Callable[[], Any]]:
    """Return the hand-written calls of mpi4py by name."""
    before, after = cart.Shift(0, 1)
    edges, ghosts = ([face_of(block, axis, index) for index in some] for some in ((1, -2), (0, -1)))
    sent, received = ([np.empty(edge.shape) for edge in edges] for _ in range(2))
    to, tags = (before, after), (1, 2)  # backward, and forward
    requests = [cart.Recv_init(received[i], to[i], tags[1 - i]) for i in (0, 1)]
    requests += [cart.Send_init(sent[i], to[i], tags[i]) for i in (0, 1)]

    def persistent() -> None:
        for i in (0, 1):
            sent[i][...] = edges[i]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        for i in (0, 1):
            ghosts[i][...] = received[i]

    def isend() -> None:
        pending = [cart.Irecv(received[i], to[i], tags[1 - i]) for i in (0, 1)]
        for i in (0, 1):
            sent[i][...] = edges[i]
            pending.append(cart.Isend(sent[i], to[i], tags[i]))
        MPI.Request.Waitall(pending)
        for i in (0, 1):
            ghosts[i][...] = received[i]

    types = []
    for index in (1, block.shape[axis] - 2, 0, block.shape[axis] - 1):
        sizes, starts = list(block.shape), [0] * block.ndim
        sizes[axis], starts[axis] = 1, index
        types.append(MPI.DOUBLE.Create_subarray(block.shape, sizes, starts).Commit())
    given, taken = ([block, ([1, 1], [0, 0]), some] for some in (types[:2], types[2:]))
    return {"persistent": persistent, "isend": isend, "subarrays": partial(cart.Neighbor_alltoallw, given, taken)}


def text(found: Sequence[Step]) -> str:
    """Return the tables."""
    return beside.text("one step of a ring of blocks, two faces each", "face", found)


if __name__ == "__main__":
    study.main(__doc__, steps, text)
