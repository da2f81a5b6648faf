"""Find out whether the MPI library accepts pointers to GPU memory; without proof, assume that it does not."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

from .mpi_library import path_of_library


class CudaAwareness(NamedTuple):
    """Whether the MPI library is proven to be CUDA-aware, and the evidence."""

    is_proven: bool
    reason: str


def cuda_awareness(environ: Mapping[str, str] = os.environ) -> CudaAwareness:
    """Return the value of ``HPCCOMM_CUDA_AWARE`` (0 or 1); if it is not set, the MPI library's answer.

    Open MPI and MPICH have ``int MPIX_Query_cuda_support(void)``. After MPI_Init it returns whether the library was
    built with CUDA and can use it here. A library without that function counts as not CUDA-aware.
    """
    said = environ.get("HPCCOMM_CUDA_AWARE", "").strip()
    if said in ("0", "1"):
        return CudaAwareness(said == "1", f"HPCCOMM_CUDA_AWARE={said}")
    if said:
        raise ValueError(f"HPCCOMM_CUDA_AWARE is {said!r}; expected 0 or 1")
    return asked_of_the_library()


def asked_of_the_library() -> CudaAwareness:
    """Return the MPI library's own answer."""
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
