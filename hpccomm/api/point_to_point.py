"""The public point-to-point operations.

`dst` and `src` are *global* ranks, also with ``group=``; `group_dst` and `group_src` are ranks in the group.
A receive matches a message with its source, tag and group. Two messages that match the same receive arrive in the
order in which they were sent. With ``MPI.PROC_NULL`` as `dst` or `src` the call completes at once, and nothing is sent
or written, as in MPI. On a rank outside the group (`group` is a NonMember) the functions do nothing, and return None or
a Work that is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import generated
from ..core.annotations import NAMED, Array, Integer
from ..core.c10d_names import either
from ..core.calls import Call
from ..core.dispatcher import Dispatcher, batch
from ..core.non_member import Group, NonMember, done_work
from ..core.work import Work
from ..errors import on_rank
from ..native import fastpath
from .world import member


def send(
    array: Array = NAMED,
    dst: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: Integer | None = None,
    tensor: Array = NAMED,
) -> None:
    """Send `array` to one rank: MPI_Send (MPI-4.1 §3.2).

    The program may change the array once the call has returned. The call may or may not wait for the receiver.

    Parameters
    ----------
    array : array
    dst, group_dst : int
        The receiver: its *global* rank, or its rank in the group.
    group : ProcessGroup, optional
        Default: the world.
    tag : int
        From 0 to about half of MPI's limit (MPI_TAG_UB), at least 10235; the receive must have the same tag.

    Returns
    -------
    None

    Raises
    ------
    ValueError
        The receiver is not in the group, or is this rank itself; the tag is out of range.

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
    is_plain = group is None and group_dst is None and tensor is None  # in the world, ranks are global ranks
    if is_plain and member(None).dispatcher.fast.send(array, dst, tag):
        return
    if tensor is not None:
        array = either("send", array=array, tensor=tensor)
    group = member(group)
    peer = group.peer("send", "dst", dst, group_dst)
    if peer >= 0:  # not MPI.PROC_NULL
        group.send(array, peer, tag)


def recv(
    array: Array = NAMED,
    src: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: Integer | None = None,
    tensor: Array = NAMED,
) -> int:
    """Receive a message into `array`: MPI_Recv (MPI-4.1 §3.2).

    Parameters
    ----------
    array : array
        The destination, with as many bytes as the message.
    src, group_src : int, optional
        The sender: its *global* rank, or its rank in the group. Default: any rank of the group.
    group, tag
        As for :func:`send`.

    Returns
    -------
    int
        The sender's *global* rank.

    Raises
    ------
    ValueError
        The sender is not in the group, or is this rank itself; the tag is out of range.
    DistBackendError
        The message is longer or shorter than `array`.

    Examples
    --------
    >>> x = np.empty(2)
    >>> sent = hc.isend(np.arange(2.0), dst=hc.get_rank())  # a message to oneself
    >>> hc.recv(x)  # from any rank; it came from rank ...
    0
    >>> x
    array([0., 1.])
    """
    if group is None and group_src is None and tensor is None:
        sender = member(None).dispatcher.fast.recv(array, src, tag)
        if sender is not None:
            return sender
    if tensor is not None:
        array = either("recv", array=array, tensor=tensor)
    group = member(group)
    peer = group.source("recv", src, group_src)
    if peer is not None and peer < 0:
        return peer
    source: Any = group.recv(array, peer, tag)
    return source if source is None else group.ranks[source]  # type: ignore[return-value]


