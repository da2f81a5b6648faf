"""Host arrays over gloo, PyTorch's transport (PyTorch must be installed): ``init_process_group("cpu:gloo")``."""

from __future__ import annotations

import importlib
import importlib.util


def needs() -> None:
    """Raise ImportError unless a PyTorch with gloo is installed."""
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "gloo is a part of PyTorch, which is not installed: leave the backend's name out, which means MPI, or "
            "pip install 'hpccomm[gloo]'"
        )
    dist = importlib.import_module("torch.distributed")
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ImportError("this PyTorch was built without gloo; those of the package index have it")
