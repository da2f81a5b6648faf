"""Classes that stand in for those of mpi4py, in the module MPI or as the type of its objects."""

from __future__ import annotations


class LikeItsBase(type):
    """Their type: equal to mpi4py's own, as ``type(comm) == MPI.Intracomm`` asks, and of its instances."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__)  # type: ignore[arg-type]

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.__base__)  # type: ignore[arg-type]

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.__base__ is other

    def __hash__(cls) -> int:
        return hash(cls.__base__)
