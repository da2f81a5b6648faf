"""The compiled extension: the most frequent operations, in C. It is optional: the checked path does the same.

`reason` says why it does not run in this process, and what to type; it is "" if the extension runs.
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

MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")  # their ABIs pass an int and a pointer alike


def load() -> tuple[ModuleType | None, str]:
    """Return the extension module and "", or None and the reason."""
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
    """Return the command that installs the compiled extension."""
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.exists(os.path.join(checkout, "setup.py")):  # also for an editable installation
        return f"install a C compiler, then: pip install --no-deps -e {checkout}"
    # pip caches a wheel that was built without a compiler, and would install it again
    again = "pip install --force-reinstall --no-deps --no-cache-dir hpccomm"
    return f"install a C compiler, then: {again} (or what it was installed from)"


fastpath, reason = load()
gil_held: ModuleType | None = None  # reports for this process while a C call holds the GIL
if fastpath is not None:
    with contextlib.suppress(ImportError):
        gil_held = importlib.import_module(f"{__name__}._gil_held")


class _NotNoted:
    """Stand in for Notes without the compiled extension."""

    def begin_on_gpu(self, name: str, number: int, event: int) -> int:
        return -1

    def end(self, place: int) -> None: ...

    def identify(self, key: str) -> None: ...

    def follow(self, fast_path: Any) -> None: ...


NOT_NOTED = cast("Notes", _NotNoted())


def notes_of(name: str, limit: float, on_timeout: str) -> Notes:
    """Return a new group's notes of its operations, for `gil_held.h`. `limit`: seconds."""
    return NOT_NOTED if gil_held is None else gil_held.Notes(name, limit, on_timeout)
