"""The benchmarks' arrays on GPUs; they use the seam, so tests need no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cuda import seam
from ..cuda.choice import VisibleGPUs, choose, visible_gpus
from ..errors import DistBackendError

if TYPE_CHECKING:
    from mpi4py import MPI


def take(comm: MPI.Intracomm, ranks: Sequence[int]) -> str | None:
    """Make this rank's GPU the current one; return the reason why a rank of `comm` can't, or None.

    `ranks` are the world ranks of the ranks of `comm`, for the message.
    """
    try:
        visible = visible_gpus(seam.runtime(), None)
    except ImportError as error:
        visible = VisibleGPUs(error=str(error))
    try:
        devices = choose(comm.allgather(visible), ranks)
    except DistBackendError as error:
        return str(error)
    seam.runtime().use_device(devices[comm.Get_rank()])
    return None


def current_stream() -> int:
    """Return the stream of the measured calls."""
    runtime = seam.runtime()
    return runtime.current_stream(runtime.current_device())


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Make a non-blocking stream CuPy's current stream, and wait for its work at the end."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        yield
        finish()


def finish() -> None:
    """Wait until the GPU has done the work of the current stream."""
    seam.runtime().synchronize_stream(current_stream())


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array on the current GPU."""
    runtime = seam.runtime()
    return runtime.empty(shape, np.dtype(dtype), runtime.current_device(), current_stream())


def facts() -> dict[str, str]:
    """Return the GPU's name and the versions of CuPy and NCCL, as far as they are known."""
    found = {}
    with contextlib.suppress(Exception):
        import cupy

        found["cupy"] = cupy.__version__
        found["gpu"] = cupy.cuda.runtime.getDeviceProperties(seam.runtime().current_device())["name"].decode()
    with contextlib.suppress(Exception):
        found["nccl"] = str(seam.nccl().version())
    return found
