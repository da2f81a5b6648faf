"""Halos: which cells of a rank's arrays its neighbours in a grid need, and which of its own are copies of theirs.

A message travels in a direction: -1, 0 or 1 along each axis of the grid. What travels +1 along an axis are a rank's
last own cells, and they fill the ghosts before the first ones of the rank that gets them. Edges and corners travel
along several axes at once, straight to the rank that needs them. So each ghost cell is of one message only, which is
what makes it right to send them back, too (`accumulate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import here
from . import checks
from .annotations import Array, Arrays, Integer
from .backend import Pieces
from .calls import Call
from .grid import Grid
from .kept import kept
from .persistent_work import PersistentWork
from .reduce_op import SUM
from .work import Work

Width: TypeAlias = "Integer | Sequence[Integer | Sequence[Integer]]"
Direction: TypeAlias = tuple[int, ...]
Parts: TypeAlias = list[tuple[int, int, tuple[slice, ...]]]  # a rank, the number of an array, and an index of it


class Halo(NamedTuple):
    """A halo exchange whose arguments have been checked on this rank."""

    name: str
    grid: Grid
    device: str
    views: list[Any]
    axes: list[tuple[int, ...]]  # of each array, those that are cut along the axes of the grid
    widths: tuple[tuple[int, int], ...]  # of each axis of the grid: ghosts before and after the own cells
    corners: bool
    parts: tuple[Parts, Parts] | None = None  # what is sent and received, once it has been worked out

    @property
    def adds(self) -> bool:
        """Whether ghosts are sent back, to be added."""
        return self.name.startswith("halo_accumulate")

    @property
    def call(self) -> Call:
        """The call, as it passes the door."""
        arguments = self.views, self.widths, self.axes, self.corners
        return Call((self.name.removesuffix("_init"), self.device, self.views, arguments))

    def begin(self, async_op: bool) -> Work | None:
        """Exchange the halo once."""
        door = self.grid.door
        step = partial(door.backends[self.device].exchange, *self.pieces(), self.adds, async_op)
        return door.run(self.call, async_op, step)

    def set_up(self) -> PersistentWork:
        """Compare what the ranks have, and set the exchange up; every rank of the grid calls it."""
        facts: list[Any] = [None] * self.grid.size
        self.grid.all_gather_object(facts, self.facts())
        if fault := self.fault(facts):
            raise ValueError(f"{self.name}: {fault}{here()}")
        door = self.grid.door
        return door.set_up(
            self.call, partial(door.backends[self.device].persistent, "exchange", *self.pieces(), self.adds)
        )

    def own(self) -> list[tuple[int, ...]]:
        """Return of each array how many cells along the axes of the grid are this rank's own."""
        return [
            tuple(view.shape[axis] - sum(width) for axis, width in zip(axes, self.widths))
            for view, axes in zip(self.views, self.axes)
        ]

    def directions(self) -> Iterator[Direction]:
        """Yield the directions of messages, in the order in which every rank sends and receives them."""
        for direction in product((-1, 0, 1), repeat=self.grid.ndim):
            if any(direction) and (self.corners or sum(map(abs, direction)) == 1):
                yield direction

    def pieces(self) -> tuple[Pieces, Pieces]:
        """Return what is sent, and where what is received goes: pairs of a rank of the grid and a view."""
        sends, receives = self.parts or self.worked_out()
        return [(to, self.views[i][where]) for to, i, where in sends], [
            (of, self.views[i][where]) for of, i, where in receives
        ]

    def worked_out(self) -> tuple[Parts, Parts]:
        """Return the ranks and parts of arrays of messages; ValueError if this rank has too few cells for them."""
        if fault := self._own_fault(self.grid.rank, self.own()):
            raise ValueError(f"{self.name}: {fault}{here()}")
        sends: Parts = []
        receives: Parts = []
        of_own, of_ghosts = (receives, sends) if self.adds else (sends, receives)
        for direction in self.directions():
            back = tuple(-step for step in direction)
            # of `accumulate` the direction is that in which the ghosts were filled
            for peer, cells, parts in (
                (self._beside(direction), self._edge(direction), of_own),
                (self._beside(back), self._ghosts(back), of_ghosts),
            ):
                if peer is not None:
                    parts += [(peer, i, where) for i, where in enumerate(cells) if self.views[i][where].size]
        return sends, receives

    def _beside(self, direction: Direction) -> int | None:
        return self.grid.at(tuple(map(sum, zip(self.grid.coords, direction))))

    def _edge(self, direction: Direction) -> list[tuple[slice, ...]]:
        """Return of each array the own cells that are sent in a direction."""

        def along(size: int, step: int, low: int, high: int) -> slice:
            if step == 0:
                return slice(low, size - high)
            return slice(size - high - low, size - high) if step > 0 else slice(low, low + high)

        return self._cells(direction, along)

    def _ghosts(self, direction: Direction) -> list[tuple[slice, ...]]:
        """Return of each array the ghosts on one side."""

        def along(size: int, step: int, low: int, high: int) -> slice:
            if step == 0:
                return slice(low, size - high)
            return slice(size - high, size) if step > 0 else slice(0, low)

        return self._cells(direction, along)

    def _cells(self, direction: Direction, along: Any) -> list[tuple[slice, ...]]:
        chosen = []
        for view, axes in zip(self.views, self.axes):
            cells = [slice(None)] * view.ndim
            for axis, step, (low, high) in zip(axes, direction, self.widths):
                cells[axis] = along(view.shape[axis], step, low, high)
            chosen.append(tuple(cells))
        return chosen

    # -- do the ranks fit together? -----------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what the ranks compare."""
        others = [
            tuple(size for axis, size in enumerate(view.shape) if axis not in axes)
            for view, axes in zip(self.views, self.axes)
        ]
        dtypes = [str(view.dtype) for view in self.views]
        alike = {"dtypes": dtypes, "devices": self.device, "widths": self.widths, "corners": self.corners}
        return {"own": self.own(), "others": others, **alike}

    def fault(self, facts: Sequence[dict[str, Any]]) -> str:
        """Return what does not fit between the ranks, in words; "" if all does."""
        first = facts[0]
        for rank, other in enumerate(facts):
            for what, of in (("number of arrays", len), ("dtypes", list)):
                if of(other["dtypes"]) != of(first["dtypes"]):
                    return f"the {what} differ: rank 0 has {of(first['dtypes'])}, rank {rank} {of(other['dtypes'])}"
            for what in ("devices", "widths", "corners"):
                if other[what] != first[what]:
                    return f"{what} differ: rank 0 gives {first[what]}, rank {rank} {other[what]}"
        for rank in range(self.grid.size):
            if fault := self._own_fault(rank, facts[rank]["own"]) or self._difference(facts, rank):
                return fault
        return ""

    def _own_fault(self, rank: int, own: list[tuple[int, ...]]) -> str:
        """Return where a rank has fewer cells than it needs, in words; "" if it has enough."""
        for array, sizes in enumerate(own):
            for axis, (cells, (low, high)) in enumerate(zip(sizes, self.widths)):
                along = f"along {in_words(self.grid, axis)}"
                if cells < 0:
                    return (
                        f"arrays[{array}] of rank {rank} has {cells + low + high} cells {along}, fewer than its "
                        f"{low} + {high} ghosts"
                    )
                for step, ghosts in ((1, low), (-1, high)):
                    other = self._along(rank, axis, step)
                    if other is not None and cells < ghosts:
                        return (
                            f"{along} rank {rank} has {cells} cells of its own in arrays[{array}], and rank {other} "
                            f"beside it {ghosts} ghosts for them; use fewer ranks along it, or a smaller width"
                        )
        return ""

    def _along(self, rank: int, axis: int, step: int) -> int | None:
        coords = list(self.grid.coords_of(rank))
        coords[axis] += step
        return self.grid.at(coords)

    def _difference(self, facts: Sequence[dict[str, Any]], rank: int) -> str:
        """Return what does not fit between a rank and the next one along an axis, in words; "" if all does."""
        for axis in range(self.grid.ndim):
            following = self._along(rank, axis, 1)
            if following is None:
                continue
            mine, theirs = facts[rank], facts[following]
            for array in range(len(self.views)):
                for each in (each for each in range(self.grid.ndim) if each != axis):
                    if mine["own"][array][each] != theirs["own"][array][each]:
                        sizes = f"{mine['own'][array][each]} and {theirs['own'][array][each]}"
                        return (
                            f"ranks {rank} and {following} are neighbours along {in_words(self.grid, axis)}, and have "
                            f"{sizes} cells of arrays[{array}] along {in_words(self.grid, each)}; expected the same"
                        )
                if mine["others"][array] != theirs["others"][array]:
                    return (
                        f"the other axes of arrays[{array}] have sizes {mine['others'][array]} on rank {rank} and "
                        f"{theirs['others'][array]} on rank {following}; expected the same"
                    )
        return ""


