"""The end of a group: operations in flight are finished, and all ranks meet before anything is freed.

They meet in a barrier that is polled: it ends where a rank does not come, and lets other threads work meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DistTimeoutError, on_rank
from ..job import failures
from ..process.stderr import tell
from .observers import who_is_late
from .timeouts import pause, pauses

if TYPE_CHECKING:
    from ..job.meeting import Meeting
    from .group import ProcessGroup

SHORTEST_MEETING = 10.0  # seconds that ranks may be apart when they destroy a group, however short its timeout
LONGEST_END = 5.0  # seconds that what is in flight has to end, when its group is given up
LONELY = 2.0  # seconds that a rank that has not destroyed its groups waits at its end, until it says so
SPEAKERS = 8  # ranks of a group that may say so in destroy: of a thousand many may have to wait for a moment


def finish(group: ProcessGroup, deadline: float) -> list[str]:
    """Wait for the operations in flight; return a warning for each failed one whose error the program has not seen.

    A Work that has timed out already is left to `give_up_the_rest`, because the others may be in `destroy` themselves;
    but not one that a thread is executing: MPI could not be finalised under it.
    """
    works, looks = [work for work in list(group.dispatcher.in_flight) if not work.has_timed_out], pauses()
    # All in turn: a GPU may wait for a rank that waits for a message of the host, which goes on when it is looked at.
    while sum(work.has_ended() for work in works) < len(works) and time.monotonic() < deadline:
        pause(next(looks))
    for work in works:
        try:
            work.wait(max(0.0, deadline - time.monotonic()))
        except DistTimeoutError as error:
            raise DistTimeoutError(f"destroy of {group!r}: {error}") from error
        except Exception:  # told below, with those that failed earlier
            work.error_was_seen = False
    # the program dropped these Works, and with them their errors
    unseen = [f"{work!r}: {work.error}" for work in group.dispatcher.failed if not work.error_was_seen]
    group.dispatcher.failed.clear()
    for persistent in list(group.dispatcher.persistent):
        persistent.wait(max(0.0, deadline - time.monotonic()))
        persistent.free()
    return unseen


def meet(group: ProcessGroup, deadline: float) -> bool:
    """Wait until every rank destroys the group, or leaves the program; return whether all free what they have together.

    Nothing collective begins before that; nor afterwards, if one rank leaves, or has an operation that has not ended.
    """
    frees = all(work.has_ended() for work in list(group.dispatcher.in_flight))
    limit, has_said = max(deadline - time.monotonic(), SHORTEST_MEETING), group.leaving is not None

    def give_up(waited: float, absent: int | None) -> None:
        nonlocal has_said
        if waited > LONELY and absent is not None and not has_said and group.rank < SPEAKERS:
            has_said = True
            thread = threading.Thread(target=_tell_of, args=(group, absent), name="hpccomm-destroy", daemon=True)
            thread.start()  # asking takes seconds
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
    """Give up the operations still in flight when every rank has come to destroy the group; return True if any was."""
    left = [work for work in list(group.dispatcher.in_flight) if not work.has_ended()]
    if left:
        error = DistTimeoutError(
            f"given up when {group!r} was destroyed: not every rank has made the matching call{on_rank()}"
        )
        for work in left:
            work.give_up(error, time.monotonic())
    return bool(left)


def call_all(steps: Iterator[Callable[[], Any]]) -> None:
    """Call each, also after one that has raised; raise the last error."""
    for step in steps:
        try:
            step()
        except BaseException:
            call_all(steps)
            raise


def abandon(group: ProcessGroup, dead: Sequence[int]) -> None:
    """End operations in flight with RankFailedError, without the other ranks: the (global) ranks `dead` have died."""
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
    """Wait for the other ranks at the end of a program that has not destroyed the group: they may need this one."""
    has_said = group.leaving is not None or not tells

    def say(waited: float, _: int | None) -> None:
        nonlocal has_said
        if waited > LONELY and not has_said:
            has_said = True
            tell(
                f"hpccomm: rank {group.rank} has come to the end of its program without "
                "destroy_process_group(), and waits for the other ranks; what they do with it never ends"
            )

    try:
        _wait_for_all(group, say, frees=False)
    except Exception as error:
        if failures.translated("leave", error, group.comm) is None:  # the dead need nothing
            raise
        return
    for each in (group, *group.children):
        for backend in list(each.dispatcher.backends.values()):
            backend.leave()


def _wait_for_all(group: ProcessGroup, meanwhile: Callable[[float, int | None], None], frees: bool) -> Meeting:
    """Wait in the group's last meeting; where that takes a while, call `meanwhile` again and again.

    It is given the seconds so far, and a rank known to be absent. A second call goes on where the first has ended.
    """
    from ..job.meeting import Meeting  # which loads MPI

    began, looks = time.monotonic(), pauses()
    meeting = group.leaving = group.leaving or Meeting(group.comm, frees)
    while not meeting.is_over():
        seconds = next(looks)
        if seconds:
            meanwhile(time.monotonic() - began, meeting.absent)
        pause(seconds)
    return meeting


def _tell_of(group: ProcessGroup, absent: int) -> None:
    """Print the rank that has not come to destroy the group, and where it is."""
    verdict = who_is_late()
    if not group.is_destroyed:
        tell(
            f"hpccomm: rank {group.ranks[group.rank]} waits for rank {group.ranks[absent]}, which has not come to "
            f"destroy {group.name!r} (at the end of a with block, too){verdict}"
        )
