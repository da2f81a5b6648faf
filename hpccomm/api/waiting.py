"""Wait for all or any of several Works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from ..core.observers import who_is_late
from ..core.timeouts import as_seconds, pause, pauses, time_to_wait
from ..core.work import Work, is_of_a_signal_handler
from ..errors import DistTimeoutError, on_rank
from ..native import fastpath


def wait_all(works: Sequence[Work | None], timeout: timedelta | float | None = None) -> None:
    """Wait until all of `works` are done, even if some fail: MPI_Waitall (MPI-4.1 §3.7.5).

    Parameters
    ----------
    works : list of Work
        Works of any groups and operations, in any order. None is skipped: an operation may return it on a rank outside
        its group.
    timeout : timedelta or float (seconds), optional
        The time limit for all Works together. Default: as for :meth:`Work.wait`.

    Returns
    -------
    None

    Raises
    ------
    DistTimeoutError
        The timeout has passed. Unfinished Works stay in flight.
    Exception
        The error of the first failed Work in the list.

    Examples
    --------
    >>> n, me = hc.get_world_size(), hc.get_rank()
    >>> x = np.empty(1)
    >>> hc.wait_all([hc.irecv(x, src=(me - 1) % n), hc.isend(np.array([10.0 * me]), dst=(me + 1) % n)])
    >>> x  # on rank 2: array([10.])
    array([0.])
    """
    works = list(works)  # another thread may change the program's list
    if timeout is None and fastpath is not None and fastpath.wait_all(works):
        return
    deadline = None if timeout is None else time.monotonic() + time_to_wait("wait_all", timeout)
    errors: list[Exception] = []
    for _, work in _pending("wait_all", works):
        try:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Exception as error:
            if not work.is_completed() or is_of_a_signal_handler(error):  # the time is up
                raise
            errors.append(error)
    if errors:
        raise errors[0]


def wait_any(works: Sequence[Work | None], timeout: timedelta | float | None = None) -> int:
    """Wait until one of `works` is done, and return its index: MPI_Waitany (MPI-4.1 §3.7.5).

    For GPU arrays the host waits.

    Parameters
    ----------
    works : list of Work
        Works of any groups and operations. None is skipped: replace each Work that is done by None.
    timeout : timedelta or float (seconds), optional
        Default: the shortest timeout among groups whose ``on_timeout`` is ``"raise"``; without such a group, forever.

    Returns
    -------
    int
        The index of the first Work in the list that is done; -1 if there is no Work to wait for.

    Raises
    ------
    DistTimeoutError
        No Work is done after the timeout. All stay in flight.
    Exception
        The error of the Work, if it failed.

    Examples
    --------
    >>> me = hc.get_rank()
    >>> parts = [np.empty(1), np.empty(1)]
    >>> works = [hc.irecv(parts[0], src=me, tag=1), hc.irecv(parts[1], src=me, tag=2)]
    >>> sent = hc.isend(np.array([7.0]), dst=me, tag=2)
    >>> hc.wait_any(works)
    1
    >>> parts[1]
    array([7.])
    >>> works[1] = hc.isend(np.array([8.0]), dst=me, tag=1)
    >>> hc.wait_all([*works, sent])
    """
    pending = _pending("wait_any", works)
    groups = [work.group for _, work in pending if work.group is not None and work.group.on_timeout == "raise"]
    seconds = min((as_seconds(group.timeout) for group in groups), default=None)
    if timeout is not None:
        seconds = time_to_wait("wait_any", timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    looks = pauses()
    while pending:
        for i, work in pending:
            if work.is_completed():
                work.wait()
                return i
        if deadline is not None and time.monotonic() >= deadline:
            late = who_is_late() if timeout is None else ""
            raise DistTimeoutError(f"wait_any: none of {len(pending)} operations is done in time{on_rank()}{late}")
        pause(next(looks))
    return -1


def _pending(operation: str, works: Sequence[Work | None]) -> list[tuple[int, Work]]:
    """Return the Works in the list, without None, and their indices."""
    pending = [(i, work) for i, work in enumerate(works) if work is not None]
    for _, work in pending:
        if not hasattr(work, "is_completed"):
            raise TypeError(
                f"{operation}: an item is a {type(work).__name__}; expected Works, as isend returns{on_rank()}"
            )
    return pending
