"""hpccomm: torch.distributed's model of communication for NumPy and CuPy arrays, on MPI.

>>> import hpccomm as hc
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api.collectives import monitored_barrier
from .api.world import (
    GroupMember,
    destroy_process_group,
    init_process_group,
    is_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
)
from .core.arrays import device_of, register_device
from .core.backend import Backend
from .core.group import ProcessGroup
from .core.late import attributes
from .core.options import BackendOptions
from .core.reduce_op import ReduceOp
from .core.registry import BackendConfig, is_backend_available, register_backend
from .core.work import CompletedWork, Work, WorkStatus
from .errors import (
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistTimeoutError,
    RankFailedError,
    TooFewSparesError,
    UnsupportedOperationError,
)

if TYPE_CHECKING:
    from . import checkpoint
    from .api.blocks import coalescing
    from .api.buckets import GradientBuckets
    from .api.groups import new_group, new_subgroups, new_subgroups_by_enumeration, split_group
    from .api.persistent import (
        all_gather_single_init,
        all_reduce_coalesced_init,
        all_reduce_init,
        all_to_all_single_init,
        broadcast_init,
        recv_init,
        reduce_scatter_single_init,
        send_init,
    )
    from .api.point_to_point import P2POp, batch_isend_irecv
    from .api.ranks import (
        get_backend,
        get_backend_config,
        get_global_rank,
        get_group_rank,
        get_local_rank,
        get_local_size,
        get_node_count,
        get_node_local_rank,
        get_node_rank,
        get_process_group_ranks,
        get_rank,
        get_world_size,
    )
    from .api.shared import empty_shared, empty_symmetric, fence, peer_view
    from .api.signatures import (
        all_gather,
        all_gather_coalesced,
        all_gather_object,
        all_gather_single,
        all_gather_single_coalesced,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        broadcast_coalesced,
        broadcast_object_list,
        exscan,
        gather,
        gather_object,
        halo_accumulate,
        halo_exchange,
        irecv,
        isend,
        recv,
        recv_object_list,
        redistribute,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_single_coalesced,
        scan,
        scatter,
        scatter_object_list,
        send,
        send_object_list,
        sendrecv,
    )
    from .api.sparse import all_to_all_sparse
    from .api.survivors import agree, replace_failed, shrink_group
    from .api.values import all_reduced
    from .api.waiting import wait_all, wait_any
    from .core.future import Future, collect_all
    from .core.hooks import Hook, Operation, RemovableHandle
    from .core.non_member import NonMember
    from .core.persistent_work import PersistentWork
    from .domains.grids import Grid, init_device_mesh, new_grid
    from .domains.halos import halo_accumulate_init, halo_exchange_init
    from .domains.redistribution import block, redistribute_init
    from .exact.reproducible import reproducible_dot, reproducible_norm, reproducible_sum
    from .mpi.over_mpi import BackendOverMPI
    from .store import FileStore, HashStore, PrefixStore, QueueEmptyError, Store, TCPStore
    from .tasks import RankExecutor, executor

    world: ProcessGroup  # the world's group, after init_process_group
else:
    from .api.collectives import (
        all_gather,
        all_gather_single,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        exscan,
        gather,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        scan,
        scatter,
    )

__version__ = "0.1.0"

# c10d's other names
all_gather_into_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single
group = GroupMember

# These names are imported at their first use, because every rank of a job looks up and reads each imported file.
LATER = {
    name: module
    for module, names in {
        "api.blocks": "coalescing",
        "api.buckets": "GradientBuckets",
        "api.coalesced": "all_gather_coalesced all_gather_single_coalesced all_reduce_coalesced broadcast_coalesced "
        "reduce_scatter_single_coalesced",
        "core.future": "Future collect_all",
        "core.hooks": "Hook Operation RemovableHandle",
        "core.non_member": "NonMember",
        "core.persistent_work": "PersistentWork",
        "domains.grids": "Grid init_device_mesh new_grid",
        "api.groups": "new_group new_subgroups new_subgroups_by_enumeration split_group",
        "domains.halos": "halo_accumulate halo_accumulate_init halo_exchange halo_exchange_init",
        "domains.redistribution": "block redistribute redistribute_init",
        "mpi.over_mpi": "BackendOverMPI",
        "api.objects": "all_gather_object broadcast_object_list gather_object recv_object_list "
        "scatter_object_list send_object_list",
        "api.persistent": "all_gather_single_init all_reduce_coalesced_init all_reduce_init "
        "all_to_all_single_init broadcast_init recv_init reduce_scatter_single_init send_init",
        "api.point_to_point": "P2POp batch_isend_irecv irecv isend recv send sendrecv",
        "api.ranks": "get_backend get_backend_config get_global_rank get_group_rank get_local_rank "
        "get_local_size get_node_count get_node_local_rank get_node_rank "
        "get_process_group_ranks get_rank get_world_size",
        "exact.reproducible": "reproducible_dot reproducible_norm reproducible_sum",
        "api.shared": "empty_shared empty_symmetric fence peer_view",
        "api.sparse": "all_to_all_sparse",
        "store": "FileStore HashStore PrefixStore QueueEmptyError Store TCPStore",
        "api.survivors": "agree replace_failed shrink_group",
        "tasks": "RankExecutor executor",
        "api.values": "all_reduced",
        "api.waiting": "wait_all wait_any",
    }.items()
    for name in names.split()
}

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendOptions",
    "BackendOverMPI",
    "CompletedWork",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "FileStore",
    "Future",
    "GradientBuckets",
    "Grid",
    "GroupMember",
    "HashStore",
    "Hook",
    "NonMember",
    "Operation",
    "P2POp",
    "PersistentWork",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "RankExecutor",
    "RankFailedError",
    "ReduceOp",
    "RemovableHandle",
    "Store",
    "TCPStore",
    "TooFewSparesError",
    "UnsupportedOperationError",
    "Work",
    "WorkStatus",
    "agree",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_gather_single_init",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_coalesced_init",
    "all_reduce_init",
    "all_reduced",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single_init",
    "all_to_all_sparse",
    "barrier",
    "batch_isend_irecv",
    "block",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_init",
    "broadcast_object_list",
    "coalescing",
    "collect_all",
    "destroy_process_group",
    "device_of",
    "empty_shared",
    "empty_symmetric",
    "executor",
    "exscan",
    "fence",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_node_count",
    "get_node_local_rank",
    "get_node_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "halo_accumulate",
    "halo_accumulate_init",
    "halo_exchange",
    "halo_exchange_init",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "isend",
    "monitored_barrier",
    "new_grid",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "peer_view",
    "recv",
    "recv_init",
    "recv_object_list",
    "redistribute",
    "redistribute_init",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_single_init",
    "reduce_scatter_tensor",
    "register_backend",
    "register_device",
    "replace_failed",
    "reproducible_dot",
    "reproducible_norm",
    "reproducible_sum",
    "scan",
    "scatter",
    "scatter_object_list",
    "send",
    "send_init",
    "send_object_list",
    "sendrecv",
    "shrink_group",
    "split_group",
    "wait_all",
    "wait_any",
]


def __dir__() -> list[str]:
    """Return the public names for completion; of the submodules, only ``checkpoint`` and ``debug``."""
    return [*__all__, "checkpoint", "debug", "__version__"] + ["world"] * is_initialized()


if not TYPE_CHECKING:
    _later = attributes(__name__, LATER)

    def __getattr__(name: str) -> Any:
        """Import a name at its first use."""
        if name in ("checkpoint", "debug"):
            return import_module(f"{__name__}.{name}")
        if name == "world" and is_initialized():
            return GroupMember.WORLD
        if name in LATER:
            return _later(name)
        from .core.mpi4py_names import instead_of

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead_of(name)}", name=name)
