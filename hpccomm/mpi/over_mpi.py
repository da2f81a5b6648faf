"""BackendOverMPI: a backend of host arrays that leaves every operation that it does not override to MPI.

It delegates rather than inherits: a subclass of the transport would import MPI when the class is defined. All forms run
the override: the fast path does not take that operation, and coalesced and persistent forms call the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..core.backend import Backend, FastPath, Pieces
from ..core.operation_list import OPERATIONS
from ..core.options import BackendOptions
from ..core.persistent_work import PersistentWork
from ..core.work import Work
from ..errors import on_rank

SHORT_FORMS = {f"i{name}": name for name in OPERATIONS}  # in the fast path
OTHERS = ("peer_view", "connect", "batch", "leave", "abort", "close", "translate_error")  # also left to MPI


class BackendOverMPI(Backend):
    """A backend of host arrays that has some operations of its own; everything else is MPI's.

    Subclass it and override operations of :class:`Backend`. A program that calls such an operation runs the override,
    in every form: blocking and asynchronous, small and large, coalesced (the override for each array, unless the
    coalesced method is overridden too), persistent (the override at each start), and in :class:`GradientBuckets`. MPI's
    own is ``super().all_reduce(...)``; for messages of its own an override may use any operation of `mpi`.

    An overridden reduction gets the same arguments as MPI would: contiguous arrays; SUM for AVG, which is divided
    afterwards, and for PREMUL_SUM, which is multiplied before; float32 for float16 and bfloat16, which are rounded once
    at the end. It may overwrite the arrays that it reduces in place. It returns None when it is done, or a Work.

    Parameters
    ----------
    options : BackendOptions
        The options that a creator gets: the class is its own creator, with the extended API.
    backend_options : None
        The backend options that a creator gets.

    Attributes
    ----------
    mpi : Backend
        The backend that does everything else.
    rank, size : int
        This process in the group.

    Raises
    ------
    TypeError
        The device is not "cpu".

    Examples
    --------
    >>> class Loud(hc.BackendOverMPI):
    ...     def all_reduce(self, array, op, async_op):
    ...         print("all_reduce of", array.size)
    ...         return super().all_reduce(array, op, async_op)
    >>> hc.register_backend("loud", Loud, devices="cpu", extended_api=True)
    >>> group = hc.new_group(backend="cpu:loud")
    >>> x = np.ones(3, np.float16)
    >>> hc.all_reduce_coalesced([x, np.ones(2)], "avg", group=group)
    all_reduce of 3
    all_reduce of 2
    >>> hc.broadcast(x, src=0, group=group)  # by MPI
    """

    def __init__(self, options: BackendOptions, backend_options: Any = None) -> None:
        from . import create
        from .prepared import prepared

        super().__init__(options.rank, options.size)
        if options.device != "cpu":
            raise TypeError(
                f"{type(self).__name__} is a BackendOverMPI, which serves host arrays, not {options.device} arrays; "
                f"register it with devices='cpu'{on_rank()}"
            )
        self.mpi: Any = create(options, None)
        self.fast_path = self.mpi.fast_path
        for name, spec in OPERATIONS.items():
            if spec.reduces and self._has(name):
                setattr(self, name, prepared(name, getattr(self, name), self.rank, self.size))
        for name in vars(FastPath):
            plain = SHORT_FORMS.get(name, name)
            if plain in OPERATIONS and (self._has(plain) or self._has(plain.removesuffix("_coalesced"))):
                setattr(self.fast_path, name, getattr(super().fast_path, name))  # which takes nothing

    def persistent(self, operation: str, *arguments: Any) -> PersistentWork:
        if operation == "exchange" and (self._has("send") or self._has("recv")):
            return super().persistent(operation, *arguments)
        if self._has(operation) or self._has(operation.removesuffix("_coalesced")):
            return super().persistent(operation, *arguments)
        return self.mpi.persistent(operation, *arguments)  # type: ignore[no-any-return]

    def exchange(self, sends: Pieces, receives: Pieces, adds: bool, async_op: bool) -> Work | None:
        if self._has("send") or self._has("recv"):
            return super().exchange(sends, receives, adds, async_op)
        return self.mpi.exchange(sends, receives, adds, async_op)  # type: ignore[no-any-return]

    def repeated_exchange(self, sends: Pieces, receives: Pieces, adds: bool) -> Any:
        is_of_mpi = not (self._has("send") or self._has("recv") or self._has("exchange"))
        return self.mpi.repeated_exchange(sends, receives, adds) if is_of_mpi else None

    def _has(self, operation: str) -> bool:
        of_mpi = getattr(BackendOverMPI, operation, None)
        return of_mpi is not None and getattr(type(self), operation) is not of_mpi


def _left_to_mpi(name: str) -> Callable[..., Any]:
    """Return the method `name` of BackendOverMPI."""
    inherited = getattr(Backend, name)
    plain = name.removesuffix("_coalesced")

    @wraps(inherited)
    def method(self: BackendOverMPI, *arguments: Any) -> Any:
        if plain != name and self._has(plain):
            return inherited(self, *arguments)
        return getattr(self.mpi, name)(*arguments)

    return method


for _name in (*OPERATIONS, *OTHERS):
    if hasattr(Backend, _name):
        setattr(BackendOverMPI, _name, _left_to_mpi(_name))
