"""Node-shared arrays: NumPy arrays that the other ranks of the node can read and write directly; their sister on GPUs.

The group's backend for host arrays has to be MPI: otherwise these functions raise UnsupportedOperationError.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.annotations import Integer
from ..core.non_member import Group
from .world import member


def empty_shared(shape: int | tuple[int, ...], dtype: Any = float, group: Group | None = None) -> np.ndarray:
    """Make an array on each rank, in memory that its node shares: MPI_Win_allocate_shared (MPI-4.1 §12.2.3).

    Every rank of the group calls it, and gets an array of its own. :func:`peer_view` gives access to the arrays of the
    neighbours on the node; a :func:`fence` must separate one rank's writing from another's reading.

    `all_reduce`, `reduce`, `broadcast`, `all_gather_single` and `reduce_scatter_single` of such arrays are several
    times faster than of ordinary arrays if all ranks of the group are on one node. Every other operation takes them
    too: they are NumPy arrays.

    Parameters
    ----------
    shape : int or tuple of int
        Each rank's own. 0: the rank gives no memory, and sees that of others.
    dtype : dtype
        The same on every rank; any but object and foreign byte order. Default: float64.
    group : ProcessGroup, optional
        Default: the world. The array belongs to this group.

    Returns
    -------
    numpy.ndarray
        Contiguous, its values arbitrary.

    Raises
    ------
    ValueError
        The dtype differs between ranks (on every rank; the message names both), or `shape` is negative.
    MemoryError
        A node has no room for the arrays of its ranks (on every rank).
    TypeError
        `dtype` holds Python objects or has a foreign byte order.

    Notes
    -----
    The memory is given back when the group is destroyed; if a rank still has the array or a view of it by then, it
    stays valid memory, and is given back when the process ends. For arrays that are needed for a part of the program
    only, make a group for them, and destroy it.

    Examples
    --------
    >>> x = hc.empty_shared((2, 3), np.float32)
    >>> x[...] = 1
    >>> hc.all_reduce(x)
    >>> x  # on 4 ranks the sums are 4
    array([[1., 1., 1.],
           [1., 1., 1.]], dtype=float32)
    """
    return member(group).empty_shared(shape, dtype)


def empty_symmetric(shape: int | tuple[int, ...], dtype: Any = float, group: Group | None = None) -> Any:
    """Make a GPU array on each rank, in memory that NCCL registers with all of them: ncclCommWindowRegister.

    Every rank of the group calls it, on its GPU in the group, and gets an array of its own. NCCL's kernels may then
    read and write the arrays of other ranks directly. Every operation takes such arrays: they are CuPy's. NCCL asks
    that in one operation all ranks use them or none does, whole or the same contiguous part. Where the GPUs have no
    symmetric memory, they are ordinary arrays. What it gains between GPUs is not known yet.

    Parameters
    ----------
    shape : int or tuple of int
        The same on every rank.
    dtype : dtype
        The same on every rank; any but object and foreign byte order. Default: float64.
    group : ProcessGroup, optional
        Default: the world. The array belongs to this group, which is connected if it was not.

    Returns
    -------
    cupy.ndarray
        Contiguous, its values arbitrary.

    Raises
    ------
    ValueError
        Shape or dtype differ between ranks (on every rank; the message names both), or `shape` is negative.
    DistBackendError
        A GPU has no room for it (on every rank), or NCCL is older than 2.27.
    UnsupportedOperationError
        The group's GPU arrays do not go over NCCL.
    TypeError
        `dtype` holds Python objects or has a foreign byte order.

    Notes
    -----
    The memory (ncclMemAlloc, in units of some MiB) is given back when the group is destroyed; if a rank still has the
    array or a view of it by then, it stays, until the process ends. What uses the array on other streams than the
    current one has to end before the group is destroyed.

    Examples
    --------
    >>> try:
    ...     x = hc.empty_symmetric((2, 3), np.float32)
    ... except hc.DistBackendError:  # here is no GPU
    ...     x = np.empty((2, 3), np.float32)
    >>> x[...] = 1
    >>> hc.all_reduce(x)
    >>> x.sum().item()  # on 4 ranks: 24.0
    6.0
    """
    return member(group).empty_symmetric(shape, dtype)


def peer_view(array: np.ndarray, rank: Integer, group: Group | None = None) -> np.ndarray:
    """Return the node-shared array of another rank, not a copy of it: MPI_Win_shared_query (MPI-4.1 §12.2.3).

    The call is local. Values that the other rank writes are there after both have called :func:`fence`; likewise those
    that this rank writes to the view.

    Parameters
    ----------
    array : numpy.ndarray
        An array of :func:`empty_shared`, or, where the neighbour's has the same shape, a view of it: of ``x[1:-1]`` the
        result is the neighbour's ``x[1:-1]``.
    rank : int
        The *global* rank of the neighbour, on the same node. This rank itself is allowed.
    group : ProcessGroup, optional
        The group that `array` was made with. Default: the world.

    Returns
    -------
    numpy.ndarray
        Of the shape, dtype and strides of `array`; where the neighbour's array has another shape, all of that.

    Raises
    ------
    ValueError
        `rank` is on another node or not in the group, or `array` is not a node-shared array of the group (a
        `peer_view` is not: it is another rank's), or it is a view and the neighbour's array has another shape.

    Examples
    --------
    >>> x = hc.empty_shared(4)
    >>> neighbour = hc.peer_view(x, (hc.get_rank() + 1) % hc.get_world_size())
    >>> neighbour[0] = 7
    >>> hc.fence(x)
    >>> x[0].item()
    7.0
    """
    group = member(group)
    return group.peer_view(array, group.peer("peer_view", "rank", rank, None))


def fence(array: np.ndarray, group: Group | None = None) -> None:
    """Wait for all ranks of the node; afterwards each sees what the others wrote to the shared array before.

    Every rank of the group calls it. It is needed twice around an exchange: after the writing and before others read,
    and after the reading and before it is overwritten. The collectives need none. Ranks of other nodes are not waited
    for. It is MPI_Win_sync, a barrier of the node, MPI_Win_sync (MPI-4.1 §12.8).

    Parameters
    ----------
    array, group
        As for :func:`peer_view`. The fence is for the whole array.

    Returns
    -------
    None

    Raises
    ------
    ValueError
        `array` is not a node-shared array of the group.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> x = hc.empty_shared(2)
    >>> right = hc.peer_view(x, (me + 1) % n)  # all ranks are on one node
    >>> right[...] = me
    >>> hc.fence(x)
    >>> x  # on rank 1: array([0., 0.]), which rank 0 wrote
    array([0., 0.])
    """
    member(group).fence(array)
