"""``hpccomm run --accelerate``: hpccomm does large reductions of host arrays on watched communicators."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import numpy as np

from ..core.group import ProcessGroup
from ..debug.mpi_calls import FREEING
from ..mpi4py.calls import REDUCTIONS, ROUTES, SMALLEST, is_accelerated
from .communicators import Seen, plain


class AcceleratedCalls:
    """The groups of watched communicators; each is created by its first large reduction, which is collective."""

    def __init__(self, parent: ProcessGroup) -> None:
        self._parent = parent  # their time limit is this group's
        self._of: weakref.WeakKeyDictionary[Seen, ProcessGroup] = weakref.WeakKeyDictionary()

    def accelerating(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return mpi4py's method, wrapped so that hpccomm does large reductions."""
        if name in FREEING:
            return self._freeing(call)
        if name not in REDUCTIONS:
            return call
        route = ROUTES[name]

        def accelerated(comm: Any, *arguments: Any) -> Any:
            if (
                (arguments and _is_small(arguments[0]))
                or not is_accelerated(name, *arguments)
                or comm.Is_inter()
                or comm.Get_size() == 1
            ):
                return call(comm, *arguments)
            group = self._of.get(comm._seen)
            if group is None:
                seen = comm._seen
                self._of[seen] = group = ProcessGroup.from_comm(
                    plain(comm), name=seen.name, timeout=self._parent.timeout
                )
                group.on_timeout = self._parent.on_timeout
            step = route(group, *arguments)
            getattr(group, step.operation)(*step.arguments)
            return None

        return update_wrapper(accelerated, call)

    def _freeing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def freeing(comm: Any) -> Any:
            group = self._of.pop(comm._seen, None)
            if group is not None:
                group.destroy()
            return call(comm)

        return update_wrapper(freeing, call)


def _is_small(buffer: Any) -> bool:
    """Return True for an array that MPI reduces as fast; never for float16, which MPI lacks."""
    return type(buffer) is np.ndarray and buffer.nbytes < SMALLEST and buffer.dtype.char != "e"
