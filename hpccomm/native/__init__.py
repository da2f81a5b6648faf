"""The compiled extension: what is called most often, in C. It is optional: without it the checked way does the same.

`reason` says why it does not run in this process, and what to type; it is "" where it does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ._gil_held import Notes

MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")  # whose ABIs pass an int and a pointer alike


def load() -> tuple[ModuleType | None, str]:
    """Return the extension module and ""; or None, and why not."""
    if os.environ.get("HPCCOMM_NATIVE", "1") == "0":
        return None, "HPCCOMM_NATIVE=0; unset it"
    if platform.machine() not in MACHINES or platform.python_implementation() != "CPython":
        return None, f"it is for CPython on x86-64 and AArch64, not {platform.machine()}"
    try:
        import hpccomm.native._fastpath as compiled  # "from . import" hides a missing module
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == f"{__name__}._fastpath"
        return None, f"{'it has not been compiled' if is_missing else error}; {remedy()}"
    return compiled, ""


def remedy() -> str:
    """Return what to type for a compiled extension."""
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.exists(os.path.join(checkout, "setup.py")):  # also of an editable installation
        return f"install a C compiler, then: pip install --no-deps -e {checkout}"
    # pip keeps what it has built without a compiler, and would install that again
    again = "pip install --force-reinstall --no-deps --no-cache-dir hpccomm"
    return f"install a C compiler, then: {again} (or what it was installed from)"


fastpath, reason = load()
gil_held: ModuleType | None = None  # what speaks for this process while a call of C holds the GIL
if fastpath is not None:
    with contextlib.suppress(ImportError):
        gil_held = importlib.import_module(f"{__name__}._gil_held")


class _NotNoted:
    """In the place of Notes, without the compiled extension."""

    def begin_on_gpu(self, name: str, number: int, event: int) -> int:
        return -1

    def end(self, place: int) -> None: ...

    def identify(self, key: str) -> None: ...

    def follow(self, fast_path: Any) -> None: ...


NOT_NOTED = cast("Notes", _NotNoted())


def notes_of(name: str, limit: float, on_timeout: str) -> Notes:
    """Return the notes of a new group: what `gil_held.h` reads of its operations. `limit`: seconds."""
    return NOT_NOTED if gil_held is None else gil_held.Notes(name, limit, on_timeout)
