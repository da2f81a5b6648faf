"""mpi4py's calls as operations of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from ..core.group import ProcessGroup
from ..core.late import GPU_RUNTIME, late
from ..errors import UnsupportedOperationError, on_rank
from ..mpi.datatypes import OPS
from ..native import fastpath
from .buffers import device_of_buffers, flat, is_in_place, parts, together, whole


class Step(NamedTuple):
    """An operation of a group: its method's name, its arguments, and the received array for a `Status`."""

    operation: str  # "": nothing to do, because the peer is MPI.PROC_NULL
    arguments: tuple[Any, ...] = ()
    received: Any = None
    tag: int = 0
    status: MPI.Status | None = None


Route: TypeAlias = Callable[..., Step]
ROUTES: dict[str, Route] = {}


def _route(name: str) -> Callable[[Route], Route]:
    """Register a function as the route of mpi4py's call `name`; it takes mpi4py's arguments."""

    def take(function: Route) -> Route:
        ROUTES[name] = function
        return function

    return take


# -- one array, reduced or copied -------------------------------------------------------------------


@_route("Bcast")
def _bcast(group: ProcessGroup, buf: Any, root: int = 0, info: Any = None) -> Step:
    return Step("broadcast", (whole("Bcast: buf", buf)[1], root))


@_route("Allreduce")
def _allreduce(group: ProcessGroup, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: Any = None) -> Step:
    return Step("all_reduce", (_in_place("Allreduce", sendbuf, recvbuf), op))


@_route("Reduce")
def _reduce(
    group: ProcessGroup, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, info: Any = None
) -> Step:
    is_root = group.rank == root
    array = _in_place("Reduce", sendbuf, recvbuf) if is_root else whole("Reduce: sendbuf", sendbuf)[1]
    return Step("reduce", (array, root, op))


@_route("Scan")
def _scan(group: ProcessGroup, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: Any = None) -> Step:
    return Step("scan", (_in_place("Scan", sendbuf, recvbuf), op))


@_route("Exscan")
def _exscan(group: ProcessGroup, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: Any = None) -> Step:
    if group.rank == 0 and not is_in_place(sendbuf):  # rank 0's output does not change
        array = whole("Exscan: sendbuf", sendbuf)[1]
        return Step("exscan", (array if getattr(array.flags, "writeable", True) else array.copy(), op))
    return Step("exscan", (_in_place("Exscan", sendbuf, recvbuf), op))


# -- one array from or to each rank -----------------------------------------------------------------


@_route("Allgather")
def _allgather(group: ProcessGroup, sendbuf: Any, recvbuf: Any, info: Any = None) -> Step:
    output = together("Allgather: recvbuf", recvbuf, group.size)
    own, count = group.rank, output.size // group.size
    return Step("all_gather_single", (output, _sent("Allgather", sendbuf, output[own * count : (own + 1) * count])))


@_route("Allgatherv")
def _allgatherv(group: ProcessGroup, sendbuf: Any, recvbuf: Any, info: Any = None) -> Step:
    outputs = parts("Allgatherv: recvbuf", recvbuf, group.size, takes_lists=True)
    return Step("all_gather", (outputs, _sent("Allgatherv", sendbuf, outputs[group.rank])))


def _gathers(name: str, takes_lists: bool) -> Route:
    def gathers(group: ProcessGroup, sendbuf: Any, recvbuf: Any, root: int = 0, info: Any = None) -> Step:
        if group.rank != root:
            return Step("gather", (whole(f"{name}: sendbuf", sendbuf)[1], None, root))
        outputs = parts(f"{name}: recvbuf", recvbuf, group.size, takes_lists)
        return Step("gather", (_sent(name, sendbuf, outputs[root]), outputs, root))

    return gathers


def _scatters(name: str, takes_lists: bool) -> Route:
    def scatters(group: ProcessGroup, sendbuf: Any, recvbuf: Any, root: int = 0, info: Any = None) -> Step:
        if group.rank != root:
            return Step("scatter", (whole(f"{name}: recvbuf", recvbuf)[1], None, root))
        inputs = parts(f"{name}: sendbuf", sendbuf, group.size, takes_lists)
        output = inputs[root] if is_in_place(recvbuf) else whole(f"{name}: recvbuf", recvbuf)[1]
        return Step("scatter", (output, inputs, root))

    return scatters


