"""Node-shared arrays, which all ranks of a node can read and write directly, and their counterpart on GPUs.

If the group's backend for host arrays is not MPI, the functions for host arrays raise UnsupportedOperationError.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.annotations import Integer
from ..core.non_member import Group
from .world import member


def empty_shared(shape: int | tuple[int, ...], dtype: Any = float, group: Group | None = None) -> np.ndarray:
    """Make an array on each rank, in memory that its node shares: MPI_Win_allocate_shared (MPI-4.1 §12.2.3).

    Every rank of the group calls it and gets its own array. :func:`peer_view` gives access to the arrays of the other
    ranks on the node. A :func:`fence` must separate one rank's writes from another's reads.

    If all ranks of the group are on one node, blocking `all_reduce`, `reduce` and `reduce_scatter_single` reduce these
    arrays in place, from 1 MiB on. Every operation accepts them: they are NumPy arrays.

    Parameters
    ----------
    shape : int or tuple of int
        May differ between ranks. 0: the rank contributes no memory, but can view the other ranks' arrays.
    dtype : dtype
        The same on every rank; any but object dtypes and foreign byte order. Default: float64.
    group : ProcessGroup, optional
        Default: the world. The array belongs to this group.

    Returns
    -------
    numpy.ndarray
        Contiguous, uninitialized.

    Raises
    ------
    ValueError
        The dtype differs between ranks (on every rank; the message names both), or `shape` is negative.
    MemoryError
        A node has too little memory for the arrays of its ranks (on every rank).
    TypeError
        `dtype` holds Python objects or has a foreign byte order.

    Notes
    -----
    The memory is freed when the group is destroyed. If a rank still holds the array or a view of it then, the memory
    stays valid until the process ends. For temporary arrays, make a group for them and destroy it.

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
    """Make a GPU array on each rank, in memory that NCCL registers on all ranks: ncclCommWindowRegister.

    Every rank of the group calls it on its GPU in the group, and gets its own array. NCCL's kernels may then read and
    write the arrays of other ranks directly. Every operation accepts these arrays: they are CuPy arrays. In one
    operation, NCCL requires that either all ranks use them (whole, or the same contiguous part) or none does. On GPUs
    without symmetric memory they are ordinary arrays. The gain in speed has not been measured yet.

    Parameters
    ----------
    shape : int or tuple of int
        The same on every rank.
    dtype : dtype
        The same on every rank; any but object dtypes and foreign byte order. Default: float64.
    group : ProcessGroup, optional
        Default: the world. The array belongs to this group; the call connects the group's GPUs if necessary.

    Returns
    -------
    cupy.ndarray
        Contiguous, uninitialized.

    Raises
    ------
    ValueError
        Shape or dtype differ between ranks (on every rank; the message names both), or `shape` is negative.
    DistBackendError
        A GPU has too little memory (on every rank), or NCCL is older than 2.27.
    UnsupportedOperationError
        The group's backend for GPU arrays is not NCCL.
    TypeError
        `dtype` holds Python objects or has a foreign byte order.

    Notes
    -----
    The memory (ncclMemAlloc, in units of some MiB) is freed when the group is destroyed. If a rank still holds the
    array or a view of it then, the memory stays valid until the process ends. Before the group is destroyed, work on
    the array in streams other than the current one must have completed.

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
    """Return another rank's node-shared array, not a copy: MPI_Win_shared_query (MPI-4.1 §12.2.3).

    The call is local. Values that either rank writes are visible to the other after both have called :func:`fence`.

    Parameters
    ----------
    array : numpy.ndarray
        This rank's array from :func:`empty_shared`. If the neighbour's array has the same shape, it may be a view: for
        ``x[1:-1]`` the result is the neighbour's ``x[1:-1]``.
    rank : int
        The *global* rank of the neighbour, which is on the same node. This rank itself is allowed.
    group : ProcessGroup, optional
        The group for which `array` was made. Default: the world.

    Returns
    -------
    numpy.ndarray
        An array with the shape, dtype and strides of `array`; if the neighbour's array has another shape, all of it.

    Raises
    ------
    ValueError
        `rank` is on another node or not in the group, or `array` is not this rank's node-shared array of the group (a
        `peer_view` is another rank's), or `array` is a view and the neighbour's array has another shape.

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
    """Wait for all ranks of the node; afterwards each rank sees the earlier writes of the others to the shared array.

    Every rank of the group calls it. An exchange needs it twice: between one rank's writes and another's reads, and
    between the reads and the next writes. Collectives need no fence. It does not wait for ranks of other nodes. It
    calls MPI_Win_sync, a barrier of the node, and MPI_Win_sync again (MPI-4.1 §12.8).

    Parameters
    ----------
    array, group
        As for :func:`peer_view`. The fence applies to the whole array.

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
