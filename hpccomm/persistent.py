"""Persistent operations: set up once, started again and again on the same arrays.

``all_reduce_init(array)`` and its siblings check their arguments, pack what has to be packed and let MPI plan the
operation (MPI-4.1 §6.13), all of it once; `start` and `wait` then cost two short calls. They accept what the ordinary
operations accept. Every rank of the group makes the same ``*_init`` calls in the same order, and starts them in the
same order. MPI does not match a persistent collective with an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .core.arrays import Array
from .core.non_member import Group
from .core.persistent_work import PersistentWork
from .core.reduce_op import ReduceOp, ReduceOpLike
from .world import member

SUM = ReduceOp.SUM


def all_reduce_init(array: Array, op: ReduceOpLike = SUM, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_reduce` of `array`; see there for parameters and errors.

    Examples
    --------
    >>> x = np.ones(2)
    >>> with hc.all_reduce_init(x) as reduction:
    ...     for step in range(3):
    ...         x += 1
    ...         reduction.start()
    ...         reduction.wait()
    True
    True
    True
    """
    return member(group).all_reduce_init(array, op)


def all_reduce_coalesced_init(
    arrays: Sequence[Array], op: ReduceOpLike = SUM, group: Group | None = None
) -> PersistentWork:
    """Set up an :func:`all_reduce_coalesced` of `arrays`; see there for parameters and errors.

    Returns
    -------
    PersistentWork
        Its `start` and `wait` reduce what the arrays hold then.

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
    array: Array, src: int | None = None, group: Group | None = None, group_src: int | None = None
) -> PersistentWork:
    """Set up a :func:`broadcast` of `array`; see there for parameters and errors."""
    found = member(group)
    return found.broadcast_init(array, found.peer("broadcast_init", "src", src, group_src))


def all_gather_single_init(output: Array, input: Array, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_gather_single`; see there for parameters and errors."""
    return member(group).all_gather_single_init(output, input)


def reduce_scatter_single_init(
    output: Array, input: Array, op: ReduceOpLike = SUM, group: Group | None = None
) -> PersistentWork:
    """Set up a :func:`reduce_scatter_single`; see there for parameters and errors."""
    return member(group).reduce_scatter_single_init(output, input, op)


def all_to_all_single_init(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | np.ndarray | None = None,
    input_split_sizes: Sequence[int] | np.ndarray | None = None,
    group: Group | None = None,
) -> PersistentWork:
    """Set up an :func:`all_to_all_single`; see there for parameters and errors."""
    return member(group).all_to_all_single_init(output, input, output_split_sizes, input_split_sizes)


def send_init(
    array: Array, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> PersistentWork:
    """Set up an :func:`isend` of `array`; see there for parameters and errors."""
    found = member(group)
    return found.send_init(array, found.peer("send_init", "dst", dst, group_dst), tag)


def recv_init(
    array: Array, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> PersistentWork:
    """Set up an :func:`irecv` into `array`; see there for parameters and errors."""
    found = member(group)
    return found.recv_init(array, found.source("recv_init", src, group_src), tag)
