"""hpccomm as a backend of torch.distributed: ``torch.distributed.init_process_group("hpccomm")``.

backend     the adapter: c10d's calls are those of a ProcessGroup on the same ranks
arrays      tensors as NumPy's arrays on the same memory
work        c10d's Work and Future around hpccomm's
dynamo      torch.compile leaves all this alone
streams     torch's current CUDA stream, as CuPy's
start       rank, size and store from MPI, without MASTER_ADDR

It needs PyTorch 2.14 or newer, whose backends may be written in Python. Tested on host tensors only.

The adapter has two forms. Where hpccomm serves every device of a group it is a *ProcessGroup*, which
``dist.all_reduce`` calls without C++ in between. In a map of several backends it is a *Backend*, whose Works torch
wraps (`PyWorkHolder`: only `wait` and `get_future` remain). Large operations run in the group's communication thread:
while DDP waits for Futures in C++, nobody else would drive MPI.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .start import init_process_group as init_process_group
    from .start import register as register
    from .start import set_environment as set_environment

__all__ = ["init_process_group", "is_available", "register", "set_environment"]

OLDEST = (2, 14)


def is_available() -> bool:
    """Return True if a PyTorch is installed that takes the backend."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_available():
        raise ImportError("hpccomm.torch needs PyTorch 2.14 or newer: pip install 'hpccomm[torch]'")
    from . import start

    return getattr(start, name)
