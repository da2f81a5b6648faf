"""hpccomm without the compiled extension, to compare both in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hpccomm as hc

from ... import native
from ...core.backends import options_for
from ...core.options import BackendOptions
from ...mpi.backend import MPIBackend
from ...mpi.fast_path import MPIFastPath
from .hpccomm_calls import InAnotherGroup

if TYPE_CHECKING:
    from mpi4py import MPI


class PythonBackend(MPIBackend):
    """Host arrays over MPI, as with ``HPCCOMM_NATIVE=0``."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.fast_path = MPIFastPath()
        self._has_node = False


class InPython(InAnotherGroup):
    """The functions of hpccomm in a group without a fast path."""

    name = "python"

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        dispatcher, backend = self.group.dispatcher, PythonBackend(options_for(self.group, "cpu"))
        dispatcher.backends["cpu"] = backend  # in time: the first array would make another backend
        dispatcher.take_fast_path(backend.fast_path)

    @classmethod
    def missing(cls) -> str | None:
        """Return a reason if hpccomm has no compiled extension here; then there is nothing to compare."""
        return f"hpccomm has no compiled extension here ({native.reason})" if native.fastpath is None else None
