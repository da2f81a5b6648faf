"""The barriers: collectives without arrays."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..core.timeouts import time_to_wait
from ..core.work import Work
from .world import member

if TYPE_CHECKING:
    from ..core.non_member import Group


def barrier(
    group: Group | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until every rank of the group has called it: MPI_Barrier (MPI-4.1 §6.3).

    Parameters
    ----------
    group, async_op
        As for :func:`all_reduce`.
    device_ids : list of int, optional
        Accepted for scripts written for torch.distributed, and ignored: the barrier runs on the host.
    timeout : timedelta or float (seconds), optional
        How long to wait for the other ranks. Either every rank passes one or none does: a barrier with a `timeout` is
        asynchronous, and does not match a blocking one.

    Returns
    -------
    Work or None
        With ``async_op=True``, a Work that completes when every rank has called `barrier`.

    Raises
    ------
    DistTimeoutError
        Not every rank has called it within `timeout`. The barrier stays in flight. :func:`monitored_barrier` names the
        missing ranks.

    Examples
    --------
    >>> hc.barrier()
    >>> work = hc.barrier(async_op=True)
    >>> work.wait()  # every rank has called it
    True
    """
    found = member(group)
    if timeout is None:
        if group is None and not async_op and found.dispatcher.fast.barrier():
            return None
        return found.barrier(async_op)
    seconds = time_to_wait("barrier", timeout)
    work: Any = found.barrier(True)
    work.info = work.info._replace(timeout=seconds)
    return work if async_op else work.wait() and None


def monitored_barrier(
    group: Group | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of the group has called it, and report the ranks that are late.

    Like torch.distributed.monitored_barrier. The group stays usable after a timeout.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the world.
    timeout : timedelta or float (seconds), optional
        How long to wait. Default: the group's timeout.
    wait_all_ranks : bool
        True: name every missing rank. False: stop at the first missing rank.

    Returns
    -------
    None

    Raises
    ------
    DistTimeoutError
        On every rank that has called it; the message has the global ranks of those that have not.

    Examples
    --------
    >>> try:
    ...     hc.monitored_barrier(timeout=10)
    ... except hc.DistTimeoutError as error:
    ...     print(error)  # names the ranks that are missing
    ... else:
    ...     print("everybody is here")
    everybody is here
    """
    return member(group).monitored_barrier(timeout, wait_all_ranks)
