"""Which functions may wait for other ranks without being an operation: the watchdog knows them by their code."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

WATCHED: dict[CodeType, str] = {}  # and what each is called in reports

Function = TypeVar("Function", bound=Callable[..., Any])


def watched(function: Function) -> Function:
    """Let the watchdog see when a program is in `function`; it costs nothing."""
    WATCHED[function.__code__] = function.__name__
    return function
