"""NCCL, for arrays on GPUs: named here so that the command line knows it; it needs hpccomm's GPU backend."""

from __future__ import annotations

from .contender import Contender


class NCCL(Contender):
    """Raw NCCL calls through CuPy."""

    name = "nccl"

    @classmethod
    def missing(cls) -> str | None:
        """There is nothing to compare on host arrays."""
        return "needs a GPU; not available here"
