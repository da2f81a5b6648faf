"""The provider behind the seam (hpccomm/cuda/seam.py) of the tests on a CPU: a GPU and an NCCL that need no GPU."""

from .stand_in_gpu import MACHINE, MEMORY, OWN, RUBBISH, CUDAError, Graph, Machine, Runtime, as_numpy
from .stand_in_mpi import CudaAwareComm
from .stand_in_nccl import NCCL, TYPES, Communicator, Job, NCCLError, fail, group_end, group_start

__all__ = [
    "MACHINE", "MEMORY", "NCCL", "OWN", "RUBBISH", "TYPES", "CUDAError", "Communicator", "CudaAwareComm", "Graph",
    "Job", "Machine", "NCCLError", "Runtime", "as_numpy", "fail", "group_end", "group_start",
]  # fmt: skip
