"""Ways of training that ask more of a backend than collectives: the outcome that gloo gives, in the same job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn import Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
STEPS = 4  # DDP makes its buckets anew in the second


@pytest.fixture(scope="module")
def gloo() -> Iterator[Any]:
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def net(width: int = 8) -> Sequential:
    torch.manual_seed(1)
    return Sequential(Linear(width, width), ReLU(), Linear(width, width), ReLU(), Linear(width, width))


def steps(model: Any, width: int = 8, times: int = STEPS) -> list[float]:
    """Train, on other numbers on each rank, and return the losses."""
    optimizer, losses = SGD(model.parameters(), 0.05), []
    for step in range(times):
        optimizer.zero_grad()
        loss = model(torch.full((2, width), 0.5 + step + RANK)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def uneven(group: Any) -> list[float]:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(net(), process_group=group)
    with Join([model]):
        steps(model, times=STEPS + 2 * RANK)
    return [parameter.sum().item() for parameter in model.parameters()]


def compiled(group: Any) -> list[float]:
    torch._dynamo.reset()
    width = 512  # three layers of 1 MiB: as many buckets
    model = DistributedDataParallel(net(width), process_group=group, bucket_cap_mb=1)
    return steps(torch.compile(model, backend="aot_eager"), width)


def fsdp1(group: Any) -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return steps(FullyShardedDataParallel(net(), process_group=group, device_id=torch.device("cpu")))


@pytest.mark.parametrize("trained", [uneven, compiled, fsdp1])
def test_training_ends_as_with_gloo(trained: Callable[[Any], list[float]], gloo: Any) -> None:
    assert trained(None) == pytest.approx(trained(gloo), rel=1e-5)


def test_blocking_on_one_rank_and_not_on_another() -> None:
    tensor = torch.tensor([RANK + 1.0])
    for call in (dist.all_reduce, lambda tensor, **more: dist.broadcast(tensor, 0, **more)):
        work = call(tensor, async_op=RANK % 2 == 0)
        assert (work is None) == (RANK % 2 == 1)
        if work is not None:
            work.wait()
        assert tensor.item() == sum(range(1, SIZE + 1))


def events(group: Any) -> Counter[str]:
    """Return how often each operation is an event of torch.profiler."""
    tensor, whole = torch.ones(4), torch.ones(4 * SIZE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for async_op in (False, True):
            for work in (
                dist.all_reduce(tensor, group=group, async_op=async_op),
                dist.broadcast(tensor, 0, group=group, async_op=async_op),
                dist.reduce(tensor, 0, group=group, async_op=async_op),
                dist.all_gather(list(whole.chunk(SIZE)), tensor, group=group, async_op=async_op),
                dist.barrier(group=group, async_op=async_op),
            ):
                if work is not None:
                    work.wait()
        if SIZE > 1:
            sent = dist.isend(tensor, (RANK + 1) % SIZE, group=group)
            dist.recv(torch.empty(4), (RANK - 1) % SIZE, group=group)
            sent.wait()
    names = (event.name.partition(":") for event in profile.events())
    return Counter(name for backend, _, name in names if backend in ("hpccomm", "gloo"))


def test_every_operation_is_an_event_of_the_profiler(gloo: Any) -> None:
    assert events(None) == events(gloo)
    assert events(None)["all_reduce"] == 2
