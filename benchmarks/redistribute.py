"""Redistribute: change the axis along which a 3-D array is cut, compared with hand-written code.

Slabs are cut along one axis. For pencils the ranks form a grid of two axes, and the array stays cut along its first
axis too: as in a 3-D Fourier transform, only ranks of one row of the grid exchange. The hand-written variants are
subarray types in Alltoallw, which copies nothing in Python, and Alltoallv of arrays packed by NumPy. mpi4py-fft (its
Transfer is that Alltoallw) and mpiarray (it makes a new array) are measured if they are installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

import hpccomm as hc
from hpccomm.bench.measure import Plan

from . import beside, study
from .beside import Step

Box: TypeAlias = tuple[slice, ...]
Calls: TypeAlias = dict[str, Callable[[], Any]]

CELL = np.dtype(np.float64)
CHANGES = {  # the cut axis before, and the cut axis after
    "slabs, first axis to second": (0, 1),
    "slabs, first axis to last": (0, 2),
    "pencils, second axis to last": (1, 2),
}


class Change(NamedTuple):
    """A change of layouts on this rank; ranks are in C order on a grid."""

    shape: tuple[int, ...]  # of the global array
    axes: tuple[int, int]  # the axes distributed over a row of the grid, before and after
    grid: tuple[int, int]
    boxes: tuple[Box, Box]  # of this rank, before and after
    arrays: tuple[Any, Any]  # for the boxes


def steps(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> Iterator[Step]:
    """Yield the times of each change and size, on every rank."""
    assert world.comm is not None
    for name in possible(world.size):
        for nbytes in sizes:
            change = change_of(name, nbytes, world.size, world.rank)
            arguments = (*change.arrays[::-1], *change.boxes[::-1], world)
            persistent = hc.redistribute_init(*arguments)
            row = world.comm.Split(world.rank // change.grid[1])
            calls: Calls = {
                "hpccomm": persistent.run,
                "one call": partial(hc.redistribute, *arguments),
                **by_hand(row, change),
                **installed(world.comm, row, change),
            }
            yield beside.step(name, change.arrays[0].nbytes, calls, world.comm, plan)
            persistent.free()
            row.Free()


def possible(ranks: int) -> list[str]:
    """Return the names of the changes that are possible on this number of ranks."""
    return [name for name, (before, _) in CHANGES.items() if before == 0 or min(MPI.Compute_dims(ranks, 2)) > 1]


def change_of(name: str, nbytes: int, ranks: int, rank: int) -> Change:
    """Return a change of an array that is nearly a cube, with about `nbytes` on each rank."""
    axes = CHANGES[name]
    cells = max(1, nbytes * ranks // CELL.itemsize)
    side = ranks * max(1, round(cells ** (1 / 3) / ranks))  # a multiple of ranks, so all blocks have the same shape
    last = ranks * max(1, round(cells / side**2 / ranks))
    shape = side, side, last
    rows, columns = (1, ranks) if axes[0] == 0 else MPI.Compute_dims(ranks, 2)
    row, column = divmod(rank, columns)
    before, after = (box(shape, {0: (rows, row)} | {axis: (columns, column)}) for axis in axes)
    arrays = np.ones(shape_of(before), CELL), np.zeros(shape_of(after), CELL)
    return Change(shape, axes, (rows, columns), (before, after), arrays)


def box(shape: Sequence[int], cuts: dict[int, tuple[int, int]]) -> Box:
    """Return a block of an array; `cuts` maps an axis to its number of blocks and the block's index."""
    return tuple(hc.block_slice(length, *cuts.get(axis, (1, 0))) for axis, length in enumerate(shape))


def shape_of(part: Box) -> list[int]:
    """Return the shape of a part of an array."""
    return [each.stop - each.start for each in part]


def by_hand(row: Any, change: Change) -> Calls:
    """Return the hand-written calls of mpi4py by name."""
    ranks = row.Get_size()
    (before, given), (after, taken) = (  # the arrays before and after, each with its part for each other rank
        (array, [box(array.shape, {axis: (ranks, rank)}) for rank in range(ranks)])
        for array, axis in zip(change.arrays, change.axes[::-1])
    )
    sent, outgoing = slots(given)
    received, incoming = slots(taken)

    def pack() -> None:
        for slot, part in zip(outgoing, given):
            slot[...] = before[part]
        row.Alltoallv([sent, [slot.size for slot in outgoing]], [received, [slot.size for slot in incoming]])
        for slot, part in zip(incoming, taken):
            after[part] = slot

    once_each = [1] * ranks, [0] * ranks
    messages = [before, once_each, subarrays(before, given)], [after, once_each, subarrays(after, taken)]
    return {"subarrays": partial(row.Alltoallw, *messages), "packed": pack}


def slots(parts: Sequence[Box]) -> tuple[Any, list[Any]]:
    """Return an array for the values of all `parts`, and its piece for each part, in the part's shape."""
    shapes = [shape_of(part) for part in parts]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    whole = np.empty(ends[-1], CELL)
    return whole, [piece.reshape(shape) for piece, shape in zip(np.split(whole, ends[:-1]), shapes)]


def subarrays(array: Any, parts: Sequence[Box]) -> list[MPI.Datatype]:
    """Return MPI datatypes for the parts of an array."""
    return [
        MPI.DOUBLE.Create_subarray(array.shape, shape_of(part), [each.start for each in part]).Commit()
        for part in parts
    ]


def installed(comm: Any, row: Any, change: Change) -> Calls:
    """Return the calls of installed packages by name."""
    found: Calls = {}
    before, after = change.arrays
    with contextlib.suppress(ImportError):
        pencil = importlib.import_module("mpi4py_fft.pencil")
        whole = change.axes[::-1]  # the axes that are not cut before and after
        transfer = pencil.Transfer(row, change.shape, CELL, before.shape, whole[0], after.shape, whole[1])
        found["mpi4py-fft"] = partial(transfer.forward, before, after)
    with contextlib.suppress(ImportError):
        mpiarray = importlib.import_module("mpiarray")
        (rows, columns), (given, taken) = change.grid, change.axes
        cuts = [{0: rows} | {axis: columns} for axis in (given, taken)]
        layouts = [
            mpiarray.Layout(change.shape, comm=comm, process_grid=[cut.get(axis, 1) for axis in range(3)])
            for cut in cuts
        ]
        found["mpiarray"] = partial(mpiarray.DistributedArray(layouts[0], before).redistribute, layouts[1])
    return found


def text(found: Sequence[Step]) -> str:
    """Return the tables."""
    return beside.text("a 3-D array of float64 gets another layout", "each rank", found)


if __name__ == "__main__":
    study.main(__doc__, steps, text)
