"""The collective operations, as users call them.

Every function ends with ``group=None, async_op=False``. `group` is what :func:`new_group` returned, or None for
the world; every rank of the group makes the same call. With ``async_op=False`` the call returns None when the
result is in place; with ``async_op=True`` it returns a :class:`Work` at once, and the arrays may not be touched
until that has completed. All ranks of a group must use the same `async_op` (MPI matches blocking operations
with blocking ones).

Arrays are NumPy or CuPy arrays, or anything else with the buffer protocol or DLPack (``array.array``, torch
tensors ...), contiguous or not. Results are always written into arrays that the caller made.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from .core.arrays import Array
from .core.non_member import Group
from .core.reduce_op import ReduceOp, ReduceOpLike
from .core.work import Work
from .world import member

SUM = ReduceOp.SUM


def broadcast(
    array: Array,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy `array` of one rank to all ranks of the group, in place.

    Parameters
    ----------
    array : array
        Read on the source, written on the others: same dtype and number of elements everywhere.
    src : int
        The source's *global* rank.
    group, async_op
        See :mod:`hpccomm.collectives`.
    group_src : int, optional
        The source's rank in the group, instead of `src`.

    Raises
    ------
    ValueError
        `src` is not in the group, both or neither of `src` and `group_src` are given, or `array` is read-only.
    TypeError
        `array` is not an array, or of object dtype or foreign byte order.

    Notes
    -----
    Semantics: MPI_Bcast (MPI-4.1 §6.4).

    Examples
    --------
    >>> x = np.arange(3)
    >>> hc.broadcast(x, src=0)
    """
    found = member(group)
    return found.broadcast(array, found.peer("broadcast", "src", src, group_src), async_op)


