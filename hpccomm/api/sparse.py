"""Sparse exchange: arrays for some ranks, which do not know of it: particles to whoever owns them now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

from ..core.annotations import Array
from ..core.non_member import Group
from ..core.work import Work
from .world import member


@overload
def all_to_all_sparse(
    arrays: Mapping[int, Any], group: Group | None = ..., async_op: Literal[False] = ...
) -> dict[int, Any]: ...
@overload
def all_to_all_sparse(arrays: Mapping[int, Any], group: Group | None = ..., *, async_op: Literal[True]) -> Work: ...
def all_to_all_sparse(
    arrays: Mapping[int, Array | tuple[Array, ...]], group: Group | None = None, async_op: bool = False
) -> dict[int, Any] | Work | None:
    """Send arrays to some ranks, and get those that others have sent to this one.

    Every rank of the group calls it, also one that sends nothing. Nobody has to know who sends, nor how much: shapes
    and dtypes travel with the arrays. The time grows with the number of partners, and the logarithm of that of ranks.

    Parameters
    ----------
    arrays : dict of array or tuple of arrays
        What goes to whom, by the *global* rank of the receiver, which may be this rank itself. Host arrays of any
        layout. Arrays of a tuple travel together: ``{owner: (positions, numbers)}``.
    group : ProcessGroup, optional
        Default: the world.
    async_op : bool
        True: return a Work at once, whose result is the dict; until it is done, the arrays may not be changed.

    Returns
    -------
    dict or Work
        What has come, by the global rank of the sender, in the order of the ranks: new arrays, with the shapes and
        dtypes of those sent; a tuple where one was sent.

    Raises
    ------
    ValueError
        A receiver is not in the group.
    TypeError
        `arrays` is no dict, or something in it no array.
    UnsupportedOperationError
        An array is on a GPU.

    Notes
    -----
    Within a node small arrays go by its memory. Otherwise, up to 64 ranks, all of them are told first how much to
    expect. Beyond, nobody is: it is found out by non-blocking consensus (T. Hoefler, C. Siebert, A. Lumsdaine: Scalable
    communication protocols for dynamic sparse data exchange, PPoPP 2010). A thread looks after asynchronous ones, so
    that ranks may wait for them in any order; below MPI_THREAD_MULTIPLE there is none, and a rank that waits needs the
    others to wait for the same one.

    Examples
    --------
    >>> me, n = hc.get_rank(), hc.get_world_size()
    >>> right = (me + 1) % n
    >>> hc.all_to_all_sparse({right: np.arange(3) + 10 * me})  # on rank 1 of 4: {0: array([0, 1, 2])}
    {0: array([0, 1, 2])}
    >>> hc.all_to_all_sparse({right: (np.zeros((2, 1)), np.array([7]))} if me == 0 else {})  # on all but rank 1: {}
    {0: (array([[0.],
           [0.]]), array([7]))}
    """
    group = member(group)
    outcome: dict[int, Any] | Work | None = group.all_to_all_sparse(arrays, async_op, group.ranks)
    return outcome