ROUTES["Gather"], ROUTES["Gatherv"] = _gathers("Gather", False), _gathers("Gatherv", True)
ROUTES["Scatter"], ROUTES["Scatterv"] = _scatters("Scatter", False), _scatters("Scatterv", True)


@_route("Alltoall")
def _alltoall(group: ProcessGroup, sendbuf: Any, recvbuf: Any, info: Any = None) -> Step:
    output = together("Alltoall: recvbuf", recvbuf, group.size)
    sent = copy_of(output) if is_in_place(sendbuf) else together("Alltoall: sendbuf", sendbuf, group.size)
    return Step("all_to_all_single", (output, sent))


@_route("Alltoallv")
def _alltoallv(group: ProcessGroup, sendbuf: Any, recvbuf: Any, info: Any = None) -> Step:
    outputs = parts("Alltoallv: recvbuf", recvbuf, group.size, takes_lists=True)
    in_place = is_in_place(sendbuf)
    sent = list(map(copy_of, outputs)) if in_place else parts("Alltoallv: sendbuf", sendbuf, group.size, True)
    return Step("all_to_all", (outputs, sent))


@_route("Reduce_scatter_block")
def _reduce_scatter_block(
    group: ProcessGroup, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: Any = None
) -> Step:
    name = "Reduce_scatter_block"
    if is_in_place(sendbuf):
        sent = together(f"{name}: recvbuf", recvbuf, group.size)
        return Step("reduce_scatter_single", (sent[: sent.size // group.size], sent, op))
    sent, output = together(f"{name}: sendbuf", sendbuf, group.size), whole(f"{name}: recvbuf", recvbuf)[1]
    return Step("reduce_scatter_single", (output, sent, op))


@_route("Reduce_scatter")
def _reduce_scatter(
    group: ProcessGroup, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, info: Any = None
) -> Step:
    name = "Reduce_scatter"
    output = flat(f"{name}: recvbuf", whole(f"{name}: recvbuf", recvbuf)[1])
    if recvcounts is None:
        recvcounts = [0] * group.size
        group.all_gather_object(recvcounts, output.size)
    sent = output if is_in_place(sendbuf) else whole(f"{name}: sendbuf", sendbuf)[1]
    inputs = parts(f"{name}: sendbuf", [sent, list(recvcounts)], group.size, takes_lists=True)
    return Step("reduce_scatter", (output[: inputs[group.rank].size], inputs, op))


# -- messages ----------------------------------------------------------------------------------------


@_route("Send")
def _send(group: ProcessGroup, buf: Any, dest: int, tag: int = 0) -> Step:
    if dest == MPI.PROC_NULL:
        return Step("")
    return Step("send", (whole("Send: buf", buf)[1], dest, tag))


@_route("Recv")
def _recv(
    group: ProcessGroup,
    buf: Any,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    status: MPI.Status | None = None,
) -> Step:
    if source == MPI.PROC_NULL:
        return Step("", status=status)
    array = whole("Recv: buf", buf)[1]
    return Step("recv", (array, _source(source), _tag(tag)), array, _tag(tag), status)


@_route("Sendrecv")
def _sendrecv(
    group: ProcessGroup,
    sendbuf: Any,
    dest: int,
    sendtag: int = 0,
    recvbuf: Any = None,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
    status: MPI.Status | None = None,
) -> Step:
    if dest == MPI.PROC_NULL:
        return _recv(group, recvbuf, source, recvtag, status)
    sent = whole("Sendrecv: sendbuf", sendbuf)[1]
    if source == MPI.PROC_NULL:
        return Step("send", (sent, dest, sendtag), status=status)
    output, tag = whole("Sendrecv: recvbuf", recvbuf)[1], _tag(recvtag)
    return Step("sendrecv", (sent, dest, output, _source(source), sendtag, tag), output, tag, status)


@_route("Sendrecv_replace")
def _sendrecv_replace(
    group: ProcessGroup,
    buf: Any,
    dest: int,
    sendtag: int = 0,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
    status: MPI.Status | None = None,
) -> Step:
    sent = buf if dest == MPI.PROC_NULL else copy_of(whole("Sendrecv_replace: buf", buf)[1])
    return _sendrecv(group, sent, dest, sendtag, buf, source, recvtag, status)


def _source(source: int) -> int | None:
    return None if source == MPI.ANY_SOURCE else source


def _tag(tag: int) -> int:
    return 0 if tag == MPI.ANY_TAG else tag


# -- refused calls -------------------------------------------------------------------------------

INSTEAD = {
    **dict.fromkeys(("Ssend", "Bsend", "Rsend", "Issend", "Ibsend", "Irsend", "Psend_init"), "Send, or Isend"),
    **dict.fromkeys(("Ssend_init", "Bsend_init", "Rsend_init"), "Send_init"),
    "Precv_init": "Irecv",
    **dict.fromkeys(("Alltoallw", "Ialltoallw", "Alltoallw_init"), "Alltoallv, or messages"),
    **dict.fromkeys(
        (
            f"{before}{name}{after}"
            for name in ("eighbor_allgather", "eighbor_allgatherv", "eighbor_alltoall", "eighbor_alltoallv")
            for before, after in (("N", ""), ("In", ""), ("N", "_init"))
        ),
        "Isend and Irecv with the neighbours",
    ),
}


def refuse(name: str, device: str) -> None:
    """Raise unless the MPI library accepts GPU arrays."""
    from ..job.cuda_aware import cuda_awareness

    if not cuda_awareness().is_proven:
        raise UnsupportedOperationError(
            f"{name}: this call goes to MPI, which is not known to take arrays of {device}; use "
            f"{INSTEAD[name]}{on_rank()}"
        )


# -- host arrays that hpccomm reduces faster ------------------------------------------------------------

REDUCTIONS = {"Allreduce", "Reduce", "Reduce_scatter_block", "Scan", "Exscan"}
SMALLEST = 128 << 10  # bytes: for smaller arrays, Python's overhead outweighs the gain (benchmarks/accelerate.py)


def is_accelerated(name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *_: Any, **named: Any) -> bool:
    """Return True if hpccomm does a reduction of host arrays.

    All ranks decide alike: MPI requires the same count, datatype and op on all ranks if the op is predefined
    (MPI-4.1 §6.9).
    """
    if not any(op is each or op == each for each in OPS.values()):
        return False
    message = recvbuf if is_in_place(sendbuf) else sendbuf
    if device_of_buffers([message]) != "cpu":
        return False
    try:
        array = whole(f"{name}: sendbuf", message)[1]
    except (TypeError, ValueError):  # mpi4py handles or refuses it
        return False
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iufc" or not array.dtype.isnative:
        return False
    return bool(array.nbytes >= SMALLEST) or bool(array.dtype == np.float16)  # float16, which MPI lacks


# -- arrays ------------------------------------------------------------------------------------------


def _in_place(name: str, sendbuf: Any, recvbuf: Any) -> Any:
    """Copy the input to the output, and return the output, which is reduced in place."""
    device, output = whole(f"{name}: recvbuf", recvbuf)
    if is_in_place(sendbuf):
        return output
    of, array = whole(f"{name}: sendbuf", sendbuf)
    if (of, array.dtype, array.size) != (device, output.dtype, output.size):
        raise ValueError(
            f"{name}: sendbuf has {array.size} {array.dtype} on {of}, and recvbuf {output.size} {output.dtype} on "
            f"{device}; expected the same{on_rank()}"
        )
    if not (output.flags.c_contiguous and array.flags.c_contiguous):  # which mpi4py refuses: by index, not by address
        output, array = whole(f"{name}: recvbuf", recvbuf, False)[1], whole(f"{name}: sendbuf", sendbuf, False)[1]
    copy(output, array)
    return output


def _sent(name: str, sendbuf: Any, in_place: Any) -> Any:
    return in_place if is_in_place(sendbuf) else whole(f"{name}: sendbuf", sendbuf)[1]


copy_on_host: Callable[[Any, Any], None] = np.copyto if fastpath is None else fastpath.copy


def copy(target: Any, source: Any) -> None:
    """Copy an array's values to another array, on its device's current stream."""
    if isinstance(target, np.ndarray):
        copy_on_host(target, source.reshape(target.shape))
        return
    runtime = late(GPU_RUNTIME)()
    runtime.copy(target, source, runtime.current_stream(target.device.id))


def copy_of(array: Any) -> Any:
    """Return a contiguous copy of an array."""
    if isinstance(array, np.ndarray):
        return array.copy()
    runtime, device = late(GPU_RUNTIME)(), array.device.id
    made = runtime.empty(array.shape, array.dtype, device, runtime.current_stream(device))
    copy(made, array)
    return made
