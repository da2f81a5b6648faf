"""The NCCL half of the provider: by nccl4py, CuPy or ctypes, whichever is there first."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .libnccl import NCCL as Provider

# A call of the first two costs half a microsecond, one of the last three. CuPy's module is to go.
MODULES = ("nccl4py_nccl", "cupy_nccl", "libnccl")


def NCCL() -> Provider:
    """Return the first that can be loaded; ImportError has what the last one says."""
    from ..cuda.cupy_runtime import Runtime  # noqa: F401  # whose absence is the first to be told of

    *before, last = (f"{__package__}.{module}" for module in MODULES)
    for module in before:
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).NCCL()  # type: ignore[no-any-return]
    return importlib.import_module(last).NCCL()  # type: ignore[no-any-return]
