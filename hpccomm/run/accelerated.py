"""``hpccomm run --accelerate``: large reductions of host arrays on watched communicators are hpccomm's operations."""

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
    """The groups of the watched communicators: each is made by the first large reduction, which all ranks call."""

    def __init__(self, parent: ProcessGroup) -> None:
        self._parent = parent  # whose time limit is theirs
        self._of: weakref.WeakKeyDictionary[Seen, ProcessGroup] = weakref.WeakKeyDictionary()

    def accelerating(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method of mpi4py, or what does large reductions before it."""
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
                self._of[seen] = group = ProcessGroup.on(plain(comm), name=seen.name, timeout=self._parent.timeout)
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
    """Whether a buffer is an array that MPI reduces as fast; float16 it does not take."""
    return type(buffer) is np.ndarray and buffer.nbytes < SMALLEST and buffer.dtype.char != "e"
