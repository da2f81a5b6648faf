"""Python objects between ranks: the only functions of hpccomm that pickle.

Objects travel over the group's MPI communicator, whatever the device map says. Large buffers inside them (NumPy
arrays) are sent out of band, without a copy into the pickle (PEP 574, by ``mpi4py.util.pkl5``). Unpickling runs
code that the sender chose: that is fine inside one job, and nowhere else.

An object that can't be pickled raises the same error on every rank that takes part, and the group goes on.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from .core.group import ProcessGroup
from .core.non_member import NonMember
from .errors import DistError, here
from .world import member

Group = ProcessGroup | NonMember


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

    Returns
    -------
    None
        `object_list` is complete.

    Raises
    ------
    ValueError
        `object_list` does not have one slot per rank.
    TypeError
        On every rank: an object of some rank can't be pickled.

    Examples
    --------
    >>> names = [None] * hc.get_world_size()
    >>> hc.all_gather_object(names, f"rank {hc.get_rank()}")
    >>> names  # on 2 ranks: ['rank 0', 'rank 1']
    ['rank 0']
    """
    found = member(group)
    if isinstance(found, NonMember):
        return found.barrier()
    _check_slots("all_gather_object", "object_list", object_list, found)
    object_list[:] = _unwrapped("all_gather_object", _channel(found).allgather(_wrap(obj, found.rank)))


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

    Returns
    -------
    None
        `object_gather_list` is complete on the destination.

    Raises
    ------
    ValueError
        The list is missing on the destination or given elsewhere, or does not have one slot per rank.
    TypeError
        On every rank: an object of some rank can't be pickled.

    Examples
    --------
    >>> names = [None] * hc.get_world_size() if hc.get_rank() == 0 else None
    >>> hc.gather_object(f"rank {hc.get_rank()}", names, dst=0)
    >>> names  # on rank 0 of 2: ['rank 0', 'rank 1']; on rank 1: None
    ['rank 0']
    """
    found = member(group)
    if isinstance(found, NonMember):
        return found.barrier()
    root = found.root("gather_object", "dst", dst, group_dst)
    if found._has_list("gather_object", "object_gather_list", object_gather_list, "destination", root):
        _check_slots("gather_object", "object_gather_list", object_gather_list or [], found)
    wrapped = _wrap(obj, found.rank)
    channel = _channel(found)
    # Only the destination sees the objects, so that the others learn of a failure needs a word of its own.
    failures = channel.allgather(wrapped if isinstance(wrapped, _Unpicklable) else None)
    _unwrapped("gather_object", failures)
    gathered = channel.gather(wrapped, root)
    if gathered is not None and object_gather_list is not None:
        object_gather_list[:] = gathered


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

    Returns
    -------
    None
        `object_list` holds the objects of the source.

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
    >>> settings  # on every rank
    [{'steps': 10}, 'fast']
    """
    found = member(group)
    if isinstance(found, NonMember):
        return found.barrier()
    root = found.root("broadcast_object_list", "src", src, group_src)
    wrapped = _wrap(list(object_list), found.rank) if found.rank == root else None
    (received,) = _unwrapped("broadcast_object_list", [_channel(found).bcast(wrapped, root)])
    _fill("broadcast_object_list", object_list, received)


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
        On the source: one object per rank. Elsewhere: None.
    src, group, group_src
        As for :func:`scatter`.

    Returns
    -------
    None
        ``scatter_object_output_list[0]`` is this rank's object.

    Raises
    ------
    ValueError
        The output list is empty, or the input list is missing on the source or does not have one object per rank.
    TypeError
        On every rank: an object can't be pickled.

    Examples
    --------
    >>> mine = [None]
    >>> jobs = [f"job {r}" for r in range(hc.get_world_size())] if hc.get_rank() == 0 else None
    >>> hc.scatter_object_list(mine, jobs, src=0)
    >>> mine  # on rank 1: ['job 1']
    ['job 0']
    """
    found = member(group)
    if isinstance(found, NonMember):
        return found.barrier()
    root = found.root("scatter_object_list", "src", src, group_src)
    if not scatter_object_output_list:
        raise ValueError(f"scatter_object_list: scatter_object_output_list is empty; expected one slot{here()}")
    wrapped = None
    if found._has_list("scatter_object_list", "scatter_object_input_list", scatter_object_input_list, "source", root):
        objects = scatter_object_input_list or []
        _check_slots("scatter_object_list", "scatter_object_input_list", objects, found)
        wrapped = [_wrap(obj, found.rank) for obj in objects]
        failed = next((each for each in wrapped if isinstance(each, _Unpicklable)), None)
        if failed is not None:
            wrapped = [failed] * found.size
    (received,) = _unwrapped("scatter_object_list", [_channel(found).scatter(wrapped, root)])
    scatter_object_output_list[0] = received


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send the objects of a list to one rank.

    Parameters are those of :func:`send`.

    Returns
    -------
    None
        When the objects may be changed again.

    Raises
    ------
    ValueError
        As :func:`send`.
    TypeError
        On the sender and on the receiver: an object can't be pickled.

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
    if isinstance(found, NonMember):
        return found.barrier()
    to = found.peer("send_object_list", "dst", dst, group_dst)
    found._check_peer("send_object_list", "dst", to, False)
    _check_tag("send_object_list", tag)
    wrapped = _wrap(list(object_list), found.rank)
    _channel(found).send(wrapped, to, tag)
    _unwrapped("send_object_list", [wrapped])


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a list of objects.

    Parameters
    ----------
    object_list : list
        Overwritten: as many slots as the sender's list has objects.
    src, group, tag, group_src
        As for :func:`recv`; ``src=None`` receives from any rank.

    Returns
    -------
    int
        The sender's *global* rank. (None, if `group` is a NonMember.)

    Raises
    ------
    ValueError
        As :func:`recv`, or the lists differ in length.
    TypeError
        The sender could not pickle an object.

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
    """
    from mpi4py import MPI

    found = member(group)
    if isinstance(found, NonMember):
        return found.barrier()
    source = None if src is None and group_src is None else found.peer("recv_object_list", "src", src, group_src)
    found._check_peer("recv_object_list", "src", source, False)
    _check_tag("recv_object_list", tag)
    status = MPI.Status()
    wrapped = _channel(found).recv(None, MPI.ANY_SOURCE if source is None else source, tag, status)
    (received,) = _unwrapped("recv_object_list", [wrapped])
    _fill("recv_object_list", object_list, received)
    return found.ranks[status.Get_source()]


