"""Sparse exchange: send arrays to ranks that do not expect them, such as particles to their new owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

from ..core.annotations import Array
from ..core.non_member import Group
from ..core.work import Work
from .world import member


@overload
def exchange_sparse(
    arrays: Mapping[int, Any], group: Group | None = ..., async_op: Literal[False] = ...
) -> dict[int, Any]: ...
@overload
def exchange_sparse(arrays: Mapping[int, Any], group: Group | None = ..., *, async_op: Literal[True]) -> Work: ...
def exchange_sparse(
    arrays: Mapping[int, Array | tuple[Array, ...]], group: Group | None = None, async_op: bool = False
) -> dict[int, Any] | Work | None:
    """Send arrays to some ranks, and return the arrays that other ranks sent to this one.

    Every rank of the group calls it, even if it sends nothing. Ranks do not need to know the senders or the sizes:
    shapes and dtypes travel with the arrays. The time grows with the number of partners and the logarithm of the ranks.

    Parameters
    ----------
    arrays : dict of array or tuple of arrays
        The arrays to send, by the *global* rank of the receiver, which may be this rank itself. Host arrays of any
        layout. Arrays of a tuple travel together: ``{owner: (positions, numbers)}``.
    group : ProcessGroup, optional
        Default: the world.
    async_op : bool
        True: return a Work at once; its result is the dict. Don't change the arrays until it is done.

    Returns
    -------
    dict or Work
        The received arrays, by the global rank of the sender, in rank order: new arrays with the shapes and dtypes of
        the sent ones; a tuple if a tuple was sent.

    Raises
    ------
    ValueError
        A receiver is not in the group.
    TypeError
        `arrays` is not a dict, or a value in it is not an array.
    UnsupportedOperationError
        An array is on a GPU.

    Notes
    -----
    Within a node, blocking exchanges of small arrays use shared memory. Otherwise, groups of up to 64 ranks exchange
    sizes first. Larger groups use non-blocking consensus (T. Hoefler, C. Siebert, A. Lumsdaine: Scalable communication
    protocols for dynamic sparse data exchange, PPoPP 2010). A thread drives asynchronous exchanges, so ranks may wait
    for them in any order. Below MPI_THREAD_MULTIPLE there is no such thread: while one rank waits for an exchange, the
    other ranks must wait for the same one.

    Examples
    --------
    >>> me, n = hc.get_rank(), hc.get_world_size()
    >>> right = (me + 1) % n
    >>> hc.exchange_sparse({right: np.arange(3) + 10 * me})  # on rank 1 of 4: {0: array([0, 1, 2])}
    {0: array([0, 1, 2])}
    >>> hc.exchange_sparse({right: (np.zeros((2, 1)), np.array([7]))} if me == 0 else {})  # on all but rank 1: {}
    {0: (array([[0.],
           [0.]]), array([7]))}
    """
    group = member(group)
    outcome: dict[int, Any] | Work | None = group.exchange_sparse(arrays, async_op, group.ranks)
    return outcome
