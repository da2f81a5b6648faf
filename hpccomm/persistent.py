"""Persistent operations: set up once, started again and again on the same arrays.

``all_reduce_init(array)`` and its siblings check their arguments, pack what has to be packed and let MPI plan the
operation (MPI-4.1 §6.13), all of it once; `start` and `wait` then cost two short calls. Every rank of the group makes
the same ``*_init`` calls in the same order, and starts them in the same order. MPI does not match a persistent
collective with an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .core import checks
from .core.arrays import Array
from .core.group import ProcessGroup
from .core.non_member import NonMember
from .core.persistent_work import PersistentWork
from .core.reduce_op import ReduceOp, ReduceOpLike
from .errors import DistError, here
from .world import member, member_of

SUM = ReduceOp.SUM
Group = ProcessGroup | NonMember


def all_reduce_init(array: Array, op: ReduceOpLike = SUM, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_reduce` of `array`, to be started again and again.

    Parameters
    ----------
    array, op, group
        As for :func:`all_reduce`; sparse matrices are refused.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_reduce`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Allreduce_init (MPI-4.1 §6.13).

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
    device, view, reduce_op = checks.reducible("all_reduce_init", "array", array, op)
    return _set_up(group, device, "all_reduce", array, view, reduce_op)


def broadcast_init(
    array: Array, src: int | None = None, group: Group | None = None, group_src: int | None = None
) -> PersistentWork:
    """Set up a :func:`broadcast` of `array`, to be started again and again.

    Parameters
    ----------
    array, src, group, group_src
        As for :func:`broadcast`.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`broadcast`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Bcast_init (MPI-4.1 §6.13).

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
    found = member_of(group)
    root = found.peer("broadcast_init", "src", src, group_src)
    check = checks.readable if root == found.rank else checks.writable
    device, view = check("broadcast_init", "array", array)
    return _set_up(found, device, "broadcast", array, view, root)


def all_gather_single_init(output: Array, input: Array, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_gather_single`, to be started again and again.

    Parameters
    ----------
    output, input, group
        As for :func:`all_gather_single`.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_gather_single`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Allgather_init (MPI-4.1 §6.13).

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
    device, out, view = checks.pair("all_gather_single_init", output, input)
    member_of(group)._check_multiple("all_gather_single_init", "output", out, "input", view)
    return _set_up(group, device, "all_gather_single", output, out, view)


def reduce_scatter_single_init(
    output: Array, input: Array, op: ReduceOpLike = SUM, group: Group | None = None
) -> PersistentWork:
    """Set up a :func:`reduce_scatter_single`, to be started again and again.

    Parameters
    ----------
    output, input, op, group
        As for :func:`reduce_scatter_single`.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`reduce_scatter_single`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Reduce_scatter_block_init (MPI-4.1 §6.13).

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
    device, out, view = checks.pair("reduce_scatter_single_init", output, input)
    member_of(group)._check_multiple("reduce_scatter_single_init", "input", view, "output", out)
    reduce_op = checks.reduction("reduce_scatter_single_init", "output", out, op)
    return _set_up(group, device, "reduce_scatter_single", output, out, view, reduce_op)


def all_to_all_single_init(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | np.ndarray | None = None,
    input_split_sizes: Sequence[int] | np.ndarray | None = None,
    group: Group | None = None,
) -> PersistentWork:
    """Set up an :func:`all_to_all_single`, to be started again and again.

    Parameters
    ----------
    output, input, output_split_sizes, input_split_sizes, group
        As for :func:`all_to_all_single`.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_to_all_single`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Alltoall_init, and with split sizes MPI_Alltoallv_init (MPI-4.1 §6.13).

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
    size = member_of(group).size
    device, out, view = checks.pair("all_to_all_single_init", output, input)
    to_receive = checks.splits("all_to_all_single_init", "output", out, output_split_sizes, size)
    to_send = checks.splits("all_to_all_single_init", "input", view, input_split_sizes, size)
    return _set_up(group, device, "all_to_all_single", output, out, view, to_receive, to_send)


def send_init(
    array: Array, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> PersistentWork:
    """Set up an :func:`isend` of `array`, to be started again and again.

    Parameters
    ----------
    array, dst, group, tag, group_dst
        As for :func:`isend`.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`isend`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Send_init (MPI-4.1 §3.9).

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
    found = member_of(group)
    device, view = checks.readable("send_init", "array", array)
    return _set_up(found, device, "send", array, view, found.peer("send_init", "dst", dst, group_dst), tag)


def recv_init(
    array: Array, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> PersistentWork:
    """Set up an :func:`irecv` into `array`, to be started again and again.

    Parameters
    ----------
    array, src, group, tag, group_src
        As for :func:`irecv`.

    Returns
    -------
    PersistentWork
        The operation, ready to be started. Between its `start` and its `wait` the arrays may not be touched; they are
        kept alive until it is freed.

    Raises
    ------
    ValueError, TypeError
        As :func:`irecv`.
    UnsupportedOperationError
        The backend of the arrays' device has no persistent operations.

    Notes
    -----
    Semantics: MPI_Recv_init (MPI-4.1 §3.9).

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
    found = member_of(group)
    device, view = checks.writable("recv_init", "array", array)
    source = None if src is None and group_src is None else found.peer("recv_init", "src", src, group_src)
    return _set_up(found, device, "recv", array, view, source, tag)


def _set_up(group: Group | None, device: str, operation: str, result: Any, *arguments: Any) -> PersistentWork:
    found = member_of(member(group))
    if found._backends.collecting:
        raise DistError(f"{operation}_init: not inside a coalescing() block{here()}")
    work = found._backends[device].persistent(operation, *arguments)
    work.op_type = operation
    work.output = result
    found._persistent.append(work)
    work.forget = found._persistent.remove
    return work
