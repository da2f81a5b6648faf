"""Whether the MPI library takes pointers to GPU memory: only if that is proven."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

from .mpi_library import path_of_library


class CudaAwareness(NamedTuple):
    """Whether the MPI library is CUDA-aware, and how that is known."""

    is_proven: bool
    reason: str


def cuda_awareness(environ: Mapping[str, str] = os.environ) -> CudaAwareness:
    """Return what ``HPCCOMM_CUDA_AWARE`` says (0 or 1), or else what the MPI library says of itself.

    Open MPI and MPICH have ``int MPIX_Query_cuda_support(void)``, to be called after MPI_Init; it tells whether the
    library was built with CUDA and can use it here. A library without that function counts as not aware.

    Raises
    ------
    ValueError
        The variable is neither 0 nor 1.
    """
    said = environ.get("HPCCOMM_CUDA_AWARE", "").strip()
    if said in ("0", "1"):
        return CudaAwareness(said == "1", f"HPCCOMM_CUDA_AWARE={said}")
    if said:
        raise ValueError(f"HPCCOMM_CUDA_AWARE is {said!r}; expected 0 or 1")
    return _library_says()


def asked_of_the_library() -> bool:
    """Return whether the MPI library of this process says of itself that it takes pointers to GPU memory."""
    return _library_says().is_proven


def _library_says() -> CudaAwareness:
    path = path_of_library("libmpi")
    if path is None:
        return CudaAwareness(False, "the MPI library's file was not found; HPCCOMM_CUDA_AWARE=1 if you know that it is")
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
    if query is None:
        return CudaAwareness(
            False, "the library has no MPIX_Query_cuda_support; HPCCOMM_CUDA_AWARE=1 if you know that it is"
        )
    query.restype = ctypes.c_int
    return CudaAwareness(bool(query()), "MPIX_Query_cuda_support() says so")
