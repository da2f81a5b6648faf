"""The exceptions hpccomm raises, and the words they share.

Mistakes in arguments are ``ValueError`` or ``TypeError``; everything that goes wrong in the
communication itself is a :class:`DistError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class DistError(RuntimeError):
    """Base class of every error of the communication itself.

    A transport gives the reason; the group that has called it adds the operation.

    Attributes
    ----------
    operation : str
        Its name, ``"all_reduce"``; "" where it is no operation.
    number : int
        Its number in its group, as `Work.sequence_number`; 0 where it has none.
    group : str
        The name of its group.

    Examples
    --------
    >>> str(hc.DistBackendError("the cable is broken", "all_reduce"))
    'all_reduce: the cable is broken'
    """

    number = 0
    group = ""

    def __init__(self, reason: str = "", operation: str = "") -> None:
        super().__init__(reason)
        self.operation = operation

    def identify(self, operation: str, number: int, group: str) -> None:
        """Add the operation, its number and its group, unless they are known."""
        if not self.group:
            self.operation, self.number, self.group = operation, number, group

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number else ""
        group = f" of {self.group!r}" if self.group else ""
        return f"{self.operation}{number}{group}: {super().__str__()}" if self.operation else super().__str__()


class DistBackendError(DistError):
    """A transport (MPI, NCCL, a plug-in) reported a failure."""


class RankFailedError(DistBackendError):
    """Ranks of the group have died, and MPI has survived it: :func:`hpccomm.shrink_group` makes a group of the others.

    Or :func:`hpccomm.replace_failed` one in which spares have their places.

    Attributes
    ----------
    ranks : tuple of int
        The global ranks that are known to have died; empty if others have given the group up and named none.
    """

    def __init__(self, reason: str, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(reason, operation)
        self.ranks = tuple(ranks)


class TooFewSparesError(DistError):
    """More ranks have died than spares are left, said on every survivor; :func:`hpccomm.shrink_group` needs none."""


class DistNetworkError(DistError):
    """A connection could not be made or was lost."""


class DistStoreError(DistError):
    """A key-value store failed."""


class DistTimeoutError(DistError, TimeoutError):
    """An operation did not finish in time. It is still in flight unless the message says otherwise."""


class UnsupportedOperationError(DistError, NotImplementedError):
    """A backend does not implement the operation asked of it."""


_rank: int | str | None = None


def set_rank(rank: int | str | None) -> None:
    """Name this process in messages from now on; `world` calls it at init (the rank) and destroy (None)."""
    global _rank
    _rank = rank


def on_rank() -> str:
    """Return ``" (rank 2)"`` for the end of a message, or nothing before init."""
    return "" if _rank is None else f" (rank {_rank})"


def log_exception(text: str, *arguments: object) -> None:
    """Log the exception that is being handled: there is nobody to raise it to."""
    import logging

    logging.getLogger("hpccomm").exception(text, *arguments)
