"""The provider behind the seam: hpccomm's own, with the functions of CUDA that need a driver replaced."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
from typing import Any

import cupy
import numpy as np

from hpccomm.cuda import cupy_runtime, driver
from hpccomm.nccl.cupy_nccl import NCCL

__all__ = ["NCCL", "Runtime"]

STREAM = 1  # the program's current one, which is not the legacy default stream


class Runtime(cupy_runtime.Runtime):
    """One GPU of this rank's own, on which everything is done at once, because nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(STREAM + 1)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def use_device(self, device: int) -> None:
        pass

    def identity(self, device: int) -> str:
        return f"no GPU of process {os.getpid()} on {platform.node()}"

    def create_stream(self, device: int) -> int:
        return next(self._numbers)

    def destroy_stream(self, stream: int) -> None:
        pass

    def current_stream(self, device: int) -> int:
        return STREAM

    def is_capturing(self, stream: int) -> bool:
        return False

    def synchronize_stream(self, stream: int) -> None:
        pass

    def create_event(self, device: int) -> int:
        return next(self._numbers)

    def destroy_event(self, event: int) -> None:
        pass

    def record(self, event: int, stream: int) -> None:
        pass

    def wait(self, stream: int, event: int) -> None:
        pass

    def is_done(self, event: int) -> bool:
        return True

    def synchronize_event(self, event: int) -> None:
        pass

    def relax_captures(self) -> None:
        pass

    def load_copies(self, device: int, stream: int) -> None:
        pass

    def addresses_for_c(self) -> tuple[int, int]:
        return 0, 0

    def copy_kernels(self, device: int) -> list[int]:
        return [1] * 10

    def functions_for_c(self) -> dict[str, int]:
        library = ctypes.CDLL("libnccl.so.2")  # the fake one, which has these too
        names = [*driver.FOR_C, "current_stream"]
        return {name: ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names}

    def load_additions(self, dtype: Any, dimensions: int, device: int, stream: int) -> None:
        pass

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        """Return an array of CuPy's over memory of the host."""
        host = np.zeros(shape, dtype)
        memory = cupy.cuda.UnownedMemory(host.ctypes.data, max(host.nbytes, 1), host, device_id=device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def to_host(self, host: Any, array: Any, stream: int) -> None:
        pass

    def to_device(self, array: Any, host: Any, stream: int) -> None:
        pass
