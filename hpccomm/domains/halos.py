"""Halo exchange: copy a rank's border cells to its neighbours' ghost cells in a grid, or add ghosts to border cells.

A message travels in a direction: -1, 0 or 1 along each axis of the grid. In direction +1 along an axis, a rank sends
its last own cells; they fill the ghosts before the receiver's first own cells. Edges and corners travel along several
axes at once, directly to the rank that needs them. So each ghost cell belongs to one message only, and `accumulate` can
send the ghosts back without adding a cell twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import checks
from ..core.annotations import Array, Arrays, Integer, Width
from ..core.backend import Pieces
from ..core.calls import Call
from ..core.persistent_work import PersistentWork
from ..core.reduce_op import SUM
from ..core.work import Work
from ..errors import on_rank
from .cache import cached
from .grids import Grid

Direction: TypeAlias = tuple[int, ...]
Parts: TypeAlias = list[tuple[int, int, tuple[slice, ...]]]  # a rank, the number of an array, and an index into it


def halo_exchange(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
    async_op: bool = False,
) -> Work | None:
    """Fill the ghost cells of local blocks with the cells of the neighbours in a grid.

    Every rank of the grid calls it. In a time loop, :func:`halo_exchange_init` does the set-up only once.

    Parameters
    ----------
    arrays : array or list of arrays
        Local blocks *with* their ghosts, of any layouts, shapes and dtypes. Each neighbour gets one message for all
        arrays.
    grid : Grid
        A grid from :func:`new_grid`.
    width : int or sequence
        The number of ghosts on each side: one number, or for each axis of the grid a number or a pair (ghosts before
        and after the rank's own cells). The same on every rank.
    axes : sequence of int, optional
        The axes of the arrays that are distributed over the grid's axes: ``axes=(1, 2)`` for ``field[channel, y, x]``.
        Default: the first axes.
    corners : bool
        True: fill edges and corners too, directly from the ranks that own them. False: fill only faces.
    async_op : bool
        True: return a Work at once. Until it is done, don't touch the ghosts, and don't write to the cells beside
        them.

    Returns
    -------
    Work or None
        A Work with ``async_op=True``; its result is the list of arrays.

    Raises
    ------
    ValueError
        An array has fewer cells than ghosts, or fewer own cells than a neighbour's ghosts need; `width` or `axes` do
        not fit the grid; an array is read-only.
    TypeError
        `grid` is not a Grid, or a dtype or an argument has a wrong type.
    DistBackendError
        A neighbour's block has another size than this rank's (`halo_exchange_init` detects that in advance).

    Notes
    -----
    Ghosts at a non-periodic border of the grid keep their values. Along a periodic axis with one rank, a block is its
    own neighbour.

    Examples
    --------
    >>> grid = hc.new_grid((0,), periodic=True)
    >>> x = np.array([0, 1, 2, 3, 0])  # three cells of one's own
    >>> hc.halo_exchange(x, grid)
    >>> x  # on one rank
    array([3, 1, 2, 3, 1])
    """
    return _begin("halo_exchange", arrays, grid, width, axes, corners, async_op)


def halo_exchange_init(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
) -> PersistentWork:
    """Set up a :func:`halo_exchange` of `arrays`, to be started again and again.

    Every rank of the grid calls it. The ranks compare their blocks: if shapes do not fit, all raise the same error.

    Parameters
    ----------
    arrays, grid, width, axes, corners
        As for :func:`halo_exchange`.

    Returns
    -------
    PersistentWork
        Between `start` and `wait` the program may compute inner cells, which need no ghosts.

    Raises
    ------
    ValueError, TypeError
        As for :func:`halo_exchange`, or two ranks' blocks, dtypes or widths do not fit together (on every rank).

    Examples
    --------
    >>> grid = hc.new_grid((0,), periodic=True)
    >>> x = np.arange(5)  # three cells of one's own
    >>> with hc.halo_exchange_init(x, grid) as halo:
    ...     for step in range(3):
    ...         x[1:-1] += 10
    ...         halo.start()
    ...         inside = x[1:-1].sum()  # needs no ghost cells
    ...         done = halo.wait()
    >>> x  # on one rank
    array([33, 31, 32, 33, 31])
    """
    return checked("halo_exchange_init", arrays, grid, width, axes, corners).set_up()


def halo_accumulate(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
    async_op: bool = False,
) -> Work | None:
    """Add the ghost cells of local blocks to the neighbours' cells that they stand for: the reverse of `halo_exchange`.

    Use it for particles that deposit into the cells around them, and for finite elements. The ghosts keep their values;
    ghosts beyond a non-periodic border are ignored. Contributions of several ranks to one cell are added in the same
    order in every run.

    Arguments and errors are those of :func:`halo_exchange`. A dtype without a sum (dates, text, records) raises
    TypeError.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> grid = hc.new_grid((0,), periodic=True)
    >>> x = np.array([5, 1, 2, 3, 7])  # 5 belongs to the rank before, 7 to the one after
    >>> hc.halo_accumulate(x, grid)
    >>> x  # on one rank
    array([5, 8, 2, 8, 7])
    """
    return _begin("halo_accumulate", arrays, grid, width, axes, corners, async_op)


def halo_accumulate_init(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
) -> PersistentWork:
    """Set up a :func:`halo_accumulate` of `arrays`, to be started again and again; otherwise like `halo_exchange_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> grid = hc.new_grid((0,), periodic=True)
    >>> x = np.array([5, 1, 2])  # one ghost, before the cells
    >>> with hc.halo_accumulate_init(x, grid, width=((1, 0),)) as deposit:
    ...     deposit.start()
    ...     done = deposit.wait()
    >>> x  # on one rank
    array([5, 1, 7])
    """
    return checked("halo_accumulate_init", arrays, grid, width, axes, corners).set_up()


class Halo(NamedTuple):
    """A halo exchange whose arguments have been checked on this rank."""

    name: str
    grid: Grid
    device: str
    views: list[Any]
    axes: list[tuple[int, ...]]  # for each array: its axes that are distributed over the grid
    widths: tuple[tuple[int, int], ...]  # for each axis of the grid: ghosts before and after the own cells
    corners: bool
    parts: tuple[Parts, Parts] | None = None  # the parts to send and receive, once worked_out() has run
    again: Callable[[Pieces, Pieces], None] | None = None  # runs a blocking exchange of these shapes

    @property
    def adds(self) -> bool:
        """True if ghosts are sent back and added."""
        return self.name.startswith("halo_accumulate")

    @property
    def call(self) -> Call:
        """The call for the dispatcher."""
        arguments = self.views, self.widths, self.axes, self.corners
        return Call((self.name.removesuffix("_init"), self.device, self.views, arguments))

    def begin(self, async_op: bool) -> Work | None:
        """Exchange the halo once."""
        dispatcher, pieces = self.grid.dispatcher, self.pieces()
        if self.again is not None and not async_op:
            step: Callable[[], Work | None] = partial(self.again, *pieces)
        else:
            step = partial(dispatcher.backends[self.device].exchange, *pieces, self.adds, async_op)
        return dispatcher.run(self.call, async_op, step)

    def set_up(self) -> PersistentWork:
        """Compare the ranks' blocks, and set up the exchange; every rank of the grid calls it."""
        facts: list[Any] = [None] * self.grid.size
        self.grid.all_gather_object(facts, self.facts())
        if fault := self.fault(facts):
            raise ValueError(f"{self.name}: {fault}{on_rank()}")
        dispatcher = self.grid.dispatcher
        return dispatcher.set_up(
            self.call, partial(dispatcher.backends[self.device].persistent, "exchange", *self.pieces(), self.adds)
        )

    def own(self) -> list[tuple[int, ...]]:
        """Return for each array the number of this rank's own cells along the axes of the grid."""
        return [
            tuple(view.shape[axis] - sum(width) for axis, width in zip(axes, self.widths))
            for view, axes in zip(self.views, self.axes)
        ]

    def directions(self) -> Iterator[Direction]:
        """Yield the directions of messages, in the order of every rank's sends and receives."""
        for direction in product((-1, 0, 1), repeat=self.grid.ndim):
            if any(direction) and (self.corners or sum(map(abs, direction)) == 1):
                yield direction

    def pieces(self) -> tuple[Pieces, Pieces]:
        """Return the views to send and the views to receive into, each with the other rank in the grid."""
        sends, receives = self.parts or self.worked_out()
        return [(to, self.views[i][where]) for to, i, where in sends], [
            (of, self.views[i][where]) for of, i, where in receives
        ]

    def worked_out(self) -> tuple[Parts, Parts]:
        """Return the parts to send and to receive; raise ValueError if this rank has too few cells."""
        if fault := self._own_fault(self.grid.rank, self.own()):
            raise ValueError(f"{self.name}: {fault}{on_rank()}")
        sends: Parts = []
        receives: Parts = []
        of_own, of_ghosts = (receives, sends) if self.adds else (sends, receives)
        for direction in self.directions():
            back = tuple(-step for step in direction)
            # for `accumulate`, this is the direction in which an exchange fills the ghosts
            for peer, cells, parts in (
                (self._beside(direction), self._cells(direction, are_own=True), of_own),
                (self._beside(back), self._cells(back, are_own=False), of_ghosts),
            ):
                if peer is not None:
                    parts += [(peer, i, where) for i, where in enumerate(cells) if self._has_width(i, where, direction)]
        return sends, receives

    def _has_width(self, array: int, where: tuple[slice, ...], direction: Direction) -> bool:
        """Whether there is a message, of 0 bytes if other axes are empty: they may not be so on the other rank."""
        return all(where[axis].start < where[axis].stop for axis, step in zip(self.axes[array], direction) if step)

    def _beside(self, direction: Direction) -> int | None:
        return self.grid.at(tuple(map(sum, zip(self.grid.coords, direction))))

    def _cells(self, direction: Direction, are_own: bool) -> list[tuple[slice, ...]]:
        """Return for each array the own cells that are sent in a direction, or the ghosts on that side."""
        chosen = []
        for view, axes in zip(self.views, self.axes):
            cells = [slice(None)] * view.ndim
            for axis, step, (low, high) in zip(axes, direction, self.widths):
                size = view.shape[axis]
                if step == 0:
                    cells[axis] = slice(low, size - high)
                elif are_own:
                    cells[axis] = slice(size - high - low, size - high) if step > 0 else slice(low, low + high)
                else:
                    cells[axis] = slice(size - high, size) if step > 0 else slice(0, low)
            chosen.append(tuple(cells))
        return chosen

    # -- do the ranks fit together? -----------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the facts that the ranks compare."""
        others = [
            tuple(size for axis, size in enumerate(view.shape) if axis not in axes)
            for view, axes in zip(self.views, self.axes)
        ]
        dtypes = [str(view.dtype) for view in self.views]
        alike = {"dtypes": dtypes, "devices": self.device, "widths": self.widths, "corners": self.corners}
        alike["axes"] = list(self.axes)
        return {"own": self.own(), "others": others, **alike}

    def fault(self, facts: Sequence[dict[str, Any]]) -> str:
        """Describe the first mismatch between ranks; "" if there is none."""
        first = facts[0]
        for rank, other in enumerate(facts):
            for what, of in (("number of arrays", len), ("dtypes", list)):
                if of(other["dtypes"]) != of(first["dtypes"]):
                    return f"the {what} differ: rank 0 has {of(first['dtypes'])}, rank {rank} {of(other['dtypes'])}"
            for what in ("devices", "widths", "corners", "axes"):
                if other[what] != first[what]:
                    return f"{what} differ: rank 0 gives {first[what]}, rank {rank} {other[what]}"
        for rank in range(self.grid.size):
            if fault := self._own_fault(rank, facts[rank]["own"]) or self._difference(facts, rank):
                return fault
        return ""

    def _own_fault(self, rank: int, own: list[tuple[int, ...]]) -> str:
        """Describe the first axis along which a rank has too few cells; "" if it has enough."""
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
        """Describe the first mismatch between a rank and the next one along an axis; "" if there is none."""
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
    """Return an axis as text: its name or number."""
    return f"axis {grid.names[axis]!r}" if grid.names else f"axis {axis}"


def _begin(
    name: str,
    arrays: Array | Arrays,
    grid: Any,
    width: Width,
    axes: Sequence[Integer] | None,
    corners: bool,
    async_op: bool,
) -> Work | None:
    """Check a call and begin it; results of the checks are cached by shapes and dtypes."""
    views: list[Any] = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    if not isinstance(grid, Grid):
        return checked(name, arrays, grid, width, axes, corners).begin(async_op)
    if not all(type(view) is np.ndarray and view.flags.writeable for view in views):
        _, views = checks.array_list(name, "arrays", views)
    axes = _kept(axes)
    # as text, because 1.0 and True equal 1
    how = width if type(width) is int else str(width), None if axes is None else str(axes), bool(corners)
    key = name, how, *[(type(view), view.shape, view.dtype) for view in views]
    work_out = partial(_of_shapes, name, views, grid, width, axes, corners)
    device, cut, widths, *rest = cached(grid, "halo", key, work_out)
    return Halo(name, grid, device, views, cut, widths, bool(corners), *rest).begin(async_op)


def _of_shapes(*arguments: Any) -> tuple[Any, ...]:
    """Return the fields of a Halo that depend only on shapes and dtypes, so the cache keeps no array alive."""
    halo = checked(*arguments)
    halo = halo._replace(parts=halo.worked_out())
    again = halo.grid.dispatcher.backends[halo.device].repeated_exchange(*halo.pieces(), halo.adds)
    return halo.device, halo.axes, halo.widths, halo.parts, again


def checked(
    name: str,
    arrays: Array | Arrays,
    grid: Any,
    width: Width,
    axes: Sequence[Integer] | None,
    corners: bool,
) -> Halo:
    """Return the Halo of these arguments; raise TypeError or ValueError for errors that this rank can detect alone."""
    if not isinstance(grid, Grid):
        raise TypeError(f"{name}: grid is {grid!r}; expected a Grid, of hpccomm.new_grid{on_rank()}")
    given, axes = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays], _kept(axes)
    device, views = checks.array_list(name, "arrays", given)
    if name.startswith("halo_accumulate"):
        checks.reductions(name, "arrays", views, SUM)
    widths = _widths(name, grid, width)
    return Halo(name, grid, device, views, [_axes(name, grid, each, axes) for each in views], widths, bool(corners))


def _kept(axes: Sequence[Integer] | None) -> Sequence[Integer] | None:
    """Return the axes in a tuple: an iterator can be read once, and has no text for a key."""
    return None if axes is None else tuple(checks.one_or_more(axes))


def _widths(name: str, grid: Grid, width: Width) -> tuple[tuple[int, int], ...]:
    each = list(width) if isinstance(width, (Sequence, np.ndarray)) else [width] * grid.ndim
    if len(each) != grid.ndim:
        raise ValueError(
            f"{name}: width is {width!r}; expected a number, or one (or a pair) for each of {grid.ndim} axes{on_rank()}"
        )
    pairs = []
    for one in each:
        pair = tuple(one) if isinstance(one, (Sequence, np.ndarray)) else (one, one)
        numbers = tuple(checks.integer(f"{name}: a width", number) for number in pair)
        if len(numbers) != 2 or min(numbers) < 0:
            raise ValueError(f"{name}: a width is {one!r}; expected a number, or (before, after), 0 or more{on_rank()}")
        pairs.append((numbers[0], numbers[1]))
    return tuple(pairs)


def _axes(name: str, grid: Grid, view: Any, axes: Sequence[Integer] | None) -> tuple[int, ...]:
    chosen = range(grid.ndim) if axes is None else axes
    given = [checks.integer(f"{name}: an axis", axis) for axis in chosen]
    found = tuple(axis % view.ndim for axis in given if -view.ndim <= axis < view.ndim)
    if len(given) != grid.ndim or len(set(found)) != grid.ndim:
        raise ValueError(
            f"{name}: axes are {tuple(given)}, of an array with {view.ndim} dimension{'s' * (view.ndim != 1)}; "
            f"expected {grid.ndim} of them, one for each axis of the grid{on_rank()}"
        )
    return found
