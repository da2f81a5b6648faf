"""hpccomm's exceptions and warnings, and parts of their messages.

Wrong arguments raise ``ValueError`` or ``TypeError``; failures of the communication itself raise a :class:`DistError`.
A warning is an :class:`HpccommWarning`; one about a deprecated name is an :class:`HpccommDeprecationWarning`.
"""

from __future__ import annotations

from collections.abc import Sequence


class DistError(RuntimeError):
    """Base class of all errors of the communication itself.

    The transport gives the reason; the group adds the operation.

    Attributes
    ----------
    operation : str
        The name of the failed operation, ``"all_reduce"``; "" if no operation failed.
    number : int
        Its `Work.sequence_number`; 0 if it has none.
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
        """Set the operation, its number and its group, unless they are set."""
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

    :func:`hpccomm.replace_failed` makes a group in which spares replace them.

    Attributes
    ----------
    ranks : tuple of int
        The global ranks known to be dead; empty if another rank has given the group up without naming any.
    """

    def __init__(self, reason: str, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(reason, operation)
        self.ranks = tuple(ranks)


class TooFewSparesError(DistError):
    """More ranks have died than spares are left; raised on every survivor. :func:`hpccomm.shrink_group` needs none."""


class DistNetworkError(DistError):
    """A connection could not be made or was lost."""


class DistStoreError(DistError):
    """A key-value store failed."""


class DistTimeoutError(DistError, TimeoutError):
    """An operation did not finish in time. It is still in flight unless the message says otherwise."""


class UnsupportedOperationError(DistError, NotImplementedError):
    """The backend does not implement the operation."""


class HpccommWarning(RuntimeWarning):
    """Base class of hpccomm's warnings except :class:`HpccommDeprecationWarning`.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", hc.HpccommWarning)
    ...     hc.barrier(hc.NonMember())
    Traceback (most recent call last):
        ...
    hpccomm.errors.NonMemberWarning: barrier: this rank is not in <NonMember of ''>; nothing is done (rank 0)
    """


class NonMemberWarning(HpccommWarning):
    """An operation did nothing, because this rank is not in its group."""


class CheckpointWarning(HpccommWarning):
    """A checkpoint is less safe than it could be, or is not the one that was asked for."""


class HpccommDeprecationWarning(FutureWarning):
    """A deprecated name was used. Python shows it by default, unlike a DeprecationWarning."""


_rank: int | str | None = None


def set_rank(rank: int | str | None) -> None:
    """Set the rank that messages name; `world` calls it at init (the rank) and at destroy (None)."""
    global _rank
    _rank = rank


def on_rank() -> str:
    """Return ``" (rank 2)"`` for the end of a message; "" before init."""
    return "" if _rank is None else f" (rank {_rank})"


def log_exception(text: str, *arguments: object) -> None:
    """Log the exception that is being handled, which can't be raised to any caller."""
    import logging

    logging.getLogger("hpccomm").exception(text, *arguments)
