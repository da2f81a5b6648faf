"""The end of a group: finish operations in flight; all ranks meet before they free anything.

They meet in a polled barrier: it raises an error if a rank does not come, and lets other threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import DistTimeoutError, on_rank
from ..job import failures
from ..process.stderr import tell, tell_verdict
from .observers import who_is_late
from .timeouts import pause, pauses

if TYPE_CHECKING:
    from ..job.meeting import Meeting
    from .group import ProcessGroup

SHORTEST_MEETING = 10.0  # the least seconds to wait for other ranks in destroy, even if the group's timeout is shorter
LONGEST_GOODBYE = 5.0  # seconds after Ctrl-C in which other ranks may end the job
LONGEST_END = 5.0  # seconds for operations in flight to end when their group is given up
LONELY = 2.0  # seconds that a rank waits for others at the end before it prints a message
SPEAKERS = 8  # ranks of a group that may print it in destroy: in a large group many may wait for a moment


def finish(group: ProcessGroup, deadline: float) -> list[str]:
    """Wait for the operations in flight; return a warning for each failed one whose error the program has not seen.

    Works that have timed out are left to `give_up_the_rest`, because the other ranks may be in `destroy` too. But this
    function waits for a Work that a thread is executing: MPI can't be finalised during that call.
    """
    dispatcher = group.dispatcher
    if not (dispatcher.in_flight or dispatcher.failed or dispatcher.persistent):
        return []
    works, looks = [work for work in list(dispatcher.in_flight) if not work.has_timed_out], pauses()
    # Poll all in turn: a GPU may wait for a rank that waits for a host message, which makes progress only when polled.
    while sum(work.has_ended() for work in works) < len(works) and time.monotonic() < deadline:
        pause(next(looks))
    for work in works:
        try:
            work.wait(max(0.0, deadline - time.monotonic()))
        except DistTimeoutError as error:
            raise DistTimeoutError(f"destroy of {group!r}: {error}") from error
        except Exception:  # reported below, with earlier failures
            work.error_was_seen = False
    # the program dropped these Works without seeing their errors
    unseen = [f"{work!r}: {work.error}" for work in dispatcher.failed if not work.error_was_seen]
    dispatcher.failed.clear()
    for persistent in list(dispatcher.persistent):
        persistent.wait(max(0.0, deadline - time.monotonic()))
        persistent.free()
    return unseen


def meet(group: ProcessGroup, deadline: float) -> bool:
    """Wait until every rank destroys the group or leaves the program; return whether all free their shared resources.

    No collective begins before that; nor afterwards, if a rank leaves or has an operation in flight.
    """
    frees = all(work.has_ended() for work in list(group.dispatcher.in_flight))
    if group.size == 1:
        return frees
    limit, has_said = max(deadline - time.monotonic(), SHORTEST_MEETING), group.leaving is not None

    def give_up(waited: float, absent: int | None) -> None:
        nonlocal has_said
        if waited > LONELY and absent is not None and not has_said and group.rank < SPEAKERS:
            has_said = True
            thread = threading.Thread(target=_tell_of, args=(group, absent), name="hpccomm-destroy", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread starts while Python 3.12 exits
                thread.start()  # the verdict takes seconds
        if waited > limit:
            raise DistTimeoutError(
                f"destroy of {group!r}: other ranks have not called it within {waited:.1f} s; "
                f"every rank of the group has to{on_rank()}{who_is_late()}"
            )

    try:
        return _wait_for_all(group, give_up, frees).all_free
    except Exception as error:
        if failures.is_on() or not isinstance(error, DistTimeoutError):
            group.leaving = None
        raise failures.translated("destroy", error, group.comm) or error from None


def give_up_the_rest(group: ProcessGroup) -> bool:
    """Give up operations still in flight after all ranks have come to destroy the group; return True if any was."""
    left = [work for work in list(group.dispatcher.in_flight) if not work.has_ended()]
    if left:
        error = DistTimeoutError(
            f"given up when {group!r} was destroyed: not every rank has made the matching call{on_rank()}"
        )
        for work in left:
            work.give_up(error, time.monotonic())
    return bool(left)


def abandon(group: ProcessGroup, dead: Sequence[int]) -> None:
    """End operations in flight with RankFailedError, without the other ranks; `dead` has the dead global ranks."""
    error = failures.rank_failed(f"in flight on {group!r}", tuple(dead))
    deadline = time.monotonic() + LONGEST_END
    for backend in group.dispatcher.backends.values():
        backend.abort()
    for work in list(group.dispatcher.in_flight):
        work.give_up(error, deadline)
    for persistent in group.dispatcher.persistent:
        persistent.give_up(error, deadline)
    group.dispatcher.in_flight.clear()
    group.dispatcher.failed.clear()


def leave(group: ProcessGroup, tells: bool) -> None:
    """Wait for the other ranks, which may need this one, if the program ends without destroying the group."""
    has_said = group.leaving is not None or not tells

    def say(waited: float, _: int | None) -> None:
        nonlocal has_said
        if waited > LONELY and not has_said:
            has_said = True
            tell(
                f"hpccomm: rank {group.rank} has come to the end of its program without "
                "destroy_process_group(), and waits for the other ranks; their calls that need it never end"
            )

    try:
        try:
            _wait_for_all(group, say, frees=False)
        except KeyboardInterrupt:  # ranks that wait for this one inside MPI end the job and report this rank's place
            signal.signal(signal.SIGALRM, lambda *_: os._exit(130))  # no thread starts while Python 3.12 exits
            signal.setitimer(signal.ITIMER_REAL, LONGEST_GOODBYE)
            _wait_for_all(group, say, frees=False)
    except Exception as error:
        if failures.translated("leave", error, group.comm) is None:  # don't wait for dead ranks
            raise
        return
    for each in (group, *group.children):
        for backend in list(each.dispatcher.backends.values()):
            backend.leave()


def _wait_for_all(group: ProcessGroup, meanwhile: Callable[[float, int | None], None], frees: bool) -> Meeting:
    """Wait in the group's last meeting; during a long wait, call `meanwhile` repeatedly.

    Its arguments are the seconds so far and a rank known to be absent. A second call continues the meeting.
    """
    from ..job.meeting import Meeting  # loads MPI

    began, looks = time.monotonic(), pauses()
    meeting = group.leaving = group.leaving or Meeting(group.comm, frees)
    while not meeting.is_over():
        seconds = next(looks)
        if seconds:
            meanwhile(time.monotonic() - began, meeting.absent)
        pause(seconds)
    return meeting


def _tell_of(group: ProcessGroup, absent: int) -> None:
    """Print the rank that has not come to destroy the group, and its place in the program."""
    verdict = who_is_late()
    if not group.is_destroyed:
        rank, other = group.ranks[group.rank], group.ranks[absent]
        where = f"destroy {group.name!r} (at the end of a with block, too)"
        tell_verdict([f"rank {rank} waits for rank {other}, which has not come to {where}{verdict}"])
