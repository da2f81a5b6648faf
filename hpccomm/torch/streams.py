"""torch's current CUDA stream as CuPy's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

THERE_ARE_GPUS = torch.cuda.is_available()
Call = TypeVar("Call", bound=Callable[..., Any])


def on_torchs_stream(call: Call, there_are_gpus: bool = THERE_ARE_GPUS) -> Call:
    """Make torch's current stream CuPy's, on which hpccomm works, in calls of a method on GPU tensors."""
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
    """Return True if one of the first two arguments, or of their first two items, is a tensor on a GPU."""
    if isinstance(nested, torch.Tensor):
        return bool(nested.is_cuda)
    return isinstance(nested, Sequence) and any(is_on_gpu(each) for each in nested[:2])


def current_stream() -> Any:
    """Return torch's current stream as CuPy's; ``with`` makes it the current one."""
    import cupy

    stream = torch.cuda.current_stream()
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)
