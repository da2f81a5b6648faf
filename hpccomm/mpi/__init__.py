"""Host arrays over MPI, and the creator of the backend "mpi", which selects the class for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI  # without an MPI library the backend is not available

if TYPE_CHECKING:
    from ..core.backend import Backend
    from ..core.options import BackendOptions
    from .backend import MPIBackend


def create(options: BackendOptions, _: Any) -> Backend:
    """Make the backend of one device of one group."""
    if options.device == "cpu":
        return _on_the_host(options)
    if options.settings.cuda_aware:
        from .cuda_aware_backend import CudaAwareBackend

        return CudaAwareBackend(options, _on_the_host(options))
    from ..cuda.staged_backend import StagedBackend

    return StagedBackend(options, _on_the_host(options))


def _on_the_host(options: BackendOptions) -> MPIBackend:
    if MPI.VERSION >= 4:
        from .backend import MPIBackend

        return MPIBackend(options)
    from .large_counts import LargeCountMPIBackend

    return LargeCountMPIBackend(options)
