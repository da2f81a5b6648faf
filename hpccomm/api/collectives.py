"""The public collective operations.

Every function takes ``group=None, async_op=False``, which :func:`all_reduce` explains. Don't read or write the arrays
of an asynchronous operation before it has completed. The group keeps them alive, so the program may drop its
references to the arrays and to the Work. All ranks must pass the same `async_op`, because MPI does not match blocking
collectives with nonblocking ones.

A wrong size or rank raises ValueError. A wrong dtype, or an object that is not an array or a list, raises TypeError.
Each rank that can detect the error raises it before anything is sent or written.

c10d's argument names (``tensor=``, ``output_tensor=`` ...) are accepted as keywords too.

Arrays are NumPy or CuPy arrays, or other objects with the buffer protocol or DLPack (``array.array``, torch
tensors ...), contiguous or not. Results are always written into the caller's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core.annotations import NAMED, Array, Integer
from ..core.c10d_names import c10d_names, either
from ..core.operation_list import OPERATIONS
from ..core.reduce_op import SUM, ReduceOpLike
from ..core.work import Work
from .world import member

if TYPE_CHECKING:
    from ..core.non_member import Group


def broadcast(
    array: Array = NAMED,
    src: Integer | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: Integer | None = None,
    tensor: Array = NAMED,
) -> Work | None:
    """Copy one rank's `array` to all ranks of the group, in place: MPI_Bcast (MPI-4.1 §6.4).

    Parameters
    ----------
    array : array
        Read on the source, written on the other ranks. Dtype and number of elements are the same on every rank.
    src, group_src : int
        The source: its *global* rank, or its rank in the group.
    group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError
        `src` is not in the group, both or neither of `src` and `group_src` are given, or `array` is read-only.
    TypeError
        `array` is not an array, or its dtype holds Python objects or has a foreign byte order.

    Examples
    --------
    >>> x = np.arange(3) if hc.get_rank() == 0 else np.empty(3, int)
    >>> hc.broadcast(x, src=0)
    >>> x  # on every rank
    array([0, 1, 2])
    """
    if tensor is not None:
        array = either("broadcast", array=array, tensor=tensor)
    group = member(group)
    ranks, is_plain = group.group_ranks, group_src is None and type(src) is int  # a shortcut for `peer`
    root = ranks[src] if is_plain and src in ranks else group.peer("broadcast", "src", src, group_src)
    return group.broadcast(array, root, async_op)


def all_reduce(
    array: Array = NAMED,
    op: ReduceOpLike = SUM,
    group: Group | None = None,
    async_op: bool = False,
    tensor: Array = NAMED,
) -> Work | None:
    """Reduce `array` over all ranks of the group, in place: MPI_Allreduce (MPI-4.1 §6.9.6).

    Parameters
    ----------
    array : array or scipy.sparse matrix
        The contribution, overwritten by the result. Dtype and number of elements are the same on every rank. A sparse
        matrix (CSR, CSC or COO, with SUM) may have a different pattern on each rank; it becomes the sum.
    op : ReduceOp, str or mpi4py.MPI.Op
        For example ``"max"``. Default: SUM. float16 and bfloat16 are accumulated in float32. ``"reproducible_sum"``
        gives the number closest to each exact sum, so the bits do not depend on the order of the ranks.
    group : ProcessGroup, optional
        A group from :func:`new_group`; each of its ranks makes the same call. Default: the world.
    async_op : bool
        True, on all ranks: return a Work at once. Don't touch `array` until the Work has completed.

    Returns
    -------
    Work or None
        None once the result is in place; the Work if ``async_op=True``.

    Raises
    ------
    ValueError
        `array` is read-only, or `op` is an unknown name.
    TypeError
        `array` is not an array, or `op` is not defined for its dtype (AVG on integers, MAX on complex).

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> hc.all_reduce(x)
    >>> x  # on 4 ranks: array([4., 8.])
    array([1., 2.])
    >>> work = hc.all_reduce(x, "max", async_op=True)  # from here ...
    >>> work.wait()  # ... to here x may not be touched
    True
    """
    if tensor is not None:
        array = either("all_reduce", array=array, tensor=tensor)
    return member(group).all_reduce(array, op, async_op)


def reduce(
    array: Array = NAMED,
    dst: Integer | None = None,
    op: ReduceOpLike = SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: Integer | None = None,
    tensor: Array = NAMED,
) -> Work | None:
    """Reduce `array` over all ranks of the group, in place on one rank: MPI_Reduce (MPI-4.1 §6.9.1).

    Parameters
    ----------
    array : array
        The contribution. It is overwritten by the result on the destination, and only read on the other ranks.
    dst, group_dst : int
        The destination: its *global* rank, or its rank in the group.
    op, group, async_op
        As for :func:`all_reduce`. The errors are those of :func:`all_reduce` and :func:`broadcast`.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> x = np.full(2, hc.get_rank() + 1.0)
    >>> hc.reduce(x, dst=0)
    >>> x  # on rank 0 of 4: array([10., 10.]); unchanged on the others
    array([1., 1.])
    """
    if tensor is not None:
        array = either("reduce", array=array, tensor=tensor)
    group = member(group)
    ranks, is_plain = group.group_ranks, group_dst is None and type(dst) is int  # see broadcast
    root = ranks[dst] if is_plain and dst in ranks else group.peer("reduce", "dst", dst, group_dst)
    return group.reduce(array, root, op, async_op)


def scan(array: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replace rank r's `array` by the reduction of the arrays of ranks 0 to r: MPI_Scan (MPI-4.1 §6.11.1).

    Arguments and errors are those of :func:`all_reduce`; AVG is not supported.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> x = np.array([hc.get_rank() + 1])
    >>> hc.scan(x)
    >>> x  # on 4 ranks: array([1]), array([3]), array([6]), array([10])
    array([1])
    """
    return member(group).scan(array, op, async_op)


