"""Make torch's current CUDA stream CuPy's current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

THERE_ARE_GPUS = torch.cuda.is_available()
Call = TypeVar("Call", bound=Callable[..., Any])


def on_torchs_stream(call: Call, there_are_gpus: bool = THERE_ARE_GPUS) -> Call:
    """Wrap a method: in calls with GPU tensors, CuPy's current stream, which hpccomm uses, is torch's."""
    if not there_are_gpus:
        return call

    @functools.wraps(call)
    def called(self: Any, *arguments: Any) -> Any:
        device = gpu_of(arguments)
        if device is None:
            return call(self, *arguments)
        with current_stream(device):
            return call(self, *arguments)

    return called  # type: ignore[return-value]


def gpu_of(nested: Any) -> torch.device | None:
    """Return the GPU of the first GPU tensor among the first two arguments, or their first two items; or None."""
    if isinstance(nested, torch.Tensor):
        return nested.device if nested.is_cuda else None
    if isinstance(nested, Sequence):
        return next((device for each in nested[:2] if (device := gpu_of(each)) is not None), None)
    return None


@contextmanager
def current_stream(device: torch.device) -> Iterator[None]:
    """Return a context in which `device` is the current GPU, and CuPy's current stream is torch's."""
    import cupy

    with torch.cuda.device(device), cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        yield
