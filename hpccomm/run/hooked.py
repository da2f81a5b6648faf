"""Hooks on the calls of watched communicators: `hpccomm.debug.register_hook` sees the calls as operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from ..core.hooks import Hook, Operation, RemovableHandle
from ..debug.mpi_calls import CALLS, STARTS
from .communicators import describe

if TYPE_CHECKING:
    from ..debug.records import Record


class MPICall(Operation):
    """A call of mpi4py as hooks see it: its group is the communicator, its arguments have mpi4py's names."""

    record: Record
    own_rank: int  # in MPI.COMM_WORLD, read before the call, which may free the communicator

    @property
    def described(self) -> str:
        """The call, its number, communicator, size and datatype."""
        return str(self.record)

    @property
    def rank(self) -> int:
        """This process's rank in MPI.COMM_WORLD."""
        return self.own_rank

    @property
    def op(self) -> Any:
        """The name of the reduction."""
        return self.record.op or None

    @property
    def peer(self) -> int | None:
        """The root, the destination or the source; None without one, and for MPI.ANY_SOURCE."""
        return self.record.peer


class HookedCalls:
    """The hooks on this process's watched communicators."""

    def __init__(self) -> None:
        self._hooks: dict[object, Hook] = {}

    def register(self, hook: Hook) -> RemovableHandle:
        """Call the hook at the beginning and the end of each call from now on."""
        key = object()
        self._hooks[key] = hook
        return RemovableHandle(lambda: self._hooks.__delitem__(key))

    def hooking(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return mpi4py's method with the hooks around it; the call has been counted before."""
        if name.endswith("_init") and CALLS[name].is_a_message:  # a persistent message begins with Start
            return call

        def hooked(comm: Any, *arguments: Any) -> Any:
            if not self._hooks:
                return call(comm, *arguments)
            seen = comm._seen
            record, bound = describe(seen, name, arguments, "")
            hooks = list(self._hooks.values())
            operation = MPICall(comm, name, record.number, "cpu", name in STARTS, dict(bound), hooks)
            operation.record, operation.own_rank = record, int(seen.ranks[comm.rank])
            operation.begin()
            try:
                operation.outcome = call(comm, *arguments)
            except BaseException as error:
                operation.end(error)
                raise
            operation.end()
            return operation.outcome

        return update_wrapper(hooked, call)
