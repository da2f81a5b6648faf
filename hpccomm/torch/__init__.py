"""hpccomm as a backend of torch.distributed: ``torch.distributed.init_process_group("hpccomm")``.

backend     the adapter: c10d's calls become calls of a ProcessGroup with the same ranks
arrays      tensors as NumPy arrays on the same memory
work        c10d's Work and Future around hpccomm's Work
dynamo      keeps torch.compile out of this package
streams     torch's current CUDA stream as CuPy's current stream
start       rank, size and store from MPI, without MASTER_ADDR

It needs PyTorch 2.14 or newer, which supports backends written in Python. It is tested on host tensors only.

The adapter has two forms. If hpccomm serves every device of a group, it is a *ProcessGroup*: ``dist.all_reduce`` calls
it without C++ in between. In a map of several backends it is a *Backend*, and torch wraps its Works (`PyWorkHolder`:
only `wait` and `get_future` remain). Large operations run in the group's communication thread, because no other thread
drives MPI while DDP waits for Futures in C++.
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
    """Return True if the installed PyTorch supports the backend."""
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
