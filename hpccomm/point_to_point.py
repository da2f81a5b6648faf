"""Messages between two ranks, as users call them.

`dst` and `src` are *global* ranks, also with ``group=``; `group_dst` and `group_src` are ranks in the group.
A message is received by the call whose source, tag and group match it; two messages that match the same
receive arrive in the order they were sent. ``MPI.PROC_NULL`` as `dst` or `src` is nobody, as in MPI: nothing is sent,
nothing is written, and the call is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from .core import calls
from .core.annotations import NAMED, Array, Integer, asynchronous
from .core.c10d_names import either
from .core.calls import Call
from .core.door import Door, batch
from .core.members import NobodyThere
from .core.non_member import Group, NonMember, done_work
from .core.work import Work
from .errors import here
from .world import member


@overload
def send(array: Array, dst: Integer, group: Group | None = ..., tag: int = ...) -> None: ...
@overload
def send(array: Array, *, group: Group | None = ..., tag: int = ..., group_dst: Integer) -> None: ...
@overload
def send(*, dst: Integer, group: Group | None = ..., tag: int = ..., tensor: Array) -> None: ...
@overload
def send(*, group: Group | None = ..., tag: int = ..., group_dst: Integer, tensor: Array) -> None: ...
def send(
    array: Array = NAMED,
    dst: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: Integer | None = None,
    tensor: Array = NAMED,
) -> None:
    """Send `array` to one rank; it may be changed as soon as the call returns.

    Parameters
    ----------
    array : array
    dst : int
        The receiver's *global* rank.
    group : ProcessGroup, optional
        Default: the world.
    tag : int
        0 or more, up to what MPI allows (MPI_TAG_UB), at least 32762; the receive must have the same.
    group_dst : int, optional
        The receiver's rank in the group, instead of `dst`.

    Returns
    -------
    None
        When `array` may be changed again.

    Raises
    ------
    ValueError
        The receiver is not in the group, or is this rank itself; the tag is out of range.

    Notes
    -----
    Semantics: MPI_Send (MPI-4.1 §3.2): the call may or may not wait for the receiver.

    Examples
    --------
    >>> x = np.full(2, 7.0) if hc.get_rank() == 0 else np.empty(2)
    >>> if hc.get_rank() == 0:
    ...     for other in range(1, hc.get_world_size()):
    ...         hc.send(x, dst=other)
    ... else:
    ...     sender = hc.recv(x, src=0)
    >>> x  # on every rank
    array([7., 7.])
    >>> hc.send(x, dst=hc.get_rank())
    Traceback (most recent call last):
        ...
    ValueError: send: dst is this rank itself, ...
    """
    if tensor is not None:
        array = either("send", array=array, tensor=tensor)
    found = member(group)
    try:
        peer = found.peer("send", "dst", dst, group_dst)
    except NobodyThere:
        return
    found.send(array, peer, tag)


def recv(
    array: Array = NAMED,
    src: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: Integer | None = None,
    tensor: Array = NAMED,
) -> int:
    """Receive a message into `array`.

    Parameters
    ----------
    array : array
        As many bytes as the message has.
    src : int, optional
        The sender's *global* rank. Default: any rank of the group.
    group, tag
        As for :func:`send`.
    group_src : int, optional
        The sender's rank in the group, instead of `src`.

    Returns
    -------
    int
        The sender's *global* rank. (None, if `group` is a NonMember.)

    Raises
    ------
    ValueError
        `src` is not in the group, or is this rank itself; the tag is out of range.
    DistBackendError
        The message is longer or shorter than `array`.

    Notes
    -----
    Semantics: MPI_Recv (MPI-4.1 §3.2).

    Examples
    --------
    >>> x = np.empty(2)
    >>> sent = hc.isend(np.arange(2.0), dst=hc.get_rank())  # a message to oneself
    >>> hc.recv(x)  # from any rank; it came from rank ...
    0
    >>> x
    array([0., 1.])
    """
    if tensor is not None:
        array = either("recv", array=array, tensor=tensor)
    found = member(group)
    try:
        peer = found.source("recv", src, group_src)
    except NobodyThere as nobody:
        return nobody.rank
    source: Any = found.recv(array, peer, tag)
    return source if source is None else found.ranks[source]  # type: ignore[return-value]


@overload
def isend(array: Array, dst: Integer, group: Group | None = ..., tag: int = ...) -> Work: ...
@overload
def isend(array: Array, *, group: Group | None = ..., tag: int = ..., group_dst: Integer) -> Work: ...
@overload
def isend(*, dst: Integer, group: Group | None = ..., tag: int = ..., tensor: Array) -> Work: ...
@overload
def isend(*, group: Group | None = ..., tag: int = ..., group_dst: Integer, tensor: Array) -> Work: ...
def isend(
    array: Array = NAMED,
    dst: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: Integer | None = None,
    tensor: Array = NAMED,
) -> Work:
    """Start to send `array` to one rank.

    Parameters
    ----------
    array : array
        It may not be changed until the Work is done. The group keeps it alive until then.
    dst, group, tag, group_dst
        As for :func:`send`; `dst` may also be this rank itself.

    Returns
    -------
    Work
        Done when `array` may be changed. (None, if `group` is a NonMember.)

    Raises
    ------
    ValueError
        The receiver is not in the group; the tag is out of range.

    Notes
    -----
    Semantics: MPI_Isend (MPI-4.1 §3.7.2).

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> x = np.empty(2)
    >>> received = hc.irecv(x, src=(me - 1) % n)  # around a ring
    >>> sent = hc.isend(np.array([me, 0.5]), dst=(me + 1) % n)
    >>> sent.wait() and received.wait()
    True
    >>> x  # on rank 1: array([0. , 0.5])
    array([0. , 0.5])
    """
    if tensor is not None:
        array = either("isend", array=array, tensor=tensor)
    found = member(group)
    try:
        peer = found.peer("isend", "dst", dst, group_dst)
    except NobodyThere:
        return done_work("send")
    return found.send(array, peer, tag, async_op=True)


def irecv(
    array: Array = NAMED,
    src: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: Integer | None = None,
    tensor: Array = NAMED,
) -> Work:
    """Start to receive a message into `array`.

    Parameters
    ----------
    array : array
        As many bytes as the message has. It may be neither read nor written until the Work is done. The group keeps it
        alive until then.
    src, group, tag, group_src
        As for :func:`recv`; `src` may also be this rank itself.

    Returns
    -------
    Work
        Done when the message is in `array`; its `source_rank()` is the sender's global rank, and its `abort()` takes
        the receive back. (None, if `group` is a NonMember.)

    Raises
    ------
    ValueError
        `src` is not in the group; the tag is out of range.
    DistBackendError
        From the Work: the message is longer or shorter than `array`.

    Notes
    -----
    Semantics: MPI_Irecv (MPI-4.1 §3.7.2).

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> x = np.empty(1)
    >>> received = hc.irecv(x, src=(me - 1) % n)
    >>> sent = hc.isend(np.array([1.0 * me]), dst=(me + 1) % n)
    >>> received.source_rank()  # waits; on rank 1: 0
    0
    >>> x
    array([0.])
    """
    if tensor is not None:
        array = either("irecv", array=array, tensor=tensor)
    found = member(group)
    try:
        peer = found.source("irecv", src, group_src)
    except NobodyThere as nobody:
        return done_work("recv", nobody.rank)
    return found.recv(array, peer, tag, async_op=True)


@asynchronous
def sendrecv(
    array: Array,
    dst: Integer | None,
    output: Array,
    src: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    recv_tag: int | None = None,
    async_op: bool = False,
    group_dst: Integer | None = None,
    group_src: Integer | None = None,
) -> int | Work:
    """Send `array` to one rank and receive `output` from another (or the same) at once, without deadlock.

    Parameters
    ----------
    array, dst, tag, group, group_dst
        What is sent, and where to, as for :func:`send`; `dst` may also be this rank itself.
    output, src, group_src
        What is received, and where from, as for :func:`recv`.
    recv_tag : int, optional
        The tag of the message received. Default: `tag`.
    async_op : bool
        True: return a Work at once; until it is done, neither array may be touched.

    Returns
    -------
    int or Work
        The global rank of the sender of `output`. With ``async_op=True`` a Work, whose `source_rank()` is that rank.

    Raises
    ------
    ValueError, DistBackendError
        As :func:`send` and :func:`recv`.

    Notes
    -----
    Semantics: MPI_Sendrecv (MPI-4.1 §3.10).

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> left = np.empty(1)
    >>> hc.sendrecv(np.array([10.0 * me]), (me + 1) % n, left, (me - 1) % n)  # on rank 1: 0
    0
    >>> left  # on rank 2: array([10.])
    array([0.])
    """
    found = member(group)
    try:
        to, source = found.peer("sendrecv", "dst", dst, group_dst), found.source("sendrecv", src, group_src)
    except NobodyThere as nobody:
        if dst == nobody.rank:
            receive = irecv if async_op else recv
            return receive(output, src, group, tag if recv_tag is None else recv_tag, group_src)
        to = found.peer("sendrecv", "dst", dst, group_dst)
        if async_op:
            return isend(array, group=group, tag=tag, group_dst=to)
        send(array, group=group, tag=tag, group_dst=to)
        return nobody.rank
    outcome: Any = found.sendrecv(array, to, output, source, tag, recv_tag, async_op)
    return found.ranks[outcome] if isinstance(outcome, int) else outcome


class P2POp:
    """One send or receive of :func:`batch_isend_irecv`.

    Parameters
    ----------
    op : callable
        :func:`isend` or :func:`irecv`.
    array : array
    peer : int, optional
        The other rank's *global* rank.
    group, tag
        As for :func:`send`.
    group_peer : int, optional
        The other rank's rank in the group, instead of `peer`.

    Examples
    --------
    >>> me = hc.get_rank()
    >>> x = np.empty(2)
    >>> pair = [hc.P2POp(hc.irecv, x, me), hc.P2POp(hc.isend, np.arange(2.0), me)]  # a message to oneself
    >>> all(work.wait() for work in hc.batch_isend_irecv(pair))
    True
    >>> x
    array([0., 1.])
    """

    __slots__ = ("array", "group", "group_peer", "op", "peer", "tag")

    def __init__(
        self,
        op: Callable[..., Any],
        array: Array = NAMED,
        peer: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_peer: int | None = None,
        tensor: Array = NAMED,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"P2POp: op is {op!r}; expected hpccomm.isend or hpccomm.irecv{here()}")
        self.op = op
        self.array = array if tensor is None else either("P2POp", array=array, tensor=tensor)
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start several sends and receives.

    Receives are started before sends, so that arriving data finds its place.

    Parameters
    ----------
    p2p_op_list : list of P2POp
        The messages, in any order; the list may be empty.

    Returns
    -------
    list of Work
        One for each message, in the order of the list. Until it is done, its array may not be touched.

    Raises
    ------
    TypeError
        The list holds something other than a P2POp.
    ValueError
        As :func:`isend` and :func:`irecv`.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> out, into = np.array([10.0 * me]), np.empty(1)
    >>> ring = [hc.P2POp(hc.isend, out, (me + 1) % n), hc.P2POp(hc.irecv, into, (me - 1) % n)]
    >>> works = hc.batch_isend_irecv(ring)
    >>> [work.wait() for work in works]
    [True, True]
    >>> into  # on rank 2: array([10.])
    array([0.])
    """
    works: list[Any] = []
    messages: list[tuple[Door, Call]] = []
    # Everything is checked before anything is started: a receive left behind would take the next message of its tag.
    for each in p2p_op_list:
        if type(each) is not P2POp:
            raise TypeError(f"batch_isend_irecv: the list holds {each!r}; expected P2POp objects{here()}")
        group = member(each.group)
        if isinstance(group, NonMember):
            group.says_no("batch_isend_irecv")
            works.append(done_work("recv" if each.op is irecv else "send"))
            continue
        name = "recv" if each.op is irecv else "send"
        try:
            plain = group.plain_message(name, each.array, each.peer, each.tag)
            if plain is not None and each.group_peer is None:
                call = plain
            elif name == "recv":
                source = group.source("irecv", each.peer, each.group_peer)
                call = calls.recv(group, each.array, source, each.tag)
            else:
                peer = group.peer("isend", "dst", each.peer, each.group_peer)
                call = calls.send(group, each.array, peer, each.tag)
        except NobodyThere as nobody:
            works.append(done_work("send") if each.op is isend else done_work("recv", nobody.rank))
            continue
        messages.append((group.door, call))
        works.append(None)
    if len(messages) == len(works):
        return batch(messages)
    started = iter(batch(messages))
    return [next(started) if work is None else work for work in works]
