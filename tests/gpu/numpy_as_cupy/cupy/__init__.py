"""A module of CuPy's name that is NumPy, so that the jobs' code for GPUs runs, and is tested, without one.

Its arrays say that they are on a GPU; the stand-in (tests/gpu/stand_in.py) is the CUDA and the NCCL to go with them.
Everything happens at once: the order of streams is tested with CuPy's own arrays, in the other tests.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

__version__ = "14.0.0"


class ndarray(np.ndarray):
    """A NumPy array with the attributes of CuPy's that hpccomm uses."""

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> ndarray:
        memory = None if memptr is None else np.asarray(memptr.mem.owner)
        if memory is not None:
            return memory.view(dtype).reshape(shape).view(cls)
        return super().__new__(cls, shape, dtype, None, 0, strides)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=cuda.device)

    def get(self) -> np.ndarray:
        return np.array(self)


def __getattr__(name: str) -> Any:
    """Return NumPy's function of that name; the arrays it makes are on the GPU."""
    found = getattr(np, name)
    if not callable(found) or isinstance(found, type):
        return found

    def function(*arguments: Any, **options: Any) -> Any:
        result = found(*arguments, **options)
        return result.view(ndarray) if isinstance(result, np.ndarray) else result

    return function


class _Device:
    def __init__(self, number: int | None = None) -> None:
        self.id = cuda.device if number is None else number

    def use(self) -> None:
        cuda.device = self.id


def _stream(**_: Any) -> Any:
    return nullcontext(SimpleNamespace(ptr=0, synchronize=lambda: None))


cuda = SimpleNamespace(
    device=0,
    Device=_Device,
    UnownedMemory=lambda pointer, size, owner, device_id: SimpleNamespace(owner=owner),
    MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory),
    Stream=_stream,
    get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None, ptr=0),
    runtime=SimpleNamespace(is_hip=False, getDeviceCount=lambda: 1),
)
sys.modules[f"{__name__}.cuda"] = cuda  # type: ignore[assignment]
