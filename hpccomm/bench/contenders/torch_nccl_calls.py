"""torch.distributed over NCCL, on tensors that share the arrays' memory, on the same stream."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import hpccomm as hc

from ...cuda import seam
from .. import gpu
from .contender import Unsupported
from .torch_calls import TorchDistributed

if TYPE_CHECKING:
    from mpi4py import MPI


class TorchNCCL(TorchDistributed):
    """The functions of torch.distributed, with an NCCL process group that MPI helps to start."""

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
