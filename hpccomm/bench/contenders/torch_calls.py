"""torch.distributed over gloo, hpccomm or NCCL, on tensors that share the arrays' memory."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ...cuda import seam
from .. import gpu
from ..registry import Arrays, Case
from .contender import Call, Unsupported
from .torch_model import TorchModel

if TYPE_CHECKING:
    from mpi4py import MPI

OLD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


class TorchDistributed(TorchModel):
    """The functions of torch.distributed, with a process group whose address MPI broadcasts."""

    backend: str  # the backend's name in torch.distributed
    ops: tuple[str, ...]
    _group: Any = None
    refusals = (*TorchModel.refusals, RuntimeError)

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.library = torch, dist
        if dist.is_initialized():  # another contender did it
            self._group = dist.new_group(backend=self.backend)
        else:
            self._init_process_group()

    def _init_process_group(self) -> None:
        import socket

        dist, group, comm = self.library, self.group, self.comm
        host = "127.0.0.1" if hc.get_node_count(group) == 1 else comm.bcast(socket.gethostname())
        first = group.rank == 0
        port = 0 if first else comm.bcast(None)
        store = dist.TCPStore(host, port, group.size, is_master=first, wait_for_workers=False)
        if first:
            comm.bcast(store.port)
        dist.init_process_group(self.backend, store=store, rank=group.rank, world_size=group.size)

    def close(self) -> None:
        if self.library.is_initialized():
            self.library.destroy_process_group(self._group)

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        if case.ranks == 1:
            raise Unsupported("torch does not send to the same rank")
        return super().sendrecv(case, arrays, async_op)

    def _function(self, name: str) -> Any:
        function = getattr(self.library, name, None) or getattr(self.library, OLD_NAMES.get(name, name), None)
        if function is None:
            raise Unsupported(f"torch has no {name}")
        return function

    def _array(self, array: Any) -> Any:
        flat = array.reshape(-1)
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(flat.view("i2")).view(self.torch.bfloat16)
        try:
            return self.torch.from_numpy(flat)
        except TypeError as error:
            raise Unsupported(f"torch has no {array.dtype}") from error

    def _op(self, case: Case) -> Any:
        if case.op not in self.ops:
            raise Unsupported(f"{self.backend} has no {case.op}")
        return super()._op(case)


class TorchGloo(TorchDistributed):
    """torch.distributed over gloo."""

    name = "torch-gloo"
    backend = "gloo"
    ops = ("sum", "product", "min", "max", "band", "bor", "bxor")

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        if hc.get_node_count(group) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        super().__init__(group, comm)

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "not installed (pip install torch)"
        dist = importlib.import_module("torch.distributed")
        return None if dist.is_available() and dist.is_gloo_available() else "torch was built without gloo"


class TorchHPCComm(TorchDistributed):
    """torch.distributed over hpccomm; it shows the time that `hpccomm.torch` adds."""

    name = "torch-hpccomm"
    backend = "hpccomm"
    ops = (*TorchGloo.ops, "avg")

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        if list(group.ranks) != list(range(hc.get_world_size())):
            raise Unsupported("torch's world is that of MPI")
        from ...torch import register

        register()
        super().__init__(group, comm)

    @classmethod
    def missing(cls) -> str | None:
        from ...torch import is_available

        if is_available():
            return None
        return "no PyTorch 2.14 or newer (pip install 'hpccomm[torch]')"


class TorchNCCL(TorchDistributed):
    """torch.distributed over NCCL, on the same stream."""

    name = "torch"
    backend = "nccl"
    ops = ("sum", "avg", "product", "min", "max")

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        cuda = importlib.import_module("torch.cuda")
        cuda.set_device(seam.runtime().current_device())
        cuda.set_stream(cuda.ExternalStream(gpu.current_stream()))
        super().__init__(group, comm)
        try:
            self.library.barrier()  # connects
        except RuntimeError as error:  # two ranks have the same GPU
            raise Unsupported(str(error)) from error

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "not installed (pip install torch)"
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
        if not dist.is_available() or not dist.is_nccl_available():
            return "torch was built without NCCL"
        return None if torch.cuda.is_available() else "torch sees no GPU"

    def _array(self, array: Any) -> Any:
        try:
            return self.torch.from_dlpack(array.reshape(-1))
        except (RuntimeError, BufferError) as error:
            raise Unsupported(f"torch does not take {array.dtype}: {error}") from error
