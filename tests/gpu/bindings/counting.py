"""The calls below hpccomm's own provider: functions of libnccl, and of cupy.cuda.runtime."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from hpccomm.cuda import cupy_runtime

from . import library, provider


class Counted:
    """`cupy.cuda.runtime`, whose functions are noted when this thread calls them."""

    def __init__(self, functions: Any, calls: list[str]) -> None:
        self._functions = functions
        self._calls = calls
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._functions, name)
        if isinstance(found, type) or not callable(found):
            return found

        def noting(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._calls.append(name)
            return found(*arguments)

        return noting


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that gets the name of each function that this thread calls."""
    calls: list[str] = []
    mine = threading.get_ident()

    def called(name: str, arguments: list[int]) -> int:
        if threading.get_ident() == mine:
            calls.append(name)
        return provider.called(name, arguments)

    before = cupy_runtime.cuda
    cupy_runtime.cuda = Counted(before, calls)
    library.set_hook(provider.LIBRARY, called, provider.code_of)
    try:
        yield calls
    finally:
        library.set_hook(provider.LIBRARY, provider.called, provider.code_of)
        cupy_runtime.cuda = before
