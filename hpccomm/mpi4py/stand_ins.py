"""Subclasses that replace mpi4py's classes in the module MPI, or as the type of its objects."""

from __future__ import annotations

from functools import update_wrapper
from typing import Any


class LikeItsBase(type):
    """The stand-ins' type: they equal their base, as ``type(comm) == MPI.Intracomm`` needs, and have its instances.

    The program's subclasses of a stand-in are ordinary classes.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__) if _stands_in(cls) else super().__instancecheck__(instance)  # type: ignore[arg-type]

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.__base__) if _stands_in(cls) else super().__subclasscheck__(other)  # type: ignore[arg-type]

    def __eq__(cls, other: object) -> bool:
        return cls is other or (_stands_in(cls) and cls.__base__ is other)

    def __hash__(cls) -> int:
        return hash(cls.__base__) if _stands_in(cls) else super().__hash__()


def _stands_in(cls: type) -> bool:
    return "_stands_in" in vars(cls)


def stand_in(base: type, methods: dict[str, Any], *others: type) -> Any:
    """Return a subclass of `base` and `others` with these methods, under its base's name, which pickle uses too."""
    named = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    return LikeItsBase(base.__name__, (*others, base), {"_stands_in": True, **named, **methods})


def from_handles(base: type) -> dict[str, Any]:
    """Return class methods that make requests from handles: mpi4py's own return objects of mpi4py's class."""

    def named(maker: str) -> Any:
        def make(cls: Any, handle: Any) -> Any:
            return cls(getattr(base, maker)(handle))

        return classmethod(update_wrapper(make, getattr(base, maker)))

    return {maker: named(maker) for maker in ("fromhandle", "fromint", "f2py") if hasattr(base, maker)}
