"""hpccomm's names for mpi4py's and c10d's, as the end of an AttributeError for programs that use their names."""

from __future__ import annotations

from typing import NoReturn

# By mpi4py's name in lower case: `Bcast` takes arrays, `bcast` objects.
OF_ARRAYS = {
    **{"bcast": "broadcast(array, src)", "allreduce": "all_reduce(array, op)", "reduce": "reduce(array, dst, op)"},
    **dict.fromkeys(("allgather", "allgatherv"), "all_gather(output_list, array) or all_gather_single(output, input)"),
    **dict.fromkeys(("gather", "gatherv"), "gather(array, gather_list, dst)"),
    **dict.fromkeys(("scatter", "scatterv"), "scatter(output, scatter_list, src)"),
    **dict.fromkeys(("alltoall", "alltoallv"), "all_to_all_single(output, input) or all_to_all(outputs, inputs)"),
    "alltoallw": "redistribute(output, input, ...)",
    "reduce_scatter": "reduce_scatter(output, input_list, op)",
    "reduce_scatter_block": "reduce_scatter_single(output, input, op)",
    **{"scan": "scan(array, op)", "exscan": "exscan(array, op)", "barrier": "barrier()"},
    **dict.fromkeys(("send", "bsend", "rsend"), "send(array, dst)"),
    **{"recv": "recv(array, src)", "sendrecv": "sendrecv(send_array, dst, recv_array, src)"},
    **dict.fromkeys(("neighbor_alltoall", "neighbor_alltoallv", "neighbor_alltoallw"), "halo_exchange(array, grid)"),
}
OF_OBJECTS = {
    "bcast": "broadcast_object_list([object], src)",
    "allgather": "all_gather_object(object_list, object)",
    "gather": "gather_object(object, object_list, dst)",
    "scatter": "scatter_object_list(output_list, input_list, src)",
    **dict.fromkeys(("send", "bsend"), "send_object_list([object], dst)"),
    "recv": "recv_object_list(list, src)",
}
OTHERS = {
    **dict.fromkeys(("get_rank", "rank"), "get_rank(), or rank of a group"),
    **dict.fromkeys(("get_size", "size"), "get_world_size(), or size of a group"),
    **dict.fromkeys(("comm_world", "world"), "world, which is there after init_process_group()"),
    **{"split": "split_group(color=color, key=key)", "split_type": "split_group(color=get_node_rank())"},
    **dict.fromkeys(("create_group", "create", "dup", "clone"), "new_group(ranks), or new_group(comm=comm)"),
    **dict.fromkeys(("create_cart", "cart_create"), "new_grid(dims, periodic)"),
    **dict.fromkeys(("free", "disconnect", "finalize"), "destroy_process_group()"),
    **{"init": "init_process_group()", "abort": "abort(status) of a group", "wtime": "time.perf_counter()"},
    **dict.fromkeys(("waitall", "wait_all"), "wait_all(works)"),
    **dict.fromkeys(("waitany", "waitsome"), "wait_any(works)"),
    "wait": "the method wait of a Work",
    **{"in_place": "all_reduce(array): reductions are in place", "any_source": "src=None"},
    **dict.fromkeys(
        ("probe", "iprobe", "mprobe", "improbe", "ssend"), "still mpi4py's, on a duplicate of comm of a group,"
    ),
    **{"isend": "isend(array, dst)", "irecv": "irecv(array, src)"},
    "any_tag": "not possible: a recv names its tag,",
    **{name: f'op "{name}"' for name in ("sum", "prod", "max", "min", "band", "bor", "bxor")},
}
OF_TORCH = {
    **dict.fromkeys(("DebugLevel", "get_debug_level", "set_debug_level"), "the variable HPCCOMM_DEBUG"),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), "gather(array, gather_list, dst)"),
    **{"default_pg_timeout": "timeout of a group", "DeviceMesh": "a Grid, made by init_device_mesh(...),"},
    **{f"ProcessGroup{name}": f"init_process_group('cpu:{name.lower()}')" for name in ("Gloo", "MPI")},
    "ProcessGroupNCCL": "init_process_group('cuda:nccl')",
    **{"reduce_op": "ReduceOp", "_coalescing_manager": "coalescing()", "mesh_dim_names": "names of a Grid"},
    **dict.fromkeys(("get_backend_impl", "get_default_backend_for_device"), "config.device_map of a group"),
    "supports_complex": "true of SUM, AVG, PRODUCT and PREMUL_SUM",
    "set_timeout": "timeout= of init_process_group(), new_group() or wait",
    "get_pg_count": "not needed: destroy_process_group() destroys all groups,",
    "record_comm": "not needed for CUDA graphs",
}


def instead_of(name: str) -> str:
    """Return ``"; mpi4py's Bcast is broadcast(array, src) here"``; "" for other names."""
    if name in OF_TORCH:
        return f"; torch.distributed's {name} is {OF_TORCH[name]} here"
    known = name.lower()
    ours = OTHERS.get(known, "")
    if not ours and known.endswith("_init"):
        ours = _of_operation(known.removesuffix("_init"), name)
        ours = ours and f"{ours.partition('(')[0]}_init(...)"
    if not ours:
        ours = _of_operation(known, name)
    if not ours and known.startswith("i") and (blocking := _of_operation(known[1:], name)):
        ours = f"{blocking} with async_op=True"
    return f"; mpi4py's {name} is {ours} here" if ours else ""


def _of_operation(known: str, name: str) -> str:
    arrays, objects = OF_ARRAYS.get(known, ""), OF_OBJECTS.get(known, "")
    return arrays if name[:1].isupper() or not objects else f"{objects} for objects, {arrays} for arrays"


class Absent:
    """A name of mpi4py's that a class does not have: an attribute that raises AttributeError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        text = f"{owner.__name__!r} object has no attribute {self._name!r}{instead_of(self._name)}"
        raise AttributeError(text, name=self._name, obj=instance)


class MPI4PyNames:
    """The last base class of ProcessGroup, with mpi4py's names; a ``__getattr__`` would slow down all attributes."""


_of_operations = {each for name in OF_ARRAYS for each in (name, f"i{name}", f"{name}_init")}
_of_others = OTHERS.keys() - {"rank", "size"}  # which a group has
for _name in {
    "mesh_dim_names",
    *_of_operations,
    *_of_others,
    *map(str.capitalize, _of_operations | _of_others),
    *map(str.upper, _of_others),
}:
    setattr(MPI4PyNames, _name, Absent(_name))
