"""torch's current CUDA stream is CuPy's while hpccomm works on GPU tensors: what can be known without a GPU."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hpccomm.core.work import CompletedWork
from hpccomm.torch import streams, work

from ..launch import ROOT, clean_environment

pytestmark = pytest.mark.serial


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every tensor is taken for a GPU's; what happens is listed."""
    happened: list[str] = []

    @contextmanager
    def stream() -> Any:
        happened.append("enter")
        yield
        happened.append("leave")

    for module in (streams, work):
        monkeypatch.setattr(module, "current_stream", stream)
    monkeypatch.setattr(streams, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return happened


def test_a_call_is_made_in_the_stream(entered: list[str]) -> None:
    def call(_: object, tensors: list[torch.Tensor]) -> int:
        entered.append("call")
        return len(tensors)

    assert streams.on_torchs_stream(call, there_are_gpus=True)(None, [torch.ones(1)]) == 1
    assert entered == ["enter", "call", "leave"]
    assert streams.on_torchs_stream(call, there_are_gpus=False) is call


def test_a_work_waits_in_the_stream(entered: list[str]) -> None:
    waiting = work.PendingGPUWork(CompletedWork(), [torch.ones(1)])
    assert waiting.wait()
    assert entered == ["enter", "leave"]


def test_the_stream_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(ExternalStream=lambda *arguments: arguments)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=123, device_index=1))
    assert streams.current_stream() == (123, 1)


def test_where_a_tensor_is() -> None:
    assert not streams.is_on_gpu(([torch.ones(1)], [[torch.ones(1)]], object()))
    assert not streams.is_on_gpu(([], [[]]))


def test_every_operation_on_tensors_looks_where_there_are_gpus() -> None:
    program = """
import torch
torch.cuda.is_available = lambda: True
from hpccomm.torch.backend import Calls
calls = {name: call for name, call in vars(Calls).items() if callable(call) and not name.startswith("_")}
print(*sorted(name for name, call in calls.items() if not hasattr(call, "__wrapped__")))
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout.split() == ["abort", "barrier", "getBackendName", "shutdown"]
