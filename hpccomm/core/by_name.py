"""What the core uses without importing it: transports and CUDA are named as text, and imported when needed."""

from __future__ import annotations

import importlib
from typing import Any


def by_name(name: str) -> Any:
    """Import what ``"module:attribute"`` names.

    >>> by_name("math:floor")(2.5)
    2
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
