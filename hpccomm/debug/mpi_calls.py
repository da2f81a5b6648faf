"""The MPI calls that ranks make together, by their mpi4py names, each with the hpccomm operation that it is like."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.operation_list import OPERATIONS, START, TASK, OperationSpec

LIKE = {  # blocking forms; the names of the other forms are derived from them
    "barrier": "Barrier",
    "broadcast": "Bcast",
    "gather": "Gather Gatherv",
    "scatter": "Scatter Scatterv",
    "all_gather": "Allgather Allgatherv",
    "all_to_all": "Alltoall Alltoallv Alltoallw",
    "reduce": "Reduce",
    "all_reduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter Reduce_scatter_block",
    "scan": "Scan",
    "exscan": "Exscan",
    "": "Neighbor_allgather Neighbor_allgatherv Neighbor_alltoall Neighbor_alltoallv Neighbor_alltoallw",
}
LIKE_OF_OBJECTS = {
    "barrier": "barrier",
    "broadcast": "bcast",
    "gather": "gather",
    "scatter": "scatter",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "reduce": "reduce",
    "all_reduce": "allreduce",
    "scan": "scan",
    "exscan": "exscan",
    "": "neighbor_allgather neighbor_alltoall",
    "send": "send ssend bsend",
    "recv": "recv probe mprobe",
    "sendrecv": "sendrecv",
}
MESSAGES = {
    "send": "Send Ssend Bsend Rsend",
    "recv": "Recv Probe Mprobe",
    "sendrecv": "Sendrecv Sendrecv_replace",
}
STARTED_MESSAGES = {
    "send": "Isend Issend Ibsend Irsend isend issend ibsend",
    "recv": "Irecv irecv",
    "sendrecv": "Isendrecv Isendrecv_replace",
}
POLLS = ("Iprobe", "Improbe", "iprobe", "improbe")  # no other rank takes part in these
PERSISTENT_MESSAGES = {
    "send": "Send_init Ssend_init Bsend_init Rsend_init Psend_init",
    "recv": "Recv_init Precv_init",
}
MAKING = {  # these return a communicator
    *("Dup", "Dup_with_info", "Clone", "Split", "Split_type", "Create", "Create_cart", "Create_graph"),
    *("Create_dist_graph", "Create_dist_graph_adjacent", "Create_intercomm", "Merge", "Sub", "Spawn"),
    *("Spawn_multiple", "Accept", "Connect", "Shrink"),
}
DUPLICATING = {"Idup", "Idup_with_info"}  # these return a communicator and a request
FREEING = {"Free", "Disconnect"}
OTHERS = {*FREEING, "Agree"}

_NONE_OF_OURS = OperationSpec("", ())


def _started(name: str) -> str:
    return "I" + name[0].lower() + name[1:]


def _calls() -> Iterator[tuple[str, OperationSpec]]:
    for operation, names in LIKE.items():
        for name in names.split():
            for form in (name, _started(name), f"{name}_init"):
                yield form, OPERATIONS.get(operation, _NONE_OF_OURS)
    for table in (LIKE_OF_OBJECTS, MESSAGES, STARTED_MESSAGES, PERSISTENT_MESSAGES):
        for operation, names in table.items():
            for name in names.split():
                yield name, OPERATIONS.get(operation, _NONE_OF_OURS)
    for name in (*MAKING, *DUPLICATING, *OTHERS):
        yield name, _NONE_OF_OURS


CALLS: dict[str, OperationSpec] = dict(_calls())
STARTS = {  # these return a request
    *(_started(name) for names in LIKE.values() for name in names.split()),
    *(name for names in STARTED_MESSAGES.values() for name in names.split()),
}


def spec_of(name: str) -> OperationSpec | None:
    """Return the spec of an hpccomm operation, or of the one that an MPI call is like; None for other names."""
    if name == TASK.name:
        return TASK
    if name in POLLS:
        return OPERATIONS["recv"]
    return OPERATIONS.get(name.removesuffix(START)) or CALLS.get(name)