class _Pickled:
    """A pickle made already, in-band part and large buffers apart, that itself pickles without a copy."""

    def __init__(self, obj: Any) -> None:
        from mpi4py.util.pkl5 import pickle as out_of_band

        data, buffers = out_of_band.dumps_oob(obj)
        self.parts: list[Any] = [pickle.PickleBuffer(part) for part in (data, *buffers)]  # type: ignore[arg-type]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _unpickle, tuple(self.parts)


def _unpickle(data: Any, *buffers: Any) -> Any:
    from mpi4py.util.pkl5 import pickle as out_of_band

    return out_of_band.loads_oob(data, list(buffers))


class _Unpicklable:
    """What travels in place of an object that could not be pickled, so that the other ranks do not wait."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason


def _wrap(obj: Any, rank: int) -> _Pickled | _Unpicklable:
    try:
        return _Pickled(obj)
    except Exception as error:  # pickling runs any __reduce__, so it can raise anything
        return _Unpicklable(rank, f"a {type(obj).__name__} can't be pickled ({type(error).__name__}: {error})")


def _unwrapped(operation: str, received: Sequence[Any]) -> list[Any]:
    """Return the objects received, or raise if one of them stands for an object that could not be pickled."""
    for each in received:
        if isinstance(each, _Unpicklable):
            raise TypeError(f"{operation}: on rank {each.rank} of the group, {each.reason}{here()}")
    return list(received)


def _channel(group: ProcessGroup) -> Any:
    """Return the group's communicator with mpi4py's out-of-band pickling."""
    from mpi4py.util import pkl5

    if group.comm is None:
        raise DistError(f"{group!r} has no MPI communicator, over which objects travel{here()}")
    if group.is_destroyed:
        raise DistError(f"the process group {group.name!r} has been destroyed; make another one{here()}")
    return pkl5.Intracomm(group.comm)


def _check_tag(operation: str, tag: int) -> None:
    from .mpi import tags

    tags.checked(operation, "tag", tag)


def _check_slots(operation: str, argument: str, slots: Sequence[Any], group: ProcessGroup) -> None:
    if len(slots) != group.size:
        raise ValueError(
            f"{operation}: {argument} has {len(slots)} slots; expected one for each of the {group.size} ranks{here()}"
        )


def _fill(operation: str, slots: list[Any], objects: list[Any]) -> None:
    if len(slots) != len(objects):
        raise ValueError(
            f"{operation}: object_list has {len(slots)} slots, but {len(objects)} objects were sent{here()}"
        )
    slots[:] = objects
