"""Types of the options of ``hpccomm run``: argparse names the option that one of them refuses."""

from __future__ import annotations

import argparse
import math
import re

from ..debug.words import LARGEST_JOB


def seconds(text: str) -> str:
    """Return the text of a positive number of seconds."""
    try:
        is_valid = 0 < float(text) < math.inf
    except ValueError:
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return text


def function(text: str) -> str:
    """Return the text ``MODULE:FUNCTION``."""
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:FUNCTION, such as hpccomm.debug:check_numerics")
    return text


def ranks(text: str) -> set[int]:
    """Return the ranks of a list such as ``0,3-5``."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= LARGEST_JOB:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 0,3-5")
        found.update(range(first, last + 1))
    return found
