"""Errors in hpccomm are raised at the places where torch's programs look."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpccomm as hc
from hpccomm.core.work import Work

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
SENTENCE = "all_reduce: MPI reports that the cable is cut"


class Broken(Work):
    """An operation that fails in the transport."""

    def poll(self) -> bool:
        raise hc.DistBackendError(SENTENCE)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    group = dist.group.WORLD.group
    monkeypatch.setattr(group, "all_reduce", lambda *_: Broken(), raising=False)
    return group


def test_wait_raises(broken: Any) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(hc.DistBackendError, match=SENTENCE):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert SENTENCE in str(work.exception())
    with pytest.raises(hc.DistBackendError, match=SENTENCE):
        dist.all_reduce(torch.ones(2))


def test_futures_raise(broken: Any) -> None:
    with pytest.raises(Exception, match=SENTENCE):
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


def test_backward_of_ddp_raises() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.group.WORLD.group, "all_reduce", lambda *_: Broken(), raising=False)
        with pytest.raises(Exception, match=SENTENCE):
            model(torch.ones(1, 2)).sum().backward()


AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
several_ranks = pytest.mark.skipif(SIZE == 1, reason="torch sends no message to its own rank")


@several_ranks
def test_a_message_that_is_too_long_is_told_to_its_receiver() -> None:
    sent = dist.isend(torch.ones(4), AFTER, tag=3)
    with pytest.raises(hc.DistBackendError, match=r"TRUNCATE|[Tt]runcat"):
        dist.irecv(torch.zeros(1), BEFORE, tag=3).wait()
    sent.wait()


@several_ranks
def test_a_time_out_of_wait() -> None:
    received = torch.zeros(1)
    work = dist.irecv(received, BEFORE, tag=4)
    with pytest.raises(hc.DistTimeoutError, match=r"recv #\d+: not done after 0.05 s"):
        work.wait(timedelta(seconds=0.05))
    dist.barrier()
    dist.send(torch.ones(1), AFTER, tag=4)
    work.wait()
    assert received == 1


@several_ranks
def test_the_time_out_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCCOMM_ON_TIMEOUT", "raise")
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    received = torch.zeros(1)
    with pytest.raises(hc.DistTimeoutError, match=r"not done after 0\.2 s"):
        dist.recv(received, BEFORE, group=group, tag=1)
    dist.barrier()
    dist.isend(torch.ones(1), AFTER, group=group, tag=1)  # for the receive, which is still in flight
    dist.barrier()
    dist.destroy_process_group(group)
    assert received == 1


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_moves_but_is_not_reduced(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.full((3,), float(RANK + 1)).to(dtype)
    with pytest.raises((TypeError, RuntimeError), match=f"all_reduce: .*{name}"):
        dist.all_reduce(tensor)
    found = [torch.zeros(3).to(dtype) for _ in range(SIZE)]
    dist.all_gather(found, tensor)
    assert [each.float().tolist() for each in found] == [[rank + 1.0] * 3 for rank in range(SIZE)]
