"""An uncaught exception on one rank ends the whole job, with its traceback, instead of leaving the others to hang."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Any

from . import errors


class AbortOnException:
    """A sys.excepthook that ends the whole job, with the traceback visible."""

    def __init__(self) -> None:
        self._previous: Any = None

    def install(self, size: int) -> None:
        """Take the place of sys.excepthook, where there are other ranks and nobody is typing."""
        interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if size > 1 and not interactive and os.environ.get("HPCCOMM_ABORT_ON_EXCEPTION", "1") != "0":
            self._previous, sys.excepthook = sys.excepthook, self

    def remove(self) -> None:
        """Put the previous hook back."""
        if sys.excepthook is self:
            sys.excepthook = self._previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print as the previous hook does, then end every rank."""
        try:
            self._previous(kind, error, trace)
        except Exception:  # a broken hook of the program's must not keep the job from ending
            traceback.print_exception(kind, error, trace)
        from mpi4py import MPI

        print(f"hpccomm: {kind.__name__} on rank {errors._rank} ends the job", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
