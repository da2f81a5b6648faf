"""The stand-in's MPI: a communicator that takes GPU arrays, and checks the reads and writes of its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from .stand_in_gpu import MACHINE, on_gpu


class CudaAwareComm:
    """An MPI communicator that is given memory of the GPU: the host reads and writes it, and knows no streams."""

    # the buffers that are read and those that are written, as places among the arguments
    USES = {
        "Allreduce": ((), (1,)),
        "Allgather": ((0,), (1,)),
        "Send": ((0,), ()),
        "Isend": ((0,), ()),
        "Recv": ((), (0,)),
        "Irecv": ((), (0,)),
    }

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name, getattr(self._comm, name))

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        buffers = [
            (each[0].address, each[0].address + each[0].nbytes) if isinstance(each, list) else None
            for each in arguments
        ]
        if name == "Bcast":
            reads, writes = ((0,), ()) if arguments[1] == self._comm.Get_rank() else ((), (0,))
        elif name == "Reduce":
            reads, writes = ((0,), ()) if arguments[1] is None else ((), (1,))
        else:
            reads, writes = self.USES[name]
        for start, end in (buffers[i] for i in reads):
            assert not any(start < buffers[i][1] and buffers[i][0] < end for i in writes), "MPI's buffers overlap"
        ended = MACHINE.host_uses(f"MPI's {name}", [buffers[i] for i in reads], [buffers[i] for i in writes])
        result = None
        try:
            result = function(*map(_as_mpi_finds_it, arguments))
        finally:
            if not isinstance(result, MPI.Request):
                ended()
        return WatchedRequest(result, ended) if isinstance(result, MPI.Request) else result


def _as_mpi_finds_it(argument: Any) -> Any:
    """Return an argument of MPI's, with the memory of the GPU where the host finds it."""
    if not isinstance(argument, list):
        return argument
    buffer, datatype = argument
    return [on_gpu(buffer.address, buffer.nbytes), datatype]


class WatchedRequest(MPI.Request):
    """A request that says when it has been found complete."""

    def __new__(cls, request: MPI.Request, ended: Callable[[], None]) -> WatchedRequest:
        made = super().__new__(cls, request)
        made.ended = ended
        return made

    def Test(self, status: MPI.Status | None = None) -> bool:
        is_done = True  # also where it fails
        try:
            is_done = super().Test(status)
        finally:
            if is_done:
                self.ended()
        return is_done

    def Wait(self, status: MPI.Status | None = None) -> bool:
        try:
            return super().Wait(status)
        finally:
            self.ended()
