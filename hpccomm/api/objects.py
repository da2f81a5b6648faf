"""Exchange Python objects between ranks. Only these functions of hpccomm pickle.

Objects are sent over the group's MPI communicator, independent of its device map. Large buffers inside them (NumPy
arrays) are sent out of band, without a copy into the pickle (PEP 574). Unpickling runs code that the sender chose:
use these functions only within one job.

If an object can't be pickled, every participating rank raises the same TypeError. If a rank can't unpickle an object,
that rank raises a TypeError that names the sender; the other slots of the list are filled. The group stays usable.

With ``async_op=True`` the functions return a :class:`Work`, which fills the lists and raises these errors. The call
pickles the object, so the program may change it afterwards. A group's first asynchronous collective of objects waits
for the other ranks, as its first sparse exchange does. Each pickle goes directly to its receiver. A blocking send or
receive matches an asynchronous one.
"""

from __future__ import annotations

from typing import Any

from ..core.annotations import Integer
from ..core.c10d_names import c10d_names
from ..core.non_member import Group
from ..core.work import Work
from .world import member


@c10d_names(only_none=("weights_only",))
def all_gather_object(
    object_list: list[Any], obj: Any, group: Group | None = None, *, async_op: bool = False
) -> Work | None:
    """Collect an object of every rank in a list, on every rank.

    Parameters
    ----------
    object_list : list
        One slot per rank; the call overwrites it.
    obj : object
        This rank's contribution, picklable.
    group : ProcessGroup, optional
        Default: the world.
    async_op : bool
        True: return a Work at once; it fills the list.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError
        `object_list` does not have one slot per rank.
    TypeError
        A rank's object can't be pickled (on every rank).

    Examples
    --------
    >>> names = [None] * hc.get_world_size()
    >>> hc.all_gather_object(names, f"rank {hc.get_rank()}")
    >>> names  # on 2 ranks: ['rank 0', 'rank 1']
    ['rank 0']
    >>> work = hc.all_gather_object(names, {"rank": hc.get_rank()}, async_op=True)
    >>> work.result()  # is names; on 2 ranks: [{'rank': 0}, {'rank': 1}]
    [{'rank': 0}]
    """
    return member(group).all_gather_object(object_list, obj, async_op)


@c10d_names(only_none=("weights_only",))
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: Integer | None = None,
    group: Group | None = None,
    group_dst: Integer | None = None,
    *,
    async_op: bool = False,
) -> Work | None:
    """Collect an object of every rank in a list, on one rank.

    Parameters
    ----------
    obj : object
        This rank's contribution, picklable.
    object_gather_list : list
        On the destination: one slot per rank, overwritten. On other ranks: None.
    dst, group, group_dst
        As for :func:`gather`.
    async_op : bool
        As for :func:`all_gather_object`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError, TypeError
        As for :func:`all_gather_object`, or the list is missing on the destination or given on another rank.

    Examples
    --------
    >>> names = [None] * hc.get_world_size() if hc.get_rank() == 0 else None
    >>> hc.gather_object(f"rank {hc.get_rank()}", names, dst=0)
    >>> names  # on rank 0 of 2: ['rank 0', 'rank 1']; on rank 1: None
    ['rank 0']
    """
    found = member(group)
    return found.gather_object(obj, object_gather_list, found.root("gather_object", "dst", dst, group_dst), async_op)