def all_reduce(array: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Reduce `array` over all ranks of the group, in place.

    Parameters
    ----------
    array : array or scipy.sparse matrix
        The contribution, overwritten by the result: same dtype and number of elements everywhere. A sparse
        matrix (CSR, CSC or COO, with SUM) may have a different pattern on each rank; it becomes the sum.
    op : ReduceOp, str or mpi4py.MPI.Op
        Default: SUM.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError
        `array` is read-only, or `op` is an unknown name.
    TypeError
        `array` is not an array, or `op` is not defined for its dtype (AVG on integers, MAX on complex).
        The array is untouched then.

    Notes
    -----
    Semantics: MPI_Allreduce (MPI-4.1 §6.9.6). float16 and bfloat16 are accumulated in float32.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> hc.all_reduce(x)
    >>> hc.all_reduce(x, "max")
    >>> work = hc.all_reduce(x, hc.ReduceOp.AVG, async_op=True)
    >>> work.wait()
    True
    """
    return member(group).all_reduce(array, op, async_op)


def reduce(
    array: Array,
    dst: int | None = None,
    op: ReduceOpLike = SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce `array` over all ranks of the group, in place on one rank; on the others it is only read.

    Parameters
    ----------
    array : array
        The contribution; on the destination, the result.
    dst : int
        The destination's *global* rank.
    op : ReduceOp, str or mpi4py.MPI.Op
    group, async_op
        See :mod:`hpccomm.collectives`.
    group_dst : int, optional
        The destination's rank in the group, instead of `dst`.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_reduce` and :func:`broadcast`.

    Notes
    -----
    Semantics: MPI_Reduce (MPI-4.1 §6.9.1). In torch.distributed the other ranks' tensors may be overwritten.

    Examples
    --------
    >>> x = np.ones(2)
    >>> hc.reduce(x, dst=0)
    """
    found = member(group)
    return found.reduce(array, found.peer("reduce", "dst", dst, group_dst), op, async_op)


def scan(array: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replace `array` of rank r by the reduction of the arrays of ranks 0 to r (inclusive prefix).

    Parameters
    ----------
    array, op, group, async_op
        As for :func:`all_reduce`; AVG is refused.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_reduce`.

    Notes
    -----
    Semantics: MPI_Scan (MPI-4.1 §6.11.1).

    Examples
    --------
    >>> x = np.array([1])
    >>> hc.scan(x)
    """
    return member(group).scan(array, op, async_op)


def exscan(array: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replace `array` of rank r by the reduction of the arrays of ranks 0 to r-1 (exclusive prefix).

    Rank 0 has no ranks before it: its array keeps its value.

    Parameters
    ----------
    array, op, group, async_op
        As for :func:`all_reduce`; AVG is refused.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_reduce`.

    Notes
    -----
    Semantics: MPI_Exscan (MPI-4.1 §6.11.2), which leaves rank 0's buffer undefined; here it is unchanged.

    Examples
    --------
    >>> offset = np.array([3])
    >>> hc.exscan(offset)
    """
    return member(group).exscan(array, op, async_op)


def all_gather(
    output_list: Sequence[Array], array: Array, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Collect the `array` of every rank in a list, on every rank.

    Parameters
    ----------
    output_list : list of arrays
        One per rank: ``output_list[r]`` receives rank r's `array` and has as many elements. Sizes may differ
        between ranks.
    array : array
        This rank's contribution, of the same dtype.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError
        The list has not one array per rank, or this rank's part has not the size of `array`.
    TypeError
        Dtypes differ.

    Notes
    -----
    Semantics: MPI_Allgatherv (MPI-4.1 §6.7).

    Examples
    --------
    >>> parts = [np.empty(2) for _ in range(hc.get_world_size())]
    >>> hc.all_gather(parts, np.ones(2))
    """
    return member(group).all_gather(output_list, array, async_op)


def all_gather_single(output: Array, input: Array, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Collect the `input` of every rank in one array, on every rank.

    Parameters
    ----------
    output : array
        Receives the inputs in rank order, concatenated (shape ``(n * rows, ...)``) or stacked (``(n, rows, ...)``):
        `n` times as many elements as `input`, the same dtype.
    input : array
        This rank's contribution: the same number of elements on every rank. It may be this rank's part of `output`.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError, TypeError
        Sizes or dtypes do not fit.

    Notes
    -----
    Semantics: MPI_Allgather (MPI-4.1 §6.7). Also called `all_gather_into_tensor`.

    Examples
    --------
    >>> stacked = np.empty((hc.get_world_size(), 3))
    >>> hc.all_gather_single(stacked, np.arange(3.0))
    """
    return member(group).all_gather_single(output, input, async_op)


def gather(
    array: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collect the `array` of every rank in a list, on one rank.

    Parameters
    ----------
    array : array
        This rank's contribution. Sizes may differ between ranks.
    gather_list : list of arrays
        On the destination: one per rank, as the `output_list` of :func:`all_gather`. Elsewhere: None.
    dst : int
        The destination's *global* rank. Default: 0 (of the group, if neither is given).
    group, async_op
        See :mod:`hpccomm.collectives`.
    group_dst : int, optional
        The destination's rank in the group, instead of `dst`.

    Raises
    ------
    ValueError
        The list is missing on the destination or given elsewhere, or sizes do not fit.
    TypeError
        Dtypes differ.

    Notes
    -----
    Semantics: MPI_Gatherv (MPI-4.1 §6.5).

    Examples
    --------
    >>> parts = [np.empty(2) for _ in range(hc.get_world_size())] if hc.get_rank() == 0 else None
    >>> hc.gather(np.ones(2), parts, dst=0)
    """
    found = member(group)
    return found.gather(array, gather_list, found.root("gather", "dst", dst, group_dst), async_op)


def scatter(
    output: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Hand out the arrays of a list on one rank, one to each rank.

    Parameters
    ----------
    output : array
        Receives this rank's part. Sizes may differ between ranks.
    scatter_list : list of arrays
        On the source: one per rank. Elsewhere: None.
    src : int
        The source's *global* rank. Default: 0 (of the group, if neither is given).
    group, async_op
        See :mod:`hpccomm.collectives`.
    group_src : int, optional
        The source's rank in the group, instead of `src`.

    Raises
    ------
    ValueError
        The list is missing on the source or given elsewhere, or sizes do not fit.
    TypeError
        Dtypes differ.

    Notes
    -----
    Semantics: MPI_Scatterv (MPI-4.1 §6.6).

    Examples
    --------
    >>> part = np.empty(2)
    >>> parts = [np.full(2, r) for r in np.arange(1.0 * hc.get_world_size())]
    >>> hc.scatter(part, parts if hc.get_rank() == 0 else None, src=0)
    """
    found = member(group)
    return found.scatter(output, scatter_list, found.root("scatter", "src", src, group_src), async_op)


def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOpLike = SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce lists of arrays over the ranks; rank r receives the reduction of everybody's ``input_list[r]``.

    Parameters
    ----------
    output : array
        Receives this rank's part. Sizes may differ between ranks.
    input_list : list of arrays
        One per rank, of the sizes of the ranks' outputs; one dtype.
    op : ReduceOp, str or mpi4py.MPI.Op
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError, TypeError
        Sizes or dtypes do not fit, or `op` is not defined for the dtype.

    Notes
    -----
    Semantics: MPI_Reduce_scatter (MPI-4.1 §6.10.2).

    Examples
    --------
    >>> mine = np.empty(2)
    >>> hc.reduce_scatter(mine, [np.ones(2) for _ in range(hc.get_world_size())])
    """
    return member(group).reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_single(
    output: Array, input: Array, op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Reduce `input` over the ranks and hand out the result in equal parts, in rank order.

    Parameters
    ----------
    output : array
        Receives part r of the reduced input on rank r.
    input : array
        `n` times as many elements as `output`, the same dtype.
    op : ReduceOp, str or mpi4py.MPI.Op
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError, TypeError
        Sizes or dtypes do not fit, or `op` is not defined for the dtype.

    Notes
    -----
    Semantics: MPI_Reduce_scatter_block (MPI-4.1 §6.10.1). Also called `reduce_scatter_tensor`.

    Examples
    --------
    >>> mine = np.empty(3)
    >>> hc.reduce_scatter_single(mine, np.ones((hc.get_world_size(), 3)))
    """
    return member(group).reduce_scatter_single(output, input, op, async_op)


def all_to_all(
    output_list: Sequence[Array], input_list: Sequence[Array], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Send a different array to each rank, and receive one from each.

    Parameters
    ----------
    output_list : list of arrays
        ``output_list[s]`` receives what rank s sends here. One dtype; sizes may all differ.
    input_list : list of arrays
        ``input_list[r]`` goes to rank r.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError, TypeError
        The lists have not one array per rank, or sizes or dtypes do not fit.

    Notes
    -----
    Semantics: MPI_Alltoallv (MPI-4.1 §6.8).

    Examples
    --------
    >>> n = hc.get_world_size()
    >>> received = [np.empty(1) for _ in range(n)]
    >>> hc.all_to_all(received, [np.array([float(r)]) for r in range(n)])
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
    """Send a part of `input` to each rank, and receive a part of `output` from each.

    Parameters
    ----------
    output : array
        Receives the parts in rank order, along axis 0.
    input : array
        The parts to send, in rank order, along axis 0; the same dtype and row shape as `output`.
    output_split_sizes, input_split_sizes : list or array of int, optional
        Rows of `output` that come from, and of `input` that go to, each rank. Default (then on every
        rank): equal parts.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError
        Split sizes do not add up to the rows, or axis 0 can't be shared equally and no sizes are given.
    TypeError
        Dtypes differ.

    Notes
    -----
    Semantics: MPI_Alltoall, and with split sizes MPI_Alltoallv (MPI-4.1 §6.8).

    Examples
    --------
    >>> n = hc.get_world_size()
    >>> received = np.empty((n, 2))
    >>> hc.all_to_all_single(received, np.ones((n, 2)))
    """
    found = member(group)
    return found.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


def barrier(group: Group | None = None, async_op: bool = False) -> Work | None:
    """Return when every rank of the group has called it.

    Parameters
    ----------
    group, async_op
        See :mod:`hpccomm.collectives`.

    Notes
    -----
    Semantics: MPI_Barrier (MPI-4.1 §6.3).

    Examples
    --------
    >>> hc.barrier()
    """
    return member(group).barrier(async_op)


def monitored_barrier(
    group: Group | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when every rank of the group has called it; otherwise say which have not.

    Parameters
    ----------
    group
        See :mod:`hpccomm.collectives`.
    timeout : timedelta or float (seconds), optional
        How long to wait. Default: the group's timeout.
    wait_all_ranks : bool
        True: name every missing rank. False: give up as soon as the first is found missing.

    Raises
    ------
    DistTimeoutError
        On every rank that has called it, naming the (global) ranks that have not.

    Notes
    -----
    Semantics: torch.distributed.monitored_barrier. The group can be used on afterwards.

    Examples
    --------
    >>> hc.monitored_barrier(timeout=10)
    """
    return member(group).monitored_barrier(timeout, wait_all_ranks)


# -- coalesced: many arrays in one message ------------------------------------------------------------


def all_reduce_coalesced(
    arrays: Sequence[Array], op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Reduce each array of a list over all ranks, in place: :func:`all_reduce` of all of them in one message.

    Parameters
    ----------
    arrays : list of arrays
        The same list of sizes and dtypes on every rank. There is one message per dtype.
    op, group, async_op
        As for :func:`all_reduce`.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_reduce`.

    Examples
    --------
    >>> hc.all_reduce_coalesced([np.ones(3), np.ones((2, 2))])
    """
    return member(group).all_reduce_coalesced(arrays, op, async_op)


def broadcast_coalesced(
    arrays: Sequence[Array],
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy each array of a list from one rank to all: :func:`broadcast` of all of them in one message.

    Parameters
    ----------
    arrays : list of arrays
        The same list of sizes and dtypes on every rank; dtypes may be mixed.
    src, group, async_op, group_src
        As for :func:`broadcast`.

    Raises
    ------
    ValueError, TypeError
        As :func:`broadcast`.

    Examples
    --------
    >>> hc.broadcast_coalesced([np.ones(3), np.arange(4)], src=0)
    """
    found = member(group)
    return found.broadcast_coalesced(arrays, found.peer("broadcast_coalesced", "src", src, group_src), async_op)


def all_gather_coalesced(
    output_lists: Sequence[Sequence[Array]], arrays: Sequence[Array], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Collect the arrays of every rank, on every rank: :func:`all_gather` of each of them in one message.

    Parameters
    ----------
    output_lists : list (one per rank) of lists of arrays
        ``output_lists[r][i]`` receives rank r's ``arrays[i]``. Sizes may differ between ranks.
    arrays : list of arrays
        This rank's contributions; dtypes may be mixed.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_gather`.

    Examples
    --------
    >>> mine = [np.ones(3), np.arange(4)]
    >>> hc.all_gather_coalesced([[np.empty(3), np.empty(4, int)] for _ in range(hc.get_world_size())], mine)
    """
    return member(group).all_gather_coalesced(output_lists, arrays, async_op)


def all_gather_single_coalesced(
    outputs: Sequence[Array], inputs: Sequence[Array], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Do :func:`all_gather_single` for each pair of `outputs` and `inputs`, in one message.

    Parameters
    ----------
    outputs, inputs : lists of arrays, of equal length
        Each pair as for :func:`all_gather_single`; dtypes may be mixed.
    group, async_op
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError, TypeError
        As :func:`all_gather_single`.

    Examples
    --------
    >>> n = hc.get_world_size()
    >>> hc.all_gather_single_coalesced([np.empty(2 * n), np.empty((n, 3))], [np.ones(2), np.zeros(3)])
    """
    return member(group).all_gather_single_coalesced(outputs, inputs, async_op)


def reduce_scatter_single_coalesced(
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    op: ReduceOpLike = SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do :func:`reduce_scatter_single` for each pair of `outputs` and `inputs`, in one message per dtype.

    Parameters
    ----------
    outputs, inputs : lists of arrays, of equal length
        Each pair as for :func:`reduce_scatter_single`.
    op, group, async_op
        As for :func:`all_reduce`.

    Raises
    ------
    ValueError, TypeError
        As :func:`reduce_scatter_single`.

    Examples
    --------
    >>> n = hc.get_world_size()
    >>> hc.reduce_scatter_single_coalesced([np.empty(2), np.empty(3)], [np.ones(2 * n), np.ones((n, 3))])
    """
    return member(group).reduce_scatter_single_coalesced(outputs, inputs, op, async_op)
