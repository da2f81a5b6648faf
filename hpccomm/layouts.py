"""Layouts: how a global array is cut into boxes, one for each rank, and the way from one layout to another."""

from __future__ import annotations

from .core.annotations import Array, Integer
from .core.non_member import Group
from .core.persistent_work import PersistentWork
from .core.redistribution import Slices
from .core.redistribution import block as _block
from .core.work import Work
from .world import member


def redistribute(
    output: Array,
    input: Array,
    output_box: Slices,
    input_box: Slices,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Bring a global array from one layout to another: each rank has a box of it, and gets another one.

    From slabs to pencils, as Fourier transforms need it; a transpose over all ranks; blocks to blocks with ghosts.
    Every rank of the group calls it, and gives what its own arrays hold.

    Parameters
    ----------
    output, input : array
        What this rank gets and what it has, of one dtype and any layout. Their last axes are those of the boxes; axes
        before these are the same on every rank, and stay as they are. They may share memory.
    output_box, input_box : tuple of slice
        Where they are in the global array: a start and a stop for each axis; :func:`block` helps. Outputs may overlap.
        So may inputs: a cell that several ranks have comes from the lowest of them. An empty box is nothing.
    group : ProcessGroup, optional
        Default: the world.
    async_op : bool
        True: return a Work at once; until it is done, neither array may be touched.

    Returns
    -------
    Work or None
        A Work with ``async_op=True``; its result is `output`.

    Raises
    ------
    ValueError
        On every rank: an array does not have the shape of its box, boxes have not the same number of axes, or a cell
        of an output is in no input (the message names it).
    TypeError
        A box is not made of slices; output and input have different dtypes.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> rows = np.arange(12.0).reshape(4, 3)[hc.block(4, n, me)]  # a slab of the rows of a global array
    >>> columns = np.empty((4, 3))[:, hc.block(3, n, me)]
    >>> hc.redistribute(columns, rows, (slice(0, 4), hc.block(3, n, me)), (hc.block(4, n, me), slice(0, 3)))
    >>> columns[:2]  # on one rank
    array([[0., 1., 2.],
           [3., 4., 5.]])
    """
    return member(group).redistribute(output, input, output_box, input_box, async_op)


def redistribute_init(
    output: Array, input: Array, output_box: Slices, input_box: Slices, group: Group | None = None
) -> PersistentWork:
    """Set up a :func:`redistribute`, to be started again and again: the boxes are compared once.

    Arguments and errors are those of :func:`redistribute`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> mine, whole = np.array([hc.get_rank()]), np.empty(hc.get_world_size(), int)
    >>> me, n = hc.get_rank(), hc.get_world_size()
    >>> with hc.redistribute_init(whole, mine, slice(0, n), slice(me, me + 1)) as gathering:
    ...     gathering.start()
    ...     gathering.wait()
    True
    >>> whole  # on 3 ranks: array([0, 1, 2])
    array([0])
    """
    return member(group).redistribute_init(output, input, output_box, input_box)


def block(n: Integer, parts: Integer, index: Integer) -> slice:
    """Return the slice of one of `parts` nearly equal blocks of `n` cells, counted from 0.

    Parameters
    ----------
    n : int
        Cells along an axis.
    parts : int
        Ranks along it.
    index : int
        This rank's number among them.

    Returns
    -------
    slice
        With a start and a stop; blocks differ by one cell at most.

    Raises
    ------
    ValueError
        `index` is not from 0 to `parts` - 1, or `n` is negative.

    Examples
    --------
    >>> [hc.block(10, 3, index) for index in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return _block(n, parts, index)
