"""Steps that ranks take together: a failure on one rank is raised on all, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..core.group import ProcessGroup
from ..errors import here

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged; the same on every rank."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint, or none of the step asked for; the same on every rank."""


KINDS = (NoCheckpointError, CheckpointError, OSError, ValueError, TypeError, MemoryError, Exception)
RAISED = {OSError: CheckpointError, Exception: RuntimeError}  # in place of these kinds


def together(
    group: ProcessGroup, operation: str, act: Callable[[], T], undo: Callable[[], None] | None = None
) -> list[T]:
    """Return the outcomes of `act` on all ranks, which are small: every rank gets them.

    If it raises on one rank, all ranks call `undo` and raise. After an error of the communication itself nothing is
    undone: other ranks may have continued.
    """
    mine: tuple[Any, int, str] = None, -1, ""
    raised: Exception | None = None
    try:
        mine = act(), -1, ""
    except Exception as error:  # whatever it is, the others must not wait
        raised = error
        kind = next(i for i, each in enumerate(KINDS) if isinstance(error, each))
        text = str(error).removesuffix(here()).removeprefix(f"{operation}: ")
        mine = None, kind, text if KINDS[kind] not in (MemoryError, Exception) else f"{type(error).__name__}: {text}"
    gathered: list[Any] = [None] * group.size
    group.all_gather_object(gathered, mine)
    failed = [(rank, kind, text) for rank, (_, kind, text) in enumerate(gathered) if kind >= 0]
    if not failed:
        return [outcome for outcome, _, _ in gathered]
    if undo is not None:
        undo()
    rank, kind, text = failed[0]
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f" (on rank {group.ranks[rank]}{others})" if group.size > 1 else ""
    raise RAISED.get(KINDS[kind], KINDS[kind])(f"{operation}: {text}{where}") from raised


def of_first(group: ProcessGroup, operation: str, act: Callable[[], T]) -> T:
    """Return, on every rank, the outcome of `act`, which the group's first rank calls."""
    return together(group, operation, lambda: act() if group.rank == 0 else None)[0]  # type: ignore[return-value]
