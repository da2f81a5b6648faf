"""The compiled room: what is called most often, in C. It is optional: without it the Python code does the same.

`reason` says why it does not run in this process, and what to type; it is "" where it does.
"""

from __future__ import annotations

import os
import platform
from types import ModuleType

MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")  # whose ABIs pass an int and a pointer alike


def load() -> tuple[ModuleType | None, str]:
    """Return the extension module and ""; or None, and why not."""
    if os.environ.get("HPCCOMM_NATIVE", "1") == "0":
        return None, "HPCCOMM_NATIVE=0; unset it"
    if platform.machine() not in MACHINES or platform.python_implementation() != "CPython":
        return None, f"it is for CPython on x86-64 and AArch64, not {platform.machine()}"
    try:
        from . import _room
    except ImportError as error:
        return None, f"{error}; install a C compiler, then: pip install --force-reinstall --no-deps hpccomm"
    return _room, ""


room, reason = load()
