"""The exceptions hpccomm raises, and the words they share.

Mistakes in arguments are ``ValueError`` or ``TypeError``; everything that goes wrong in the
communication itself is a :class:`DistError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class DistError(RuntimeError):
    """Base class of every error of the communication itself."""


class DistBackendError(DistError):
    """A transport (MPI, NCCL, a plug-in) reported a failure."""


class RankFailedError(DistBackendError):
    """Ranks of the group have died, and the MPI library has survived it; :func:`hpccomm.shrink_group` goes on without.

    Attributes
    ----------
    ranks : tuple of int
        The global ranks that are known to have died; empty where it is only known that others have given the group up.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class DistNetworkError(DistError):
    """A connection could not be made or was lost."""


class DistStoreError(DistError):
    """A key-value store failed."""


class DistTimeoutError(DistError, TimeoutError):
    """An operation did not finish in time. It is still in flight unless the message says otherwise."""


class UnsupportedOperationError(NotImplementedError, DistError):
    """A backend does not implement the operation asked of it."""


_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Let messages name this process; `world` calls it at init (the rank) and destroy (None)."""
    global _rank
    _rank = rank


def here() -> str:
    """Return ``" (rank 2)"`` for the end of a message, or nothing before init."""
    return "" if _rank is None else f" (rank {_rank})"
