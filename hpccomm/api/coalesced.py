"""The public coalesced collectives: many arrays in one message.

The rules of `collectives.py` about arrays, errors and `async_op` hold here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.annotations import Array, Integer
from ..core.c10d_names import c10d_names
from ..core.reduce_op import SUM, ReduceOpLike
from ..core.work import Work
from .world import member

if TYPE_CHECKING:
    from ..core.non_member import Group


@c10d_names(tensors="arrays")
def all_reduce_coalesced(
    arrays: Sequence[Array], op: ReduceOpLike = SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Reduce each array of a list over all ranks, in place: one :func:`all_reduce` for all arrays.

    Parameters
    ----------
    arrays : list of arrays
        Sizes and dtypes are the same on every rank. The arrays must not share memory. Each dtype takes one message.
    op, group, async_op
        As for :func:`all_reduce`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> weights, bias = np.ones((2, 2)), np.arange(3)
    >>> hc.all_reduce_coalesced([weights, bias])
    >>> bias  # on 4 ranks: array([0, 4, 8])
    array([0, 1, 2])
    """
    return member(group).all_reduce_coalesced(arrays, op, async_op)


def broadcast_coalesced(
    arrays: Sequence[Array],
    src: Integer | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: Integer | None = None,
) -> Work | None:
    """Copy each array of a list from one rank to all ranks: one :func:`broadcast` for all arrays.

    Parameters
    ----------
    arrays : list of arrays
        Sizes and dtypes are the same on every rank; dtypes may be mixed.
    src, group, async_op, group_src
        As for :func:`broadcast`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> weights, bias = np.full(2, hc.get_rank() + 7.0), np.arange(3) + hc.get_rank()
    >>> hc.broadcast_coalesced([weights, bias], src=0)
    >>> weights, bias  # on every rank
    (array([7., 7.]), array([0, 1, 2]))
    """
    group = member(group)
    return group.broadcast_coalesced(arrays, group.peer("broadcast_coalesced", "src", src, group_src), async_op)


@c10d_names(output_tensor_lists="output_lists", input_tensor_list="arrays")
def all_gather_coalesced(
    output_lists: Sequence[Sequence[Array]], arrays: Sequence[Array], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Collect the arrays of every rank on every rank: one :func:`all_gather` for all arrays.

    Parameters
    ----------
    output_lists : list (one per rank) of lists of arrays
        ``output_lists[r][i]`` receives rank r's ``arrays[i]``. Sizes may differ between ranks.
    arrays : list of arrays
        This rank's contributions; dtypes may be mixed.
    group, async_op
        As for :func:`all_gather`, with the same errors.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> mine = [np.full(2, hc.get_rank() + 7.0), np.arange(3)]
    >>> everybody = [[np.empty(2), np.empty(3, int)] for _ in range(hc.get_world_size())]
    >>> hc.all_gather_coalesced(everybody, mine)
    >>> everybody  # on 2 ranks a second list follows: [array([8., 8.]), array([0, 1, 2])]
    [[array([7., 7.]), array([0, 1, 2])]]
    """
    return member(group).all_gather_coalesced(output_lists, arrays, async_op)


def all_gather_single_coalesced(
    outputs: Sequence[Array], inputs: Sequence[Array], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Do :func:`all_gather_single` for each pair of `outputs` and `inputs`, in one message.

    Parameters
    ----------
    outputs, inputs : lists of arrays, of equal length
        Each pair as for :func:`all_gather_single`, with the same errors; dtypes may be mixed.
    group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> a, b = np.empty(2 * n), np.empty((n, 3), int)
    >>> hc.all_gather_single_coalesced([a, b], [np.full(2, me + 7.0), np.arange(3)])
    >>> a, b  # on 2 ranks a is array([7., 7., 8., 8.]), and b has two rows
    (array([7., 7.]), array([[0, 1, 2]]))
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
        Each pair as for :func:`reduce_scatter_single`, with the same errors.
    op, group, async_op
        As for :func:`all_reduce`.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> n = hc.get_world_size()
    >>> a, b = np.empty(1), np.empty(2)
    >>> hc.reduce_scatter_single_coalesced([a, b], [np.arange(1.0 * n), np.ones((n, 2))])
    >>> a, b  # on rank 1 of 2: (array([2.]), array([2., 2.]))
    (array([0.]), array([1., 1.]))
    """
    return member(group).reduce_scatter_single_coalesced(outputs, inputs, op, async_op)
