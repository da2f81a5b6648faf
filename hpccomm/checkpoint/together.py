"""Steps that ranks take together: a failure on one rank is raised on all, with the same words."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

from ..core.group import ProcessGroup
from ..core.work import Work
from ..errors import on_rank

T = TypeVar("T")
# What ranks do in turns: it yields this rank's word for all, and is sent the words of all ranks; or it yields a Work to
# wait for. It returns an outcome.
Steps = Generator[tuple[Any, int, str] | Work, list[Any], T]
Exchanges = Generator[Work, None, T]  # yields Works to wait for, and returns an outcome


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged; the same on every rank."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint, or none of the step asked for; the same on every rank."""


KINDS = (NoCheckpointError, CheckpointError, OSError, ValueError, TypeError, MemoryError, Exception)
RAISED = {OSError: CheckpointError, Exception: RuntimeError}  # in place of these kinds


class Attempt(NamedTuple):
    """What has come of something that this rank has tried: an outcome, or an error."""

    outcome: Any
    kind: int = -1  # of the error, in KINDS
    text: str = ""
    error: Exception | None = None


def attempt(operation: str, act: Callable[[], object]) -> Attempt:
    """Try `act`."""
    try:
        return Attempt(act())
    except Exception as error:  # whatever it is, the others must not wait
        kind = next(i for i, each in enumerate(KINDS) if isinstance(error, each))
        text = str(error).removesuffix(on_rank()).removeprefix(f"{operation}: ")
        if KINDS[kind] in (MemoryError, Exception):
            text = f"{type(error).__name__}: {text}"
        return Attempt(None, kind, text, error)


def agreed(
    group: ProcessGroup, operation: str, mine: Attempt, undo: Callable[[], None] = lambda: None
) -> Steps[list[Any]]:
    """Return the outcomes of all ranks' attempts, which are small: every rank gets them.

    If one has failed, all ranks call `undo` and raise. After an error of the communication itself nothing is undone:
    other ranks may have continued.
    """
    words = yield mine.outcome, mine.kind, mine.text
    failed = [(rank, kind, text) for rank, (_, kind, text) in enumerate(words) if kind >= 0]
    if not failed:
        return [outcome for outcome, _, _ in words]
    undo()
    rank, kind, text = failed[0]
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f" (on rank {group.ranks[rank]}{others})" if group.size > 1 else ""
    raise RAISED.get(KINDS[kind], KINDS[kind])(f"{operation}: {text}{where}") from mine.error


def exchanged(steps: Steps[T], words_of_all: Callable[[Any], Exchanges[list[Any]]]) -> Exchanges[T]:
    """Do steps to their end, without blocking but for what `words_of_all` does with this rank's word."""
    with closing(steps):
        words: Any = None
        while True:
            try:
                mine = steps.send(words)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(mine, Work):
                yield mine
                words = None
            else:
                words = yield from words_of_all(mine)


def waited_for(exchanges: Exchanges[T]) -> T:
    """Wait for all Works, and return the outcome; every rank calls it."""
    with closing(exchanges):
        while True:
            try:
                next(exchanges).wait()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


def at_once(group: ProcessGroup, steps: Steps[T]) -> T:
    """Do steps to their end; every rank calls it."""

    def words_of_all(mine: object) -> Exchanges[list[Any]]:
        words: list[Any] = [None] * group.size
        group.all_gather_object(words, mine)
        yield from ()
        return words

    return waited_for(exchanged(steps, words_of_all))


def together(group: ProcessGroup, operation: str, act: Callable[[], T]) -> list[T]:
    """Return the outcomes of `act` on all ranks, which are small; if it raises on one rank, all ranks raise."""
    return at_once(group, agreed(group, operation, attempt(operation, act)))


def of_first(group: ProcessGroup, operation: str, act: Callable[[], T]) -> T:
    """Return, on every rank, the outcome of `act`, which the group's first rank calls."""
    return together(group, operation, lambda: act() if group.rank == 0 else None)[0]  # type: ignore[return-value]
