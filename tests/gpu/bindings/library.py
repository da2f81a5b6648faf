"""The fake libnccl.so.2 under CuPy's bindings: compiled, loaded before CuPy looks for the real one, and hooked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nccl.c")
FLAGS = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libnccl.so.2"]
Hook = Callable[[str, list[int]], int]
HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int)
INTERNAL_ERROR = 3

_kept: list[object] = []  # such as a callback that C has, which must not be dropped


def load() -> ctypes.CDLL:
    """Compile the library and load it: the loader knows it by its soname from now on, and gives it to CuPy."""
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)  # until the process ends: others may open the file by its path
    path = Path(folder.name, "libnccl.so.2")
    subprocess.run([os.environ.get("CC", "cc"), *FLAGS, "-o", path, SOURCE], check=True, timeout=60)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def set_hook(library: ctypes.CDLL, hook: Hook, codes: Callable[[BaseException], int]) -> None:
    """Let `hook` be called with the name and arguments of each function; `codes` gives the result of an exception."""

    @HOOK
    def called(name: bytes, arguments: ctypes._Pointer[ctypes.c_int64], count: int) -> int:
        try:
            return hook(name.decode(), arguments[:count])
        except BaseException as error:  # it can't pass through C
            return codes(error)

    _kept.append(called)
    library.set_hook(called)