def in_words(grid: Grid, axis: int) -> str:
    """Return an axis as text: its name, or its number."""
    return f"axis {grid.names[axis]!r}" if grid.names else f"axis {axis}"


def begin(
    name: str,
    arrays: Array | Arrays,
    grid: Any,
    width: Width,
    axes: Sequence[Integer] | None,
    corners: bool,
    async_op: bool,
) -> Work | None:
    """Check a call and begin it; what has been checked for arrays of these shapes and dtypes is kept."""
    views: list[Any] = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    if not isinstance(grid, Grid):
        return checked(name, arrays, grid, width, axes, corners).begin(async_op)
    if not all(type(view) is np.ndarray and view.flags.writeable for view in views):
        _, views = checks.array_list(name, "arrays", views)
    # as texts: 1.0 and True equal 1
    how = width if type(width) is int else str(width), None if axes is None else str(axes), bool(corners)
    key = name, how, *[(type(view), view.shape, view.dtype) for view in views]
    work_out = partial(_of_shapes, name, views, grid, width, axes, corners)
    device, cut, widths, parts = kept(grid, "halo", key, work_out)
    return Halo(name, grid, device, views, cut, widths, bool(corners), parts).begin(async_op)


def _of_shapes(*arguments: Any) -> tuple[Any, ...]:
    """Return what of a halo depends on shapes and dtypes only, so that keeping it keeps no array."""
    halo = checked(*arguments)
    return halo.device, halo.axes, halo.widths, halo.worked_out()


