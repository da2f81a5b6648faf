"""Accept c10d's argument names where hpccomm's differ: programs written for c10d use them as keywords.

Functions with a fast path have c10d's name as an additional last argument, and call `either` if it is given: this adds
a few nanoseconds to an ordinary call. `c10d_names` wraps all other functions, and adds a hundred nanoseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..errors import on_rank

Function = TypeVar("Function", bound=Callable[..., Any])


def either(operation: str, /, **two: Any) -> Any:
    """Return the argument given by its second name, c10d's; TypeError if both names are given.

    >>> either("all_reduce", array=None, tensor=1)
    1
    """
    (ours, given), (theirs, value) = two.items()
    if given is not None:
        raise TypeError(f"{operation}: {ours} and {theirs} are one argument; give it once{on_rank()}")
    return value


def c10d_names(*ignored: str, only_none: tuple[str, ...] = (), **ours: str) -> Callable[[Function], Function]:
    """Return a decorator that lets a function also accept arguments by c10d's names.

    Arguments in `ignored` have no effect; arguments in `only_none` may only be None or False.

    >>> @c10d_names("device", only_none=("pg_options",), tensors="arrays")
    ... def count(arrays):
    ...     return len(arrays)
    >>> count([1, 2]), count(tensors=[1, 2, 3], device="cuda:0", pg_options=None)
    (2, 3)
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if not named:
                return function(*arguments)
            for theirs in named.keys() & ours.keys():
                name = ours[theirs]
                named[name] = either(function.__name__, **{name: named.get(name), theirs: named.pop(theirs)})
            for theirs in named.keys() & {*ignored, *only_none}:
                if named.pop(theirs) not in (None, False) and theirs in only_none:
                    raise ValueError(f"{function.__name__}: hpccomm has no {theirs}; leave it out, or None{on_rank()}")
            return function(*arguments, **named)

        return cast("Function", call)

    return decorate
