"""Persistent operations on MPI's persistent requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem
from threading import get_ident
from typing import Any

import numpy as np
from mpi4py import MPI

from ..core.operation_list import MESSAGES, OPERATIONS
from ..core.persistent_work import PersistentWork, Repeated
from ..core.timeouts import MAIN
from ..core.work import Once, both, repeatable
from ..process.tuning import NEVER
from .backend import MPIBackend
from .layout import Finish, unpack_into
from .reductions import plan, reduction_input
from .works import parts_of, received, wait_for

LARGEST_IN_NODE = 2 << 20  # bytes of the input; larger inputs are as fast in the communication thread


class MPIPersistentWork(PersistentWork):
    """An operation: `prepare` fills the inputs before each start, `finish` unpacks the outputs at the end."""

    def __init__(self, requests: list[MPI.Prequest], prepare: Finish, finish: Finish, *alive: Any) -> None:
        self._requests = requests
        self._one = requests[0] if len(requests) == 1 else None
        self._prepare = prepare
        self._finish = repeatable(finish)
        self._alive = alive

    def begin(self) -> None:
        """Pack, and start every request."""
        if self._prepare is not None:
            self._prepare()
        if isinstance(self._finish, Once):
            self._finish.arm()
        if self._one is not None:
            self._one.Start()
        else:
            MPI.Prequest.Startall(self._requests)

    def block(self) -> None:
        """Wait for every request, and unpack."""
        if self._one is not None and get_ident() == MAIN:
            self._one.Wait()
        else:
            wait_for(self._requests, [MPI.Status() for _ in self._requests])
        if self._finish is not None:
            self._finish()

    def poll(self) -> bool:
        """Test every request; unpack when all are done."""
        # one by one: MPICH 5.0's Testall reports an error for persistent collectives
        if not all(request.Test() for request in self._requests):
            return False
        if self._finish is not None:
            self._finish()
        return True

    def release(self) -> None:
        """Free the requests, and drop the arrays."""
        for request in self._requests:
            request.Free()
        self._requests, self._one, self._alive = [], None, ()
        self._prepare = self._finish = None


class PersistentReceive(MPIPersistentWork):
    """A receive that detects messages that are too short."""

    def begin(self) -> None:
        """Begin like MPIPersistentWork."""
        self._message = MPI.Status()
        super().begin()

    def block(self) -> None:
        """Wait like MPIPersistentWork, and check the message."""
        if self._message.Get_source() == MPI.ANY_SOURCE:  # otherwise this was interrupted after the message had come
            wait_for(self._requests, [self._message])
        received("recv", self._message, self._alive[0], self._finish)

    def poll(self) -> bool:
        """Poll like MPIPersistentWork, and check the message."""
        if self._message.Get_source() == MPI.ANY_SOURCE and not self._requests[0].Test(self._message):
            self._message = MPI.Status()  # MPI leaves it undefined
            return False
        self.block()
        return True


class AtFirst(MPIBackend):
    """A backend whose asynchronous operations hold makers of persistent requests; none uses the thread."""

    def __init__(self, backend: MPIBackend) -> None:
        vars(self).update(vars(backend), comm=Inits(backend.comm), thread_bytes=NEVER)


class Inits:
    """A communicator whose non-blocking functions return makers of persistent requests instead of requests."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Callable[..., Callable[[], MPI.Prequest]]:
        return partial(partial, getattr(self._comm, f"{name[1:].capitalize()}_init"))  # Bcast_init for "Ibcast"


def set_up(
    backend: MPIBackend, operation: str, arguments: tuple[Any, ...], is_part: bool = False, arrays: Any = None
) -> PersistentWork:
    """Return the persistent form of an operation; the arguments are those of MPIBackend's method without async_op.

    The asynchronous form makes the buffers. The operation uses memory of the node if possible. Otherwise it is MPI's
    persistent operation or, if it is large and no part of another one, the asynchronous operation at each start.
    `arrays` are packed into the flat array of an all_reduce before each start, and unpacked at the end.
    """
    named = dict(zip(OPERATIONS[operation].arguments, arguments))
    first = getattr(MPIBackend, operation)(AtFirst(backend), *arguments, True)
    inits, finish, buffers = parts_of(first)
    sent, received = buffers[0], buffers[-1]
    fill = _filling(operation, named, sent, backend.rank)
    op = plan(named["op"], named["array"].dtype).reduces if "op" in named else None
    averages = isinstance(finish, Once) and received.dtype.char in "fd"  # the compiled extension divides it
    in_node: Any = fill, None if averages else finish, None
    if arrays is not None:
        is_direct = in_node == (None, None, None) and all(array.flags.carray for array in arrays)
        pack: Any = partial(np.concatenate, arrays, axis=None, out=named["array"])
        unpack = partial(unpack_into, named["array"], arrays)
        fill = both(both(pack, finish.arm if isinstance(finish, Once) else None), fill)
        in_node = (None, None, arrays) if is_direct else (fill, both(in_node[1], unpack), None)
        finish = both(finish, unpack)
    is_for_mpi = operation in MESSAGES or ("op" in named and op is None)  # an op that only MPI knows
    if not is_for_mpi and (named.get("output_counts") is None or named.get("input_counts") is None):
        if backend.node_persistent is not None:
            root = named.get("root", 0)
            work = backend.node_persistent.set_up(operation, sent, received, op, root, averages, *in_node)
            if work is not None:
                return work
        if not is_part and max(sent.nbytes, received.nbytes) >= backend.thread_bytes:
            return Repeated(partial(getattr(backend, operation), *arguments, async_op=True))
    kind = PersistentReceive if operation == "recv" else MPIPersistentWork
    return kind([init() for init in inits], fill, finish, received, sent)


def _filling(operation: str, named: dict[str, Any], sent: Any, rank: int) -> Finish:
    """Return the function that fills `sent` with the input's values before each start; None: it is the input."""
    is_root = named.get("root", rank) == rank
    inputs = (named[role.name] for role in OPERATIONS[operation].roles if role.is_array and role.is_read(is_root))
    array = next(inputs, sent)
    if array is sent:
        return None
    op = named.get("op")
    return partial(setitem, sent, ..., array) if op is None else partial(reduction_input, array, op, sent)
