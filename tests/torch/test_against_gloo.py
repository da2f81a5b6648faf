"""Ways of training that ask more of a backend than collectives: the outcome that gloo gives, in the same job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Linear, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
STEPS = 5  # DDP makes its buckets anew in the second, ZeRO with its hook begins in the third


@pytest.fixture(scope="module")
def gloo() -> Iterator[Any]:
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def net(width: int = 8) -> Sequential:
    torch.manual_seed(1)
    return Sequential(Linear(width, width), ReLU(), Linear(width, width), ReLU(), Linear(width, width))


def steps(model: Any, width: int = 8, times: int = STEPS, optimizer: Any = None, updated_from: int = 0) -> list[float]:
    """Train, on other numbers on each rank, and return the losses."""
    optimizer, losses = optimizer or SGD(model.parameters(), 0.05), []
    for step in range(times):
        optimizer.zero_grad()
        loss = model(torch.full((2, width), 0.5 + step + RANK)).square().mean()
        loss.backward()
        if step >= updated_from:
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


def ddp(group: Any, **options: Any) -> list[float]:
    return steps(DistributedDataParallel(net(), process_group=group, **options))


def accumulated(group: Any) -> list[float]:
    model = DistributedDataParallel(net(), process_group=group)
    with model.no_sync():
        model(torch.full((2, 8), 0.1 * RANK)).sum().backward()
    return steps(model)


def compiled_inside(group: Any) -> list[float]:
    torch._dynamo.reset()
    return steps(DistributedDataParallel(torch.compile(net(), backend="aot_eager"), process_group=group))


def hooked(group: Any, name: str) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(group or dist.group.WORLD, getattr(default_hooks, name))
    return steps(model)


def power_sgd(group: Any) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook)
    return steps(model)


def local_sgd(group: Any) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    everyone = group or dist.group.WORLD
    model = DistributedDataParallel(net(), process_group=group)
    alone = [dist.new_group([rank], backend=dist.get_backend(group)) for rank in range(SIZE)][RANK]
    model.register_comm_hook(local.PostLocalSGDState(everyone, alone, start_localSGD_iter=1), local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1, process_group=everyone)
    return steps(model, optimizer=PostLocalSGDOptimizer(SGD(model.parameters(), 0.05), averager))


def zero(group: Any) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net(), process_group=group)
    sharded = ZeroRedundancyOptimizer(model.parameters(), SGD, process_group=group or dist.group.WORLD, lr=0.05)
    return steps(model, optimizer=sharded)


def zero_with_hook(group: Any) -> list[float]:
    """Torch's hook updates nothing in the first two steps; torch refuses it for gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net(), process_group=group)
    if group is not None:
        return steps(model, updated_from=2)
    sharded = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.05, overlap_with_ddp=True)
    model.register_comm_hook(dist.group.WORLD, hook_with_zero_step(allreduce_hook, model, sharded))
    return steps(model, optimizer=sharded)


def mesh_of(group: Any, *shape: int) -> Any:
    names = ("outer", "inner")[-len(shape) :]
    backends: Any = {name: dist.get_backend(group) for name in names}
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)


def fsdp2(group: Any, *shape: int, **options: Any) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), mesh_of(group, *(shape or (SIZE,)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, **options)
    losses = steps(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [*losses, norm.full_tensor().item(), *(each.full_tensor().sum().item() for each in model.parameters())]


def mixed_precision(group: Any) -> list[float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(group, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def hybrid(group: Any) -> list[float]:
    return fsdp2(group, *((2, SIZE // 2) if SIZE % 2 == 0 else (1, SIZE)))


def tensor_parallel(group: Any) -> list[float]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    columns = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": columns}
    model = parallelize_module(net(12), mesh_of(group, SIZE), plan)
    optimizer, losses = SGD(model.parameters(), 0.05), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(model(torch.full((2, 12), 0.5 + step)), torch.tensor([3, 7]))
            loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item())
    return losses


def pipeline(group: Any) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(RANK)
    layer = Sequential(Linear(4 * SIZE, 4 * SIZE), ReLU())
    stage = PipelineStage(layer, RANK, SIZE, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    optimizer, losses = SGD(layer.parameters(), 0.05), []
    inputs, target = torch.linspace(0, 1, 16 * SIZE).reshape(4, 4 * SIZE), torch.ones(4, 4 * SIZE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mine: list[torch.Tensor] = []
        schedule.step(*[inputs] * (RANK == 0), **({"target": target, "losses": mine} if RANK == SIZE - 1 else {}))
        optimizer.step()
        losses += [loss.item() for loss in mine]
    return [*losses, *(parameter.sum().item() for parameter in layer.parameters())]


TRAININGS = {
    "uneven inputs under Join": uneven,
    "compiled": compiled,
    "compiled inside": compiled_inside,
    "static_graph": partial(ddp, static_graph=True),
    "find_unused_parameters": partial(ddp, find_unused_parameters=True),
    "gradient_as_bucket_view": partial(ddp, gradient_as_bucket_view=True),
    "no_sync": accumulated,
    "hook: bfloat16": partial(hooked, name="bf16_compress_hook"),
    "hook: float16": partial(hooked, name="fp16_compress_hook"),
    "hook: PowerSGD": power_sgd,
    "post-local SGD": local_sgd,
    "ZeRO": zero,
    "ZeRO with its hook": zero_with_hook,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "FSDP2: mixed precision": mixed_precision,
    "FSDP2: two dimensions": hybrid,
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
}


@pytest.mark.parametrize("training", TRAININGS)
def test_training_ends_as_with_gloo(training: str, gloo: Any) -> None:
    trained: Callable[[Any], list[float]] = TRAININGS[training]
    rounds = {"hook: bfloat16": 2**-7, "hook: float16": 2**-10}  # gloo after each addition, hpccomm once
    assert trained(None) == pytest.approx(trained(gloo), rel=rounds.get(training, 1e-5))


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
