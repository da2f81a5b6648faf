"""torch's current CUDA stream is CuPy's while hpccomm works on GPU tensors: the part that needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpccomm.core.work import CompletedWork, Work
from hpccomm.torch import arrays, backend, streams
from hpccomm.torch.work import PendingGPUWork

from ..launch import ROOT, clean_environment

pytestmark = pytest.mark.serial


GPU = torch.device("cuda", 1)  # not torch's current one, which is 0


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every tensor is taken for one on GPU 1; the streams that become current are listed in order."""
    happened: list[str] = []

    @contextmanager
    def entered(what: str) -> Any:
        happened.append(what)
        yield
        happened.append(f"no {what}")

    class Stream:
        @staticmethod
        def from_external(stream: Any) -> Any:
            return entered(f"CuPy's stream {stream.__cuda_stream__()[1]}")

    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(Stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device=None: SimpleNamespace(__cuda_stream__=lambda: (0, 100 + (0 if device is None else device.index))),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered(f"GPU {device.index}"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: GPU))
    return happened


BEFORE, AFTER = ["GPU 1", "CuPy's stream 101"], ["no CuPy's stream 101", "no GPU 1"]


def test_a_call_is_made_in_torchs_stream_of_the_tensors_gpu(happened: list[str]) -> None:
    def call(_: object, tensors: list[torch.Tensor]) -> int:
        happened.append("call")
        return len(tensors)

    assert streams.on_torchs_stream(call, there_are_gpus=True)(None, [torch.ones(1)]) == 1
    assert happened == [*BEFORE, "call", *AFTER]
    assert streams.on_torchs_stream(call, there_are_gpus=False) is call


def test_a_work_waits_in_that_stream_and_its_future_is_of_that_gpu(
    happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "THERE_ARE_GPUS", True)
    waiting = backend.pending(CompletedWork(), [torch.ones(1)])
    assert waiting.wait()
    assert happened == [*BEFORE, *AFTER]
    assert waiting._devices() == [GPU]


class OnStream(Work):
    """An operation that never ends, and for which a stream can wait."""

    waits_on_stream = True  # type: ignore[assignment]

    def __init__(self, happened: list[str], failure: Exception | None = None) -> None:
        super().__init__()
        self._happened, self._failure = happened, failure

    def wait(self, timeout: object = None) -> bool:
        self._happened.append("wait")
        return not self.poll()

    def poll(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return False


@pytest.fixture
def pending(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Works on GPU 1, whose Futures are torch's for the host, as this torch may have no other."""

    @contextmanager
    def on(stream: str) -> Any:
        happened.append(stream)
        yield
        happened.append(f"no {stream}")

    monkeypatch.setattr(backend, "THERE_ARE_GPUS", True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(PendingGPUWork, "_devices", lambda _: [])
    return lambda work: backend.pending(work, [torch.ones(1)])


def test_a_result_waits_in_torchs_stream_too(happened: list[str], pending: Callable[..., Any]) -> None:
    work = pending(OnStream(happened))
    assert work.result() is work._result
    assert happened == [*BEFORE, "wait", *AFTER]


def test_a_future_is_complete_at_once_on_a_stream_that_waits(happened: list[str], pending: Callable[..., Any]) -> None:
    work = pending(OnStream(happened))
    future = work.get_future()
    assert future.done()  # the wait is for torch's event of that stream
    assert future.wait() is work._result
    assert happened == ["a stream of GPU 1", *BEFORE, "wait", *AFTER, "no a stream of GPU 1"]
    assert work.get_future() is future


def test_a_future_of_a_group_that_has_failed_raises(happened: list[str], pending: Callable[..., Any]) -> None:
    future = pending(OnStream(happened, ValueError("NCCL reports ncclRemoteError"))).get_future()
    with pytest.raises(RuntimeError, match="ncclRemoteError"):
        future.wait()


def test_torchs_streams_have_the_protocol_that_cupy_wants() -> None:
    assert callable(torch.cuda.Stream.__cuda_stream__)


def test_where_a_tensor_is() -> None:
    assert streams.gpu_of(([torch.ones(1)], [[torch.ones(1)]], object())) is None
    assert streams.gpu_of(([], [[]])) is None


def test_a_sparse_tensor_of_a_gpu_is_summed_on_the_host() -> None:
    class OnGPU:
        """A tensor that the host can't see."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.cpu = lambda: tensor

    sparse = torch.eye(3).to_sparse()
    facts = {name: getattr(sparse, name) for name in ("shape", "dtype", "sparse_dim", "dense_dim")}
    entries = SimpleNamespace(indices=lambda: OnGPU(sparse.indices()), values=lambda: OnGPU(sparse.values()))
    seen = SimpleNamespace(detach=lambda: SimpleNamespace(coalesce=lambda: entries), **facts)
    matrix = arrays.as_scipy(seen)
    assert (matrix.toarray().reshape(3, 3) == np.eye(3)).all()
    like = SimpleNamespace(device=torch.device("meta"), **facts)
    assert arrays.as_torch(matrix, like).device == like.device


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
