"""torch.distributed over gloo or over hpccomm, on tensors that share the arrays' memory."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ..registry import Arrays, Case
from .contender import Call, Unsupported
from .torch_model import TorchModel

if TYPE_CHECKING:
    from mpi4py import MPI


class TorchDistributed(TorchModel):
    """The functions of torch.distributed, with a process group that MPI helps to start."""

    backend: str  # of torch.distributed
    ops: tuple[str, ...]
    refusals = (*TorchModel.refusals, RuntimeError)

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        super().__init__(group, comm)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.library = torch, dist
        self._group_of_torch: Any = None  # where there is a world group, of another contender's: one beside it
        if dist.is_initialized():
            self._group_of_torch = dist.new_group(backend=self.backend)
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
        """Destroy the process group; with the world's, all are."""
        if self.library.is_initialized():
            self.library.destroy_process_group(self._group_of_torch)

    @property
    def _group(self) -> Any:
        return self._group_of_torch

    def all_gather_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into one."""
        function = getattr(self.library, "all_gather_single", None) or self.library.all_gather_into_tensor
        return partial(function, self._flat(arrays.receive), self._flat(arrays.send), None, async_op)

    def reduce_scatter_single(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """One tensor into one."""
        function = getattr(self.library, "reduce_scatter_single", None) or self.library.reduce_scatter_tensor
        out, tensor = self._flat(arrays.receive), self._flat(arrays.send)
        return partial(function, out, tensor, self._op(case), None, async_op)

    def sendrecv(self, case: Case, arrays: Arrays, async_op: bool) -> Call:
        """Blocking or not, irecv and isend: torch has no sendrecv."""
        if case.ranks == 1:
            raise Unsupported("torch does not send to the same rank")
        return super().sendrecv(case, arrays, async_op)

    def _array(self, array: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view("i2")).view(self.torch.bfloat16)
        try:
            return self.torch.from_numpy(array)
        except TypeError as error:
            raise Unsupported(f"torch has no {array.dtype}") from error

    def _flat(self, array: Any) -> Any:
        return self._array(array.reshape(-1))

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
        """Torch is no requirement of hpccomm's."""
        if importlib.util.find_spec("torch") is None:
            return "not installed (pip install torch)"
        dist = importlib.import_module("torch.distributed")
        return None if dist.is_available() and dist.is_gloo_available() else "torch was built without gloo"


class TorchHPCComm(TorchDistributed):
    """torch.distributed over hpccomm: what `hpccomm.torch` adds to hpccomm."""

    name = "torch-hpccomm"
    backend = "hpccomm"
    ops = (*TorchGloo.ops, "avg")

    def __init__(self, group: hc.ProcessGroup, comm: MPI.Intracomm) -> None:
        if list(group.ranks) != list(range(hc.get_world_size())):
            raise Unsupported("torch's world is that of MPI")
        importlib.import_module("hpccomm.torch").register()
        super().__init__(group, comm)

    @classmethod
    def missing(cls) -> str | None:
        """It takes a torch that is new enough."""
        if importlib.import_module("hpccomm.torch").is_available():
            return None
        return "no PyTorch 2.14 or newer (pip install 'hpccomm[torch]')"
