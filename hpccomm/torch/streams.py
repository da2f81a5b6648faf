"""torch's current CUDA stream, as CuPy's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Call = TypeVar("Call", bound=Callable[..., Any])


def on_torchs_stream(call: Call, there_are_gpus: bool = torch.cuda.is_available()) -> Call:
    """Let hpccomm, which works on CuPy's current stream, work on torch's where the method is called on GPU tensors."""
    if not there_are_gpus:
        return call

    @functools.wraps(call)
    def called(self: Any, *arguments: Any) -> Any:
        if not is_on_gpu(arguments):
            return call(self, *arguments)
        with current_stream():
            return call(self, *arguments)

    return called  # type: ignore[return-value]


def is_on_gpu(nested: Any) -> bool:
    """Return whether the first tensor in arguments, and lists of them, is in the memory of a GPU."""
    if isinstance(nested, torch.Tensor):
        return bool(nested.is_cuda)
    return isinstance(nested, Sequence) and any(is_on_gpu(each) for each in nested[:2])


def current_stream() -> Any:
    """Return CuPy's name for torch's current stream, to be made CuPy's current one by ``with``."""
    import cupy

    stream = torch.cuda.current_stream()
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)
