"""Reductions of GPU arrays that NCCL lacks: they run on the host.

The choice depends only on the operation, the dtype and the op, which MPI requires to be the same on all ranks of a call
(MPI-4.1 §6.9). So all ranks choose and refuse alike, without communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ..core import generated
from ..core.arrays import locate
from ..core.backends import LazyBackends, created, options_for
from ..core.calls import Call
from ..core.group import ProcessGroup
from ..core.operation_list import OPERATIONS
from ..core.reduce_op import as_reduce_op
from ..core.work import Work
from ..errors import UnsupportedOperationError, on_rank
from .buffers import is_in_place
from .calls import Step

BY_THE_HOST = "cuda:mpi"  # the backend of these reductions in a group with "cuda:nccl"
PREFIXES = ("scan", "exscan")
PAIRS = (MPI.MINLOC, MPI.MAXLOC)


def nccl_lacks(step: Step) -> bool:
    """Return True for a reduction of GPU arrays with an MPI op that NCCL lacks."""
    if not step.operation or not OPERATIONS[step.operation].reduces:
        return False
    array, *_, op = step.arguments
    if type(array) is np.ndarray or not isinstance(op, MPI.Op):
        return False
    if step.operation in PREFIXES:
        return True
    from ..nccl.types import reduced

    try:
        reduced(step.operation, array.dtype, as_reduce_op(step.operation, op))
    except (TypeError, UnsupportedOperationError):
        return True
    return False


def reduce_by_the_host(group: ProcessGroup, step: Step, async_op: bool) -> Work | None:
    """Reduce GPU arrays like a group with ``cuda:mpi``."""
    name, arguments = step.operation, step.arguments
    checked = getattr(generated, name)(group, *arguments)
    backends = group.dispatcher.backends
    if not group.is_destroyed and BY_THE_HOST not in backends:
        cast("LazyBackends", backends).put(BY_THE_HOST, created("mpi", options_for(group, "cuda")))
    return group.dispatcher.run(Call((checked.name, BY_THE_HOST, checked.result, checked.arguments)), async_op)


def is_of_pairs(arguments: tuple[Any, ...]) -> bool:
    """Return True if the arguments contain ``MPI.MINLOC`` or ``MPI.MAXLOC``."""
    return any(isinstance(each, MPI.Op) and each in PAIRS for each in arguments)


def reduce_pairs(call: Callable[..., Any], sendbuf: Any, recvbuf: Any, *arguments: Any, **named: Any) -> None:
    """Run mpi4py's own call on host copies: the pairs have an MPI datatype, but no dtype in CuPy."""
    from ..cuda.packing import from_the_host

    _, given = _on_the_host(sendbuf)
    output, received = _on_the_host(recvbuf)
    call(given, received, *arguments, **named)
    if output is not None:
        from_the_host(output, received[0] if isinstance(received, list) else received)


def refuse_pairs(name: str) -> None:
    """Raise for a non-blocking or persistent reduction of pairs."""
    blocking = name.removesuffix("_init").removeprefix("I").capitalize()
    raise UnsupportedOperationError(
        f"{name}: MPI.MINLOC and MPI.MAXLOC on GPU arrays are there in the blocking form only; call "
        f"{blocking}{on_rank()}"
    )


def _on_the_host(message: Any) -> tuple[Any, Any]:
    """Return a buffer's GPU array (None if it has none), and the buffer with a host copy of the array."""
    from ..cuda.packing import on_the_host

    if is_in_place(message):
        return None, message
    array, *rest = message if isinstance(message, list | tuple) else (message,)
    device, view = locate("MPI.MINLOC", "a buffer", array)
    if device == "cpu":
        return None, message
    host = on_the_host(view)
    return view, [host, *rest] if rest else host