@c10d_names("device", only_none=("weights_only",))
def broadcast_object_list(
    object_list: list[Any],
    src: Integer | None = None,
    group: Group | None = None,
    *,
    group_src: Integer | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy the objects of a list from one rank to all ranks, in place.

    Parameters
    ----------
    object_list : list
        Read on the source, overwritten on the other ranks. Its length is the same on every rank, or ValueError.
    src, group, group_src
        As for :func:`broadcast`. Default: the group's first rank.
    async_op : bool
        As for :func:`all_gather_object`.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> settings = [{"steps": 10}, "fast"] if hc.get_rank() == 0 else [None, None]
    >>> hc.broadcast_object_list(settings, src=0)
    >>> settings  # on every rank
    [{'steps': 10}, 'fast']
    """
    found = member(group)
    root = found.root("broadcast_object_list", "src", src, group_src)
    return found.broadcast_object_list(object_list, root, async_op)


@c10d_names(only_none=("weights_only",))
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: Integer | None = None,
    group: Group | None = None,
    group_src: Integer | None = None,
    *,
    async_op: bool = False,
) -> Work | None:
    """Distribute one rank's list of objects, one object to each rank.

    Parameters
    ----------
    scatter_object_output_list : list
        Its first slot receives this rank's object.
    scatter_object_input_list : list
        On the source: one object per rank. Ignored on other ranks.
    src, group, group_src
        As for :func:`scatter`.
    async_op : bool
        As for :func:`all_gather_object`.

    Returns
    -------
    Work or None

    Raises
    ------
    ValueError, TypeError
        The output list is empty, or the input list is missing on the source or does not have one object per rank.

    Examples
    --------
    >>> mine = [None]
    >>> jobs = [f"job {r}" for r in range(hc.get_world_size())] if hc.get_rank() == 0 else None
    >>> hc.scatter_object_list(mine, jobs, src=0)
    >>> mine  # on rank 1: ['job 1']
    ['job 0']
    """
    found = member(group)
    root = found.root("scatter_object_list", "src", src, group_src)
    return found.scatter_object_list(scatter_object_output_list, scatter_object_input_list, root, async_op)


@c10d_names("device", "use_batch", only_none=("weights_only",))
def send_object_list(
    object_list: list[Any],
    dst: Integer | None = None,
    group: Group | None = None,
    *,
    tag: int = 0,
    group_dst: Integer | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the objects of a list to one rank.

    The other arguments and the errors are those of :func:`send`.

    Parameters
    ----------
    async_op : bool
        True: return a Work at once. Then the receiver may also be this rank itself.

    Returns
    -------
    Work or None

    Examples
    --------
    >>> task = ["solve", 3] if hc.get_rank() == 0 else [None, None]
    >>> if hc.get_rank() == 0:
    ...     for other in range(1, hc.get_world_size()):
    ...         hc.send_object_list(task, dst=other)
    ... else:
    ...     sender = hc.recv_object_list(task, src=0)
    >>> task  # on every rank
    ['solve', 3]
    """
    found = member(group)
    return found.send_object_list(object_list, found.peer("send_object_list", "dst", dst, group_dst), tag, async_op)


@c10d_names("device", "use_batch", only_none=("weights_only",))
def recv_object_list(
    object_list: list[Any],
    src: Integer | None = None,
    group: Group | None = None,
    *,
    tag: int = 0,
    group_src: Integer | None = None,
    async_op: bool = False,
) -> Work | int:
    """Receive a list of objects.

    Parameters
    ----------
    object_list : list
        Overwritten. It has as many slots as the sender's list has objects, or ValueError.
    src, group, tag, group_src
        As for :func:`recv`, with the same errors.
    async_op : bool
        True: return a Work at once; it fills the list. Below ``MPI_THREAD_MULTIPLE`` hpccomm looks for the message only
        while this rank waits for or tests the Work. The sender of a large list may block until then.

    Returns
    -------
    int or Work
        The sender's *global* rank. With ``async_op=True``, a Work: `source_rank()` returns that rank, and `abort()`
        cancels the receive.

    Examples
    --------
    >>> results = [None] if hc.get_rank() == 0 else [f"done by {hc.get_rank()}"]
    >>> finished = []
    >>> if hc.get_rank() > 0:
    ...     hc.send_object_list(results, dst=0)
    ... else:
    ...     for _ in range(1, hc.get_world_size()):
    ...         sender = hc.recv_object_list(results)  # from any rank, in any order
    ...         finished.append(sender)
    >>> sorted(finished)  # on rank 0 of 3: [1, 2]
    []
    >>> received = hc.recv_object_list(results, src=hc.get_rank(), async_op=True)  # a message to oneself
    >>> hc.send_object_list(["stop"], dst=hc.get_rank(), async_op=True).wait()
    True
    >>> received.source_rank() == hc.get_rank(), received.result()  # is results
    (True, ['stop'])
    """
    found = member(group)
    came = found.recv_object_list(object_list, found.source("recv_object_list", src, group_src), tag, async_op)
    return found.ranks[came] if isinstance(came, int) else came  # None outside the group
