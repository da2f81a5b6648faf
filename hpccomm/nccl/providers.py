"""Choose the NCCL half of the provider: the first of nccl4py, CuPy and ctypes that can be loaded."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .libnccl import NCCL as Provider

# A call costs 0.5 us with the first two, and 3 us with the last.
MODULES = ("nccl4py_nccl", "cupy_nccl", "libnccl")


def NCCL() -> Provider:
    """Return the first provider that can be loaded; the last one's ImportError is raised."""
    from ..cuda.cupy_runtime import Runtime  # noqa: F401  # raises first if CuPy is missing

    *before, last = (f"{__package__}.{module}" for module in MODULES)
    for module in before:
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).NCCL()  # type: ignore[no-any-return]
    return importlib.import_module(last).NCCL()  # type: ignore[no-any-return]
