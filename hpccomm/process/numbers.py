"""Numbers as options of a command line; argparse names the option that gets a wrong one."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def number(words: str, kind: Callable[[str], N], allowed: Callable[[N], bool]) -> Callable[[str], N]:
    """Return an argparse type for numbers, which `words` describe in errors."""

    def read(text: str) -> N:
        with contextlib.suppress(ValueError):
            if allowed(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")

    return read


positive = number("a positive integer", int, lambda found: found > 0)
seconds = number("a positive number of seconds", float, lambda found: 0 < found < math.inf)
