"""Halo exchange: the cells around a rank's block of an array, which belong to its neighbours in a grid."""

from __future__ import annotations

from collections.abc import Sequence

from .core.annotations import Array, Arrays, Integer
from .core.grid import Grid
from .core.halo import Width, begin, checked
from .core.persistent_work import PersistentWork
from .core.work import Work


def halo_exchange(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
    async_op: bool = False,
) -> Work | None:
    """Fill the ghost cells of local blocks with the cells of the neighbours in a grid.

    Every rank of the grid calls it. In a time loop, :func:`halo_exchange_init` does the same and makes nothing anew.

    Parameters
    ----------
    arrays : array or list of arrays
        Local blocks *with* their ghosts, of any layouts, shapes and dtypes; what goes to one neighbour travels in one
        message.
    grid : Grid
        As :func:`new_grid` makes it.
    width : int or sequence
        How many ghosts there are on each side: a number; or for each axis of the grid a number or a pair, of those
        before and those after the rank's own cells. The same on every rank.
    axes : sequence of int, optional
        Which axes of the arrays are cut along those of the grid: ``axes=(1, 2)`` for ``field[channel, y, x]``. Default:
        the first ones.
    corners : bool
        True: edges and corners are filled too, straight from the ranks that own them. False: faces only.
    async_op : bool
        True: return a Work at once; until it is done, the ghosts may not be touched, and the cells beside them not be
        written.

    Returns
    -------
    Work or None
        A Work with ``async_op=True``; its result is the list of arrays.

    Raises
    ------
    ValueError
        An array has fewer cells than ghosts, or fewer of its own than a neighbour has ghosts for them; `width` or
        `axes` do not suit the grid; an array is read-only.
    TypeError
        `grid` is no Grid; a dtype or an argument is of a wrong kind.
    DistBackendError
        A neighbour's block does not have the size that this rank's has (`halo_exchange_init` says so in advance).

    Notes
    -----
    Ghosts at a border of the grid that is not periodic stay as they are. Along a periodic axis with one rank, a block
    is its own neighbour.

    Examples
    --------
    >>> grid = hc.new_grid((0,), periodic=True)
    >>> x = np.array([0, 1, 2, 3, 0])  # three cells of one's own
    >>> hc.halo_exchange(x, grid)
    >>> x  # on one rank
    array([3, 1, 2, 3, 1])
    """
    return begin("halo_exchange", arrays, grid, width, axes, corners, async_op)


def halo_exchange_init(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
) -> PersistentWork:
    """Set up a :func:`halo_exchange` of `arrays`, to be started again and again.

    Every rank of the grid calls it. The ranks compare what they have: shapes that do not fit are one error on all.

    Parameters
    ----------
    arrays, grid, width, axes, corners
        As for :func:`halo_exchange`.

    Returns
    -------
    PersistentWork
        Between `start` and `wait` the cells inside may be computed, which need no ghosts.

    Raises
    ------
    ValueError, TypeError
        As :func:`halo_exchange`; and, on every rank, if blocks, dtypes or widths of two ranks do not fit together.

    Examples
    --------
    >>> grid = hc.new_grid((0,), periodic=True)
    >>> x = np.arange(5)  # three cells of one's own
    >>> with hc.halo_exchange_init(x, grid) as halo:
    ...     for step in range(3):
    ...         x[1:-1] += 10
    ...         halo.start()
    ...         inside = x[1:-1].sum()  # what needs no ghosts
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
    """Add the ghost cells of local blocks to the cells of the neighbours that own them: the reverse of `halo_exchange`.

    For particles that deposit into the cells around them, and for finite elements. The ghosts stay as they are; those
    beyond a border that is not periodic belong to nobody. What several ranks give to one cell is added in an order that
    does not change from run to run.

    Arguments and errors are those of :func:`halo_exchange`; and a dtype without a sum (dates, text, records) is a
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
    return begin("halo_accumulate", arrays, grid, width, axes, corners, async_op)


def halo_accumulate_init(
    arrays: Array | Arrays,
    grid: Grid,
    width: Width = 1,
    axes: Sequence[Integer] | None = None,
    corners: bool = True,
) -> PersistentWork:
    """Set up a :func:`halo_accumulate` of `arrays`, to be started again and again; otherwise as `halo_exchange_init`.

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
