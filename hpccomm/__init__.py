"""hpccomm: torch.distributed's model of communication for NumPy and CuPy arrays, on MPI.

>>> import hpccomm as hc
"""

from importlib import import_module
from typing import Any

from .api import collectives
from .api.collectives import *
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
from .core import renamed
from .core.arrays import device_of, register_device
from .core.backend import Backend
from .core.group import ProcessGroup
from .core.late import attributes
from .core.options import BackendOptions
from .core.reduce_op import ReduceOp
from .core.registry import BackendConfig, is_backend_available, register_backend
from .core.work import CompletedWork, Work, WorkStatus
from .errors import (
    CheckpointWarning,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistTimeoutError,
    HpccommDeprecationWarning,
    HpccommWarning,
    NonMemberWarning,
    RankFailedError,
    TooFewSparesError,
    UnsupportedOperationError,
)

__version__ = "0.1.0"

# c10d's other names
all_gather_into_tensor = collectives.all_gather_single
reduce_scatter_tensor = collectives.reduce_scatter_single
group = GroupMember

# These names are imported at their first use, because every rank of a job looks up and reads each imported file.
LATER = {
    name: module
    for module, names in {
        "api.barriers": "barrier monitored_barrier",
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
        "domains.redistribution": "block_slice redistribute redistribute_init",
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
        "api.sparse": "exchange_sparse",
        "store": "FileStore HashStore PrefixStore QueueEmptyError Store TCPStore",
        "api.survivors": "agree replace_failed shrink_group",
        "tasks": "RankExecutor executor",
        "api.values": "all_reduced",
        "api.waiting": "wait_all wait_any",
    }.items()
    for name in names.split()
}

RENAMED = {"all_to_all_sparse": "exchange_sparse", "block": "block_slice"}  # deprecated names

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendOptions",
    "CheckpointWarning",
    "CompletedWork",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "GroupMember",
    "HpccommDeprecationWarning",
    "HpccommWarning",
    "NonMemberWarning",
    "ProcessGroup",
    "RankFailedError",
    "ReduceOp",
    "TooFewSparesError",
    "UnsupportedOperationError",
    "Work",
    "WorkStatus",
    "all_gather_into_tensor",
    "destroy_process_group",
    "device_of",
    "group",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "reduce_scatter_tensor",
    "register_backend",
    "register_device",
    *collectives.__all__,
    *LATER,
]


def __dir__() -> list[str]:
    """Return the public names for completion; of the submodules, only ``checkpoint`` and ``debug``."""
    return [*__all__, "checkpoint", "debug", "__version__"] + ["world"] * is_initialized()


_later = attributes(__name__, LATER)


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name in ("checkpoint", "debug"):
        return import_module(f"{__name__}.{name}")
    if name == "world" and is_initialized():
        return GroupMember.WORLD
    if name in RENAMED:
        renamed.warn(f"{__name__}.{name}", name := RENAMED[name])
    if name in LATER:
        return _later(name)
    from .core.mpi4py_names import instead_of

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead_of(name)}", name=name)
