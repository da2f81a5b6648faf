"""Steps that ranks take together: an error on one rank is raised on all, with the same message."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

from ..core.group import ProcessGroup
from ..core.work import Work
from ..errors import on_rank

T = TypeVar("T")
# Steps that all ranks take: each yields this rank's (outcome, kind, text) and receives those of all ranks, or yields a
# Work to wait for.
Steps = Generator[tuple[Any, int, str] | Work, list[Any], T]
Exchanges = Generator[Work, None, T]  # yields Works to wait for


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged; the same on every rank."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint, or not the requested step; the same on every rank."""


class DamagedError(CheckpointError):
    """A file of the checkpoint is missing or has other bytes than `save` wrote; the same on every rank."""


KINDS = (NoCheckpointError, DamagedError, CheckpointError, OSError, ValueError, TypeError, MemoryError, Exception)
RAISED = {OSError: CheckpointError, Exception: RuntimeError}  # instead of these kinds


class Attempt(NamedTuple):
    """The outcome of a call on this rank, or its error."""

    outcome: Any
    kind: int = -1  # index of the error in KINDS
    text: str = ""
    error: Exception | None = None


def attempt(operation: str, act: Callable[[], object]) -> Attempt:
    """Call `act`, and catch its error."""
    try:
        return Attempt(act())
    except Exception as error:  # any error: the other ranks must not wait forever
        kind = next(i for i, each in enumerate(KINDS) if isinstance(error, each))
        text = str(error).removesuffix(on_rank()).removeprefix(f"{operation}: ")
        if KINDS[kind] in (MemoryError, Exception):
            text = f"{type(error).__name__}: {text}"
        return Attempt(None, kind, text, error)


def agreed(
    group: ProcessGroup, operation: str, mine: Attempt, undo: Callable[[], None] = lambda: None
) -> Steps[list[Any]]:
    """Return the outcomes of all ranks' attempts, which must be small.

    If an attempt failed, all ranks call `undo` and raise. After an error of the communication itself nothing is undone:
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
    """Run `steps` to the end; `words_of_all` exchanges the ranks' words."""
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
    """Run `steps` to the end, blocking; every rank calls it."""

    def words_of_all(mine: object) -> Exchanges[list[Any]]:
        words: list[Any] = [None] * group.size
        group.all_gather_object(words, mine)
        yield from ()
        return words

    return waited_for(exchanged(steps, words_of_all))


def together(group: ProcessGroup, operation: str, act: Callable[[], T]) -> list[T]:
    """Return the outcomes of `act` on all ranks, which must be small; if one rank raises, all ranks raise."""
    return at_once(group, agreed(group, operation, attempt(operation, act)))


def of_first(group: ProcessGroup, operation: str, act: Callable[[], T]) -> T:
    """Call `act` on the group's first rank, and return its outcome on every rank."""
    return together(group, operation, lambda: act() if group.rank == 0 else None)[0]  # type: ignore[return-value]