def exscan(array: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replace rank r's `array` by the reduction of the arrays of ranks 0 to r-1: MPI_Exscan (MPI-4.1 §6.11.2).

    Rank 0's array keeps its value (MPI leaves it undefined). Arguments and errors are those of :func:`all_reduce`; AVG
    is not supported.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> offset = np.array([3])  # how many rows this rank has; their first row is the sum of the ranks before
    >>> hc.exscan(offset)
    >>> offset  # on 4 ranks: array([3]) (unchanged), array([3]), array([6]), array([9])
    array([3])
    """
    return member(group).exscan(array, op, async_op)


@c10d_names(tensor_list="output_list", tensor="array")
def all_gather(
    output_list: Sequence[Array], array: Array, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Collect the `array` of every rank in a list, on every rank: MPI_Allgatherv (MPI-4.1 §6.7).

    Parameters
    ----------
    output_list : list of arrays
        One array per rank: ``output_list[r]`` receives rank r's `array` and has as many elements. Sizes may differ
        between ranks.
    array : array
        This rank's contribution, of the same dtype as the outputs.
    group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError, TypeError
        The list does not have one array per rank, or this rank's output differs from `array` in size or dtype.

    Examples
    --------
    >>> parts = [np.empty(2) for _ in range(hc.get_world_size())]
    >>> hc.all_gather(parts, np.full(2, hc.get_rank() + 7.0))
    >>> parts  # on 2 ranks: [array([7., 7.]), array([8., 8.])]
    [array([7., 7.])]
    """
    return member(group).all_gather(output_list, array, async_op)


def all_gather_single(
    output: Array = NAMED,
    input: Array = NAMED,
    group: Group | None = None,
    async_op: bool = False,
    output_tensor: Array = NAMED,
    input_tensor: Array = NAMED,
) -> Work | None:
    """Collect the `input` of every rank in one array, on every rank: MPI_Allgather (MPI-4.1 §6.7).

    Also available as `all_gather_into_tensor`.

    Parameters
    ----------
    output : array
        Receives the inputs in rank order, concatenated (shape ``(n * rows, ...)``) or stacked (``(n, rows, ...)``).
        On `n` ranks it has `n` times as many elements as `input`, and the same dtype.
    input : array
        This rank's contribution; every rank's has the same number of elements. It may be this rank's part of `output`.
    group, async_op
        As for :func:`all_gather`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> stacked = np.empty((hc.get_world_size(), 3))
    >>> hc.all_gather_single(stacked, np.arange(3.0) + hc.get_rank())
    >>> stacked  # one row from each rank
    array([[0., 1., 2.]])
    """
    if output_tensor is not None:
        output = either("all_gather_single", output=output, output_tensor=output_tensor)
    if input_tensor is not None:
        input = either("all_gather_single", input=input, input_tensor=input_tensor)
    return member(group).all_gather_single(output, input, async_op)


@c10d_names(tensor="array")
def gather(
    array: Array,
    gather_list: Sequence[Array] | None = None,
    dst: Integer | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: Integer | None = None,
) -> Work | None:
    """Collect the `array` of every rank in a list, on one rank: MPI_Gatherv (MPI-4.1 §6.5).

    Parameters
    ----------
    array : array
        This rank's contribution. Sizes may differ between ranks.
    gather_list : list of arrays
        On the destination: one array per rank, like `output_list` in :func:`all_gather`. On other ranks: None.
    dst, group_dst : int, optional
        The destination: its *global* rank, or its rank in the group. Default: the group's first rank.
    group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError, TypeError
        The list is missing on the destination or given on another rank, or sizes or dtypes do not fit.

    Examples
    --------
    >>> parts = [np.empty(2) for _ in range(hc.get_world_size())] if hc.get_rank() == 0 else None
    >>> hc.gather(np.full(2, hc.get_rank() + 7.0), parts, dst=0)
    >>> parts  # on rank 0 of 2: [array([7., 7.]), array([8., 8.])]; on rank 1: None
    [array([7., 7.])]
    """
    group = member(group)
    return group.gather(array, gather_list, group.root("gather", "dst", dst, group_dst), async_op)


@c10d_names(tensor="output")
def scatter(
    output: Array,
    scatter_list: Sequence[Array] | None = None,
    src: Integer | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: Integer | None = None,
) -> Work | None:
    """Distribute one rank's list of arrays, one array to each rank: MPI_Scatterv (MPI-4.1 §6.6).

    Parameters
    ----------
    output : array
        Receives this rank's part. Sizes may differ between ranks.
    scatter_list : list of arrays
        On the source: one array per rank. On other ranks: None.
    src, group_src : int, optional
        The source: its *global* rank, or its rank in the group. Default: the group's first rank.
    group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError, TypeError
        The list is missing on the source or given on another rank, or sizes or dtypes do not fit.

    Examples
    --------
    >>> part = np.empty(2)
    >>> parts = [np.full(2, r + 7.0) for r in range(hc.get_world_size())] if hc.get_rank() == 0 else None
    >>> hc.scatter(part, parts, src=0)
    >>> part  # on rank 1: array([8., 8.])
    array([7., 7.])
    """
    group = member(group)
    return group.scatter(output, scatter_list, group.root("scatter", "src", src, group_src), async_op)


def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOpLike = SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the r-th arrays of all ranks' lists onto rank r: MPI_Reduce_scatter (MPI-4.1 §6.10.2).

    Parameters
    ----------
    output : array
        Receives this rank's part. Sizes may differ between ranks.
    input_list : list of arrays
        One array per rank: ``input_list[r]`` has as many elements as rank r's `output`. All have the same dtype.
    op, group, async_op
        As for :func:`all_reduce`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> mine = np.empty(2)
    >>> hc.reduce_scatter(mine, [np.full(2, r + 7.0) for r in range(hc.get_world_size())])
    >>> mine  # on 2 ranks: array([14., 14.]), array([16., 16.])
    array([7., 7.])
    """
    return member(group).reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_single(
    output: Array, input: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Reduce `input` over the ranks and scatter the result in equal parts: MPI_Reduce_scatter_block (MPI-4.1 §6.10.1).

    Also available as `reduce_scatter_tensor`.

    Parameters
    ----------
    output : array
        Receives part r of the reduced input on rank r.
    input : array
        This rank's contribution. On `n` ranks it has `n` times as many elements as `output`, and the same dtype.
    op, group, async_op
        As for :func:`all_reduce`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> mine = np.empty(2)
    >>> hc.reduce_scatter_single(mine, np.arange(2.0 * hc.get_world_size()))
    >>> mine  # on 2 ranks: array([0., 2.]), array([4., 6.])
    array([0., 1.])
    """
    return member(group).reduce_scatter_single(output, input, op, async_op)


@c10d_names(output_tensor_list="output_list", input_tensor_list="input_list")
def all_to_all(
    output_list: Sequence[Array], input_list: Sequence[Array], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Send a different array to each rank, and receive one from each: MPI_Alltoallv (MPI-4.1 §6.8).

    Parameters
    ----------
    output_list : list of arrays
        ``output_list[s]`` receives rank s's array for this rank. Dtypes are the same; sizes may all differ.
    input_list : list of arrays
        ``input_list[r]`` is sent to rank r.
    group, async_op
        As for :func:`all_gather`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> received = [np.empty(1) for _ in range(n)]
    >>> hc.all_to_all(received, [np.array([10.0 * me + r]) for r in range(n)])
    >>> received  # on rank 1 of 2: [array([1.]), array([11.])]
    [array([0.])]
    """
    return member(group).all_to_all(output_list, input_list, async_op)


def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | np.ndarray | None = None,
    input_split_sizes: Sequence[int] | np.ndarray | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send a part of `input` to each rank, and receive a part of `output` from each: MPI_Alltoall (MPI-4.1 §6.8).

    Split sizes make it MPI_Alltoallv.

    Parameters
    ----------
    output : array
        Receives the parts in rank order, along axis 0.
    input : array
        The parts to send, in rank order, along axis 0. It has the dtype and row shape of `output`.
    output_split_sizes, input_split_sizes : list or array of int, optional
        Numbers of rows received from each rank, and sent to each rank. Default (on every rank): equal parts.
    group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError, TypeError
        Split sizes do not add up to the rows; without sizes, axis 0 has no equal parts; or dtypes differ.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> received = np.empty(2 * n)
    >>> hc.all_to_all_single(received, np.repeat(10.0 * me + np.arange(n), 2))
    >>> received  # on rank 1 of 2: array([ 1.,  1., 11., 11.])
    array([0., 0.])
    """
    group = member(group)
    return group.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


__all__ = [name for name in OPERATIONS if name in globals()]
