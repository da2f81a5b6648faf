"""Find libnccl: one library for all callers in this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ..cuda.cupy_runtime import INSTALL

VARIABLE = "HPCCOMM_NCCL_LIBRARY"
NAMES = ("libnccl.so.2", "librccl.so.1")  # of NVIDIA; of AMD, whose functions have the same names


def load() -> ctypes.CDLL:
    """Load libnccl: the file that HPCCOMM_NCCL_LIBRARY names, cuda-pathfinder's, or the loader's.

    cuda-pathfinder, which comes with CuPy, knows NVIDIA's wheels, conda, and CUDA_HOME. If CuPy or nccl4py later asks
    the loader for ``libnccl.so.2``, it gets the same library.
    """
    if path := os.environ.get(VARIABLE):
        if not Path(path).is_file():
            raise ImportError(f"{VARIABLE} is {path!r}, and there is no such file")
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    for name in (_by_pathfinder(), *NAMES):
        try:
            if name is not None:
                return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise ImportError(f"there is no NCCL library ({NAMES[0]}): {INSTALL}, or name the file in {VARIABLE}")


def _by_pathfinder() -> str | None:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return str(load_nvidia_dynamic_lib("nccl").abs_path)
    except Exception:  # not installed, or no library found: the error depends on the version
        return None
