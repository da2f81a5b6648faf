"""Deprecated names: each works for one version, and warns with the new name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..errors import HpccommDeprecationWarning

Function = TypeVar("Function", bound=Callable[..., Any])


def warn(old: str, new: str) -> None:
    """Warn the caller's caller that `old` is deprecated."""
    text = f"{old} is deprecated, and the next version will not have it; use {new}"
    warnings.warn(text, HpccommDeprecationWarning, stacklevel=3)


class Renamed:
    """A deprecated name of a method, as an attribute of its class."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        warn(f"{owner.__name__}.{self._old}", self._new)
        return getattr(owner if instance is None else instance, self._new)


def renamed_arguments(**new: str) -> Callable[[Function], Function]:
    """Return a decorator that lets a function also accept keywords by their deprecated names: ``old="new"``."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            old_names = new.keys() & named.keys()
            for old in old_names:
                warn(f"{function.__name__}: {old}", new[old])
            return function(*arguments, **{new[old]: named.pop(old) for old in old_names}, **named)

        return cast("Function", call)

    return decorate
