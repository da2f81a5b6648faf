"""Contenders: the same work in different libraries.

A contender has a method for each benchmark that it can run, with the benchmark's name. The method takes the case, the
arrays and `async_op`, and returns a call: a function without arguments that does the work once. The method prepares
everything that a program would prepare outside its loop.
"""

from __future__ import annotations

import importlib

from .contender import Call, Contender, Unsupported

CONTENDERS = {
    "hpccomm": "hpccomm_calls:HPCComm",
    "python": "hpccomm_python_calls:InPython",
    "mpi4py": "mpi4py_calls:RawMPI4py",
    "torch-hpccomm": "torch_calls:TorchHPCComm",
    "torch-gloo": "torch_calls:TorchGloo",
    "gloo": "torch_calls:TorchGloo",  # an older name
    "shared": "hpccomm_variant_calls:Shared",
    "persistent": "hpccomm_variant_calls:Persistent",
    "one_by_one": "hpccomm_variant_calls:OneByOne",
    "copy": "copy_calls:Copy",
}

# For GPU arrays.
GPU_CONTENDERS = {
    "hpccomm": "gpu_calls:OverNCCL",
    "cuda:mpi": "gpu_calls:OverMPI",
    "nccl": "nccl_calls:RawNCCL",
    "cupyx": "cupyx_calls:CupyxDistributed",
    "torch": "torch_calls:TorchNCCL",
    "persistent": "hpccomm_variant_calls:Persistent",
    "one_by_one": "hpccomm_variant_calls:OneByOne",
}
OF_DEVICE = {"cpu": CONTENDERS, "cuda": GPU_CONTENDERS}


def contender_class(name: str, device: str = "cpu") -> type[Contender]:
    """Return the class of a contender by its name in ``--against``."""
    module, _, attribute = OF_DEVICE[device][name].partition(":")
    found: type[Contender] = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return found


__all__ = ["CONTENDERS", "GPU_CONTENDERS", "OF_DEVICE", "Call", "Contender", "Unsupported", "contender_class"]
