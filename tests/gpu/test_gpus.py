"""gpus.py, and what conftest.py does, on a machine with several real GPUs: imitated, as far as tests choose one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from mpi4py import MPI

from . import conftest, gpus

RANK = MPI.COMM_WORLD.Get_rank()


class Machine(NamedTuple):
    """A number of GPUs, and those that this rank has made the current one."""

    gpus: int
    used: list[int]


@pytest.fixture(params=[1, 2, 4], ids="{} GPUs".format)
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    used: list[int] = []
    cuda = SimpleNamespace(
        Device=lambda number: SimpleNamespace(use=lambda: used.append(number)),
        runtime=SimpleNamespace(getDeviceCount=lambda: request.param),
    )
    monkeypatch.setattr(gpus, "is_real", lambda: True)
    monkeypatch.setattr(gpus, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(conftest, "forget_provider", lambda: None)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return Machine(request.param, used)


def test_each_rank_of_the_tests_has_its_own_gpu(several: Machine) -> None:
    fixture: Any = conftest._provider
    running = fixture.__wrapped__()
    next(running)
    assert several.used == [RANK % several.gpus]
    assert gpus.own() == RANK % several.gpus
    list(running)


def test_no_more_ranks_are_started_than_nccl_connects(several: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpus.connectable(ranks) for ranks in (1, 2, 4)] == [min(ranks, several.gpus) for ranks in (1, 2, 4)]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert gpus.connectable(4) == 4
    monkeypatch.setattr(gpus, "is_real", lambda: False)
    assert gpus.connectable(4) == 4
