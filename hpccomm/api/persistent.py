"""Persistent operations: set up an operation once, and start it again and again on the same arrays.

``all_reduce_init(array)`` and its siblings check their arguments, prepare packing and let MPI plan the operation
(MPI-4.1 §6.13) only once. Afterwards `start` and `wait` are two short calls. They accept the same arrays as
the ordinary operations. Every rank of the group makes the same ``*_init`` calls and starts them in the same order.
MPI does not match a persistent collective with an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.annotations import Array, Integer
from ..core.non_member import Group, NothingToStart
from ..core.persistent_work import PersistentWork
from ..core.reduce_op import SUM, ReduceOpLike
from .world import member


def all_reduce_init(array: Array, op: ReduceOpLike = SUM, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_reduce` of `array`, to be started again and again: MPI_Allreduce_init (MPI-4.1 §6.13).

    Parameters
    ----------
    array, op, group
        As for :func:`all_reduce`; sparse matrices are not supported.

    Returns
    -------
    PersistentWork
        The operation, ready to start. Don't touch the arrays between `start` and `wait`. The operation keeps them alive
        until it is freed.

    Raises
    ------
    ValueError, TypeError
        As for :func:`all_reduce`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Examples
    --------
    >>> x = np.zeros(2)
    >>> with hc.all_reduce_init(x, "max") as reduction:
    ...     for step in range(3):
    ...         x += 1
    ...         reduction.start()
    ...         done = reduction.wait()
    >>> x
    array([3., 3.])
    """
    return member(group).all_reduce_init(array, op)


def all_reduce_coalesced_init(
    arrays: Sequence[Array], op: ReduceOpLike = SUM, group: Group | None = None
) -> PersistentWork:
    """Set up an :func:`all_reduce_coalesced` of `arrays`; otherwise like :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> x, y = np.ones(2), np.arange(3)
    >>> with hc.all_reduce_coalesced_init([x, y]) as reduction:
    ...     reduction.start()
    ...     reduction.wait()
    True
    >>> y
    array([0, 1, 2])
    """
    return member(group).all_reduce_coalesced_init(arrays, op)


def broadcast_init(
    array: Array, src: Integer | None = None, group: Group | None = None, group_src: Integer | None = None
) -> PersistentWork:
    """Set up a :func:`broadcast` of `array`, to be started again and again: MPI_Bcast_init (MPI-4.1 §6.13).

    Arguments and errors are those of :func:`broadcast`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> x = np.arange(2.0) if hc.get_rank() == 0 else np.empty(2)
    >>> with hc.broadcast_init(x, src=0) as copy:
    ...     copy.start()
    ...     copy.wait()
    True
    >>> x  # on every rank
    array([0., 1.])
    """
    group = member(group)
    return group.broadcast_init(array, group.peer("broadcast_init", "src", src, group_src))


def all_gather_single_init(output: Array, input: Array, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_gather_single`, to be started again and again: MPI_Allgather_init (MPI-4.1 §6.13).

    Arguments and errors are those of :func:`all_gather_single`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> parts = np.empty((hc.get_world_size(), 2))
    >>> with hc.all_gather_single_init(parts, np.full(2, hc.get_rank() + 7.0)) as gathering:
    ...     gathering.start()
    ...     gathering.wait()
    True
    >>> parts  # one row from each rank
    array([[7., 7.]])
    """
    return member(group).all_gather_single_init(output, input)


def reduce_scatter_single_init(
    output: Array, input: Array, op: ReduceOpLike = SUM, group: Group | None = None
) -> PersistentWork:
    """Set up a :func:`reduce_scatter_single`, to be started again: MPI_Reduce_scatter_block_init (MPI-4.1 §6.13).

    Arguments and errors are those of :func:`reduce_scatter_single`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> mine = np.empty(2)
    >>> with hc.reduce_scatter_single_init(mine, np.arange(2.0 * hc.get_world_size())) as reduction:
    ...     reduction.start()
    ...     reduction.wait()
    True
    >>> mine  # on 2 ranks: array([0., 2.]), array([4., 6.])
    array([0., 1.])
    """
    return member(group).reduce_scatter_single_init(output, input, op)


def all_to_all_single_init(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | np.ndarray | None = None,
    input_split_sizes: Sequence[int] | np.ndarray | None = None,
    group: Group | None = None,
) -> PersistentWork:
    """Set up an :func:`all_to_all_single`, to be started again and again: MPI_Alltoall_init (MPI-4.1 §6.13).

    Split sizes make it MPI_Alltoallv_init. Arguments and errors are those of :func:`all_to_all_single`, the result is
    that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> received = np.empty(n)
    >>> with hc.all_to_all_single_init(received, 10.0 * me + np.arange(n)) as exchange:
    ...     exchange.start()
    ...     exchange.wait()
    True
    >>> received  # on rank 1 of 2: array([ 1., 11.])
    array([0.])
    """
    return member(group).all_to_all_single_init(output, input, output_split_sizes, input_split_sizes)


def send_init(
    array: Array,
    dst: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: Integer | None = None,
) -> PersistentWork:
    """Set up an :func:`isend` of `array`, to be started again and again: MPI_Send_init (MPI-4.1 §3.9).

    Arguments and errors are those of :func:`isend`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> x, left = np.zeros(1), np.empty(1)
    >>> with hc.send_init(x, (me + 1) % n) as to_right, hc.recv_init(left, (me - 1) % n) as from_left:
    ...     for step in range(3):
    ...         x += 1
    ...         from_left.start()
    ...         to_right.start()
    ...         done = from_left.wait() and to_right.wait()
    >>> left  # on every rank
    array([3.])
    """
    group = member(group)
    peer = group.peer("send_init", "dst", dst, group_dst)
    return group.send_init(array, peer, tag) if peer >= 0 else NothingToStart()


def recv_init(
    array: Array,
    src: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: Integer | None = None,
) -> PersistentWork:
    """Set up an :func:`irecv` into `array`, to be started again and again: MPI_Recv_init (MPI-4.1 §3.9).

    Arguments and errors are those of :func:`irecv`, the result is that of :func:`all_reduce_init`.

    Returns
    -------
    PersistentWork

    Examples
    --------
    >>> x = np.empty(2)
    >>> receive = hc.recv_init(x, src=hc.get_rank())  # from oneself
    >>> receive.start()
    >>> sent = hc.isend(np.arange(2.0), dst=hc.get_rank())
    >>> receive.wait() and sent.wait()
    True
    >>> x
    array([0., 1.])
    >>> receive.free()
    """
    group = member(group)
    peer = group.source("recv_init", src, group_src)
    return NothingToStart() if peer is not None and peer < 0 else group.recv_init(array, peer, tag)
