"""The NCCL half of the provider: by nccl4py, CuPy or ctypes, whichever is there first."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .libnccl import NCCL as Provider

# A call of the first two costs half a microsecond, one of the last three. CuPy's module is to go.
MODULES = ("nccl4py_nccl", "cupy_nccl", "libnccl")


def NCCL() -> Provider:
    """Return the first that can be loaded; ImportError has what the last one says."""
    importlib.import_module("hpccomm.cuda.cupy_runtime")  # whose absence is the first to be told of
    for module in MODULES[:-1]:
        try:
            return importlib.import_module(f"{__package__}.{module}").NCCL()  # type: ignore[no-any-return]
        except ImportError:
            continue
    return importlib.import_module(f"{__package__}.{MODULES[-1]}").NCCL()  # type: ignore[no-any-return]