def checked(
    name: str,
    arrays: Array | Arrays,
    grid: Any,
    width: Width,
    axes: Sequence[Integer] | None,
    corners: bool,
) -> Halo:
    """Return the halo of these arguments; TypeError or ValueError for what this rank can see to be wrong."""
    if not isinstance(grid, Grid):
        raise TypeError(f"{name}: grid is {grid!r}; expected a Grid, of hpccomm.new_grid{here()}")
    given = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    device, views = checks.array_list(name, "arrays", given)
    if name.startswith("halo_accumulate"):
        checks.reductions(name, "arrays", views, SUM)
    widths = _widths(name, grid, width)
    return Halo(name, grid, device, views, [_axes(name, grid, each, axes) for each in views], widths, bool(corners))


def _widths(name: str, grid: Grid, width: Width) -> tuple[tuple[int, int], ...]:
    each = list(width) if isinstance(width, (Sequence, np.ndarray)) else [width] * grid.ndim
    if len(each) != grid.ndim:
        raise ValueError(
            f"{name}: width is {width!r}; expected a number, or one (or a pair) for each of {grid.ndim} axes{here()}"
        )
    pairs = []
    for one in each:
        pair = tuple(one) if isinstance(one, (Sequence, np.ndarray)) else (one, one)
        numbers = tuple(checks.integer(f"{name}: a width", number) for number in pair)
        if len(numbers) != 2 or min(numbers) < 0:
            raise ValueError(f"{name}: a width is {one!r}; expected a number, or (before, after), 0 or more{here()}")
        pairs.append((numbers[0], numbers[1]))
    return tuple(pairs)


def _axes(name: str, grid: Grid, view: Any, axes: Sequence[Integer] | None) -> tuple[int, ...]:
    given = range(grid.ndim) if axes is None else [checks.integer(f"{name}: an axis", axis) for axis in axes]
    found = tuple(axis % view.ndim for axis in given if -view.ndim <= axis < view.ndim)
    if len(given) != grid.ndim or len(set(found)) != grid.ndim:
        raise ValueError(
            f"{name}: axes are {tuple(given)}, of an array with {view.ndim} dimension{'s' * (view.ndim != 1)}; "
            f"expected {grid.ndim} of them, one for each axis of the grid{here()}"
        )
    return found