def isend(
    array: Array = NAMED,
    dst: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: Integer | None = None,
    tensor: Array = NAMED,
) -> Work:
    """Start to send `array` to one rank: MPI_Isend (MPI-4.1 §3.7.2).

    Arguments and errors are those of :func:`send`, but the receiver may also be this rank itself. Don't change the
    array until the Work is done; the group keeps it alive until then.

    Returns
    -------
    Work

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
    if group is None and group_dst is None and tensor is None:  # in the world, ranks of the group are global ranks
        work = member(None).dispatcher.fast.isend(array, dst, tag)
        if work is not None:
            return work
    if tensor is not None:
        array = either("isend", array=array, tensor=tensor)
    group = member(group)
    peer = group.peer("isend", "dst", dst, group_dst)
    return group.send(array, peer, tag, async_op=True) if peer >= 0 else done_work("send")


def irecv(
    array: Array = NAMED,
    src: Integer | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: Integer | None = None,
    tensor: Array = NAMED,
) -> Work:
    """Start to receive a message into `array`: MPI_Irecv (MPI-4.1 §3.7.2).

    Arguments and errors are those of :func:`recv`, but the sender may also be this rank itself, and the Work raises the
    error for a message of another size. Don't read or write the array until the Work is done; the group keeps it alive
    until then.

    Returns
    -------
    Work
        `source_rank()` returns the sender's global rank, and `abort()` cancels the receive.

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
    if group is None and group_src is None and tensor is None:
        work = member(None).dispatcher.fast.irecv(array, src, tag)
        if work is not None:
            return work
    if tensor is not None:
        array = either("irecv", array=array, tensor=tensor)
    group = member(group)
    peer = group.source("irecv", src, group_src)
    if peer is not None and peer < 0:
        return done_work("recv", peer)
    return group.recv(array, peer, tag, async_op=True)


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
    """Send `array` to one rank while receiving `output` from another or the same: MPI_Sendrecv (MPI-4.1 §3.10).

    Two ranks that exchange messages with it do not deadlock.

    Parameters
    ----------
    array, dst, tag, group, group_dst
        As for :func:`send`, but the receiver may also be this rank itself.
    output, src, group_src
        As for :func:`recv`, with the same errors.
    recv_tag : int, optional
        The tag of the received message. Default: `tag`.
    async_op : bool
        True: return a Work at once. Don't touch either array until it is done.

    Returns
    -------
    int or Work
        The global rank of `output`'s sender. With ``async_op=True``, a Work; its `source_rank()` returns that rank.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> left = np.empty(1)
    >>> hc.sendrecv(np.array([10.0 * me]), (me + 1) % n, left, (me - 1) % n)  # on rank 1: 0
    0
    >>> left  # on rank 2: array([10.])
    array([0.])
    """
    group = member(group)
    if type(dst) is type(src) is int and group_dst is None and group_src is None and not async_op:
        peers = group.group_ranks
        if dst in peers and src in peers:
            group.sendrecv(array, peers[dst], output, peers[src], tag, recv_tag)
            return src
    peer, source = group.peer("sendrecv", "dst", dst, group_dst), group.source("sendrecv", src, group_src)
    if peer < 0:
        receive = irecv if async_op else recv
        return receive(output, src, group, tag if recv_tag is None else recv_tag, group_src)
    if source is not None and source < 0:
        if async_op:
            return isend(array, group=group, tag=tag, group_dst=peer)
        send(array, group=group, tag=tag, group_dst=peer)
        return source
    outcome: Any = group.sendrecv(array, peer, output, source, tag, recv_tag, async_op)
    return group.ranks[outcome] if isinstance(outcome, int) else outcome


if TYPE_CHECKING or fastpath is None:
    Message = object
else:
    Message = fastpath.Message


class P2POp(Message):
    """One send or receive of :func:`batch_isend_irecv`.

    Parameters
    ----------
    op : callable
        :func:`isend` or :func:`irecv`.
    array : array
    peer, group_peer : int, optional
        The other rank: its *global* rank, or its rank in the group. A receive without it accepts any rank.
    group, tag
        As for :func:`send`.

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

    __slots__ = ("array", "group", "group_peer", "op", "peer", "tag") if fastpath is None else ()

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
            raise ValueError(f"P2POp: op is {op!r}; expected hpccomm.isend or hpccomm.irecv{on_rank()}")
        self.op = op
        self.array = array if tensor is None else either("P2POp", array=array, tensor=tensor)
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer


if not TYPE_CHECKING and fastpath is not None:  # inherit the constructor in C, which is faster and calls this one
    P2POp.__signature__ = inspect.signature(P2POp)
    fastpath.set_up_messages(isend, irecv, P2POp.__init__)
    del P2POp.__init__


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start several sends and receives, the receives first, so that buffers are ready when data arrives.

    Parameters
    ----------
    p2p_op_list : list of P2POp
        The messages, in any order; the list may be empty.

    Returns
    -------
    list of Work
        One for each message, in the order of the list. Don't touch an array until its Work is done.

    Raises
    ------
    TypeError
        The list holds an object that is not a P2POp.
    ValueError
        As for :func:`isend` and :func:`irecv`; then nothing has been started.

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
    if not isinstance(p2p_op_list, (list, Sequence)):  # the first is fast
        kind = type(p2p_op_list).__name__
        raise TypeError(f"batch_isend_irecv: p2p_op_list is a {kind}; expected a list of P2POp objects{on_rank()}")
    if p2p_op_list and getattr(p2p_op_list[0], "group", p2p_op_list) is None:
        begun = member(None).dispatcher.fast.batch(p2p_op_list, P2POp, irecv)
        if begun is not None:
            return begun
    works: list[Any] = []
    messages: list[tuple[Dispatcher, Call]] = []
    # Check all messages before starting any: a receive left behind would take the next message with its tag.
    for each in p2p_op_list:
        if type(each) is not P2POp:
            raise TypeError(f"batch_isend_irecv: an item is a {type(each).__name__}; expected P2POp objects{on_rank()}")
        group = member(each.group)
        is_receive = each.op is irecv
        name = "recv" if is_receive else "send"
        if isinstance(group, NonMember):
            group.warn("batch_isend_irecv")
            works.append(done_work(name))
            continue
        call = group.plain_message(name, each.array, each.peer, each.tag)
        if call is None or each.group_peer is not None:
            ranks = each.peer, each.group_peer
            peer: Any = group.source("irecv", *ranks) if is_receive else group.peer("isend", "dst", *ranks)
            if peer is not None and peer < 0:
                works.append(done_work(name, peer if is_receive else None))
                continue
            call = (generated.recv if is_receive else generated.send)(group, each.array, peer, each.tag)
        messages.append((group.dispatcher, call))
        works.append(None)
    if len(messages) == len(works):
        return batch(messages)
    started = iter(batch(messages))
    return [next(started) if work is None else work for work in works]
