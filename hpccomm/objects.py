"""Python objects between ranks: the only functions of hpccomm that pickle.

Objects travel over the group's MPI communicator, whatever the device map says. Large buffers inside them (NumPy
arrays) are sent out of band, without a copy into the pickle (PEP 574). Unpickling runs
code that the sender chose: that is fine inside one job, and nowhere else.

An object that can't be pickled raises the same error on every rank that takes part, and the group goes on.
"""

from __future__ import annotations

from typing import Any

from .core.non_member import Group
from .world import member


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None) -> None:
    """Collect an object of every rank in a list, on every rank.

    Parameters
    ----------
    object_list : list
        One slot per rank; overwritten.
    obj : object
        This rank's contribution, picklable.
    group
        See :mod:`hpccomm.collectives`.

    Raises
    ------
    ValueError
        `object_list` has not one slot per rank.
    TypeError
        On every rank: an object of some rank can't be pickled.

    Examples
    --------
    >>> names = [None] * hc.get_world_size()
    >>> hc.all_gather_object(names, f"rank {hc.get_rank()}")
    """
    member(group).all_gather_object(object_list, obj)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    group_dst: int | None = None,
) -> None:
    """Collect an object of every rank in a list, on one rank.

    Parameters
    ----------
    obj : object
        This rank's contribution, picklable.
    object_gather_list : list
        On the destination: one slot per rank, overwritten. Elsewhere: None.
    dst, group, group_dst
        As for :func:`gather`.

    Raises
    ------
    ValueError
        The list is missing on the destination or given elsewhere, or has not one slot per rank.
    TypeError
        On every rank: an object of some rank can't be pickled.

    Examples
    --------
    >>> names = [None] * hc.get_world_size() if hc.get_rank() == 0 else None
    >>> hc.gather_object(f"rank {hc.get_rank()}", names, dst=0)
    """
    found = member(group)
    found.gather_object(obj, object_gather_list, found.root("gather_object", "dst", dst, group_dst))


def broadcast_object_list(
    object_list: list[Any], src: int | None = None, group: Group | None = None, group_src: int | None = None
) -> None:
    """Copy the objects of a list from one rank to all, in place.

    Parameters
    ----------
    object_list : list
        Read on the source, overwritten on the others: the same length everywhere.
    src, group, group_src
        As for :func:`broadcast`, with rank 0 as the default.

    Raises
    ------
    ValueError
        The source's list has another length.
    TypeError
        On every rank: an object can't be pickled.

    Examples
    --------
    >>> settings = [{"steps": 10}, "fast"] if hc.get_rank() == 0 else [None, None]
    >>> hc.broadcast_object_list(settings, src=0)
    """
    found = member(group)
    found.broadcast_object_list(object_list, found.root("broadcast_object_list", "src", src, group_src))


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group | None = None,
    group_src: int | None = None,
) -> None:
    """Hand out the objects of a list on one rank, one to each rank.

    Parameters
    ----------
    scatter_object_output_list : list
        Its first slot receives this rank's object.
    scatter_object_input_list : list
        On the source: one object per rank. Elsewhere it is ignored.
    src, group, group_src
        As for :func:`scatter`.

    Raises
    ------
    ValueError
        The output list is empty, or the input list is missing on the source or has not one object per rank.
    TypeError
        On every rank: an object can't be pickled.

    Examples
    --------
    >>> mine = [None]
    >>> jobs = list(range(hc.get_world_size())) if hc.get_rank() == 0 else None
    >>> hc.scatter_object_list(mine, jobs, src=0)
    """
    found = member(group)
    root = found.root("scatter_object_list", "src", src, group_src)
    found.scatter_object_list(scatter_object_output_list, scatter_object_input_list, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send the objects of a list to one rank.

    Parameters are those of :func:`send`.

    Raises
    ------
    ValueError
        As :func:`send`.
    TypeError
        On the sender and on the receiver: an object can't be pickled.
    """
    found = member(group)
    found.send_object_list(object_list, found.peer("send_object_list", "dst", dst, group_dst), tag)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a list of objects, and return the sender's global rank.

    Parameters
    ----------
    object_list : list
        Overwritten: as many slots as the sender's list has objects.
    src, group, tag, group_src
        As for :func:`recv`; ``src=None`` receives from any rank.

    Raises
    ------
    ValueError
        As :func:`recv`, or the lists differ in length.
    TypeError
        The sender could not pickle an object.
    """
    found = member(group)
    source = found.recv_object_list(object_list, found.source("recv_object_list", src, group_src), tag)
    return source if source is None else found.ranks[source]
