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
    device, view, reduce_op = checks.reducible("all_reduce_init", "array", array, op)
    return _set_up(group, device, "all_reduce", array, view, reduce_op)


def broadcast_init(
    array: Array, src: int | None = None, group: Group | None = None, group_src: int | None = None
) -> PersistentWork:
    """Set up a :func:`broadcast` of `array`; see there for parameters and errors."""
    found = member_of(group)
    root = found.peer("broadcast_init", "src", src, group_src)
    check = checks.readable if root == found.rank else checks.writable
    device, view = check("broadcast_init", "array", array)
    return _set_up(found, device, "broadcast", array, view, root)


def all_gather_single_init(output: Array, input: Array, group: Group | None = None) -> PersistentWork:
    """Set up an :func:`all_gather_single`; see there for parameters and errors."""
    device, out, view = checks.pair("all_gather_single_init", output, input)
    member_of(group)._check_multiple("all_gather_single_init", "output", out, "input", view)
    return _set_up(group, device, "all_gather_single", output, out, view)


def reduce_scatter_single_init(
    output: Array, input: Array, op: ReduceOpLike = SUM, group: Group | None = None
) -> PersistentWork:
    """Set up a :func:`reduce_scatter_single`; see there for parameters and errors."""
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
    """Set up an :func:`all_to_all_single`; see there for parameters and errors."""
    size = member_of(group).size
    device, out, view = checks.pair("all_to_all_single_init", output, input)
    to_receive = checks.splits("all_to_all_single_init", "output", out, output_split_sizes, size)
    to_send = checks.splits("all_to_all_single_init", "input", view, input_split_sizes, size)
    return _set_up(group, device, "all_to_all_single", output, out, view, to_receive, to_send)


def send_init(
    array: Array, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> PersistentWork:
    """Set up an :func:`isend` of `array`; see there for parameters and errors."""
    found = member_of(group)
    device, view = checks.readable("send_init", "array", array)
    return _set_up(found, device, "send", array, view, found.peer("send_init", "dst", dst, group_dst), tag)


def recv_init(
    array: Array, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> PersistentWork:
    """Set up an :func:`irecv` into `array`; see there for parameters and errors."""
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
