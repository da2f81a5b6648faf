"""Where a shared library that this process has loaded comes from."""

from __future__ import annotations

import os


def path_of_library(name: str, maps: str = "/proc/self/maps") -> str | None:
    """Return the file of the loaded library whose name begins with `name` ("libmpi"); None where that can't be told."""
    try:
        with open(maps, encoding="utf-8") as file:
            paths = [line.split(maxsplit=5)[5].strip() for line in file if "/" in line]
    except OSError:  # only Linux has it
        return None
    return next((path for path in paths if os.path.basename(path).startswith((f"{name}.so", f"{name}_"))), None)
