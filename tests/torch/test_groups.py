"""torch's groups on hpccomm: subsets, halves, meshes, the end and another beginning."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpccomm as hc
from hpccomm.torch import backend as torch_backend
from hpccomm.torch import init_process_group

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def sum_of_ranks(group: Any) -> float:
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


@pytest.mark.parametrize("local", [False, True])
def test_new_groups(local: bool) -> None:
    for ranks in ([SIZE - 1], list(range(SIZE))[::-1], [0, SIZE - 1][: min(SIZE, 2)]):
        group = None
        if not local or RANK in ranks:
            group = dist.new_group(ranks, use_local_synchronization=local)
        if RANK in ranks:
            assert sum_of_ranks(group) == sum(ranks)
            assert dist.get_process_group_ranks(group) == sorted(ranks)
            dist.destroy_process_group(group)
    dist.barrier()


def test_a_group_of_nobody_here() -> None:
    group = dist.new_group([0])
    if RANK != 0:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
    else:
        dist.destroy_process_group(group)


def test_subgroups() -> None:
    mine, every = dist.new_subgroups(group_size=1)
    assert (len(every), sum_of_ranks(mine)) == (SIZE, RANK)
    dist.destroy_process_group(mine)
    mine, _ = dist.new_subgroups_by_enumeration([[0], list(range(1, SIZE))] if SIZE > 1 else [[0]])
    assert sum_of_ranks(mine) == (sum(range(1, SIZE)) if RANK else 0)
    dist.destroy_process_group(mine)


def test_split_group() -> None:
    """Torch's split_group() itself asks for an accelerator; this is the function that it calls."""
    halves = [list(range(0, SIZE, 2)), list(range(1, SIZE, 2))]
    part = dist.group.WORLD.split_group(halves[RANK % 2], group_name=f"half {RANK % 2}")
    tensor = torch.tensor([float(RANK)])
    part.allreduce([tensor]).wait()
    assert float(tensor) == sum(halves[RANK % 2])
    assert (part.size(), part.rank()) == (len(halves[RANK % 2]), RANK // 2)
    part.shutdown()


@pytest.mark.parametrize("shape", [(SIZE, 1), (1, SIZE)] if SIZE != 4 else [(2, 2), (4, 1)], ids=str)
def test_device_meshes_of_two_dimensions(shape: tuple[int, int]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    places = torch.arange(SIZE).reshape(shape)
    row, column = divmod(RANK, shape[1])
    assert sum_of_ranks(mesh.get_group("columns")) == places[row].sum()
    assert sum_of_ranks(mesh.get_group("rows")) == places[:, column].sum()
    torch.manual_seed(3)
    a, b = torch.randn(2 * shape[0], 4), torch.randn(4, 3 * shape[1])
    product = distribute_tensor(a, mesh, [Shard(0), Replicate()]) @ distribute_tensor(b, mesh, [Replicate(), Shard(1)])
    torch.testing.assert_close(product.full_tensor(), a @ b)


def test_the_end_and_another_beginning() -> None:
    for _ in range(2):
        assert hc.is_initialized()
        dist.destroy_process_group()
        assert not hc.is_initialized()
        assert not torch_backend.ALIVE
        init_process_group(timeout=timedelta(seconds=77))
        assert dist.group.WORLD.group.timeout == timedelta(seconds=77)
        assert sum_of_ranks(None) == sum(range(SIZE))


def test_abort_takes_a_receive_back() -> None:
    work = dist.irecv(torch.zeros(1), RANK, tag=5)  # nobody sends it
    dist.distributed_c10d._abort_process_group()
    assert not torch_backend.ALIVE
    with pytest.raises(Exception, match="aborted by the program"):
        work.wait()
    init_process_group()
    assert sum_of_ranks(None) == sum(range(SIZE))


def test_a_world_of_the_program() -> None:
    """hpccomm's own functions work beside torch's, whichever has begun."""
    array = torch.ones(2)
    hc.all_reduce(array)  # of the world that torch's default group stands on
    assert array.tolist() == [SIZE, SIZE]
    dist.destroy_process_group()
    with hc.init_process_group():
        init_process_group()
        assert sum_of_ranks(None) == sum(range(SIZE))
        dist.destroy_process_group()
        hc.barrier()
    init_process_group()


@pytest.mark.parametrize("config", ["cpu:hpccomm", "cpu:hpccomm,cuda:hpccomm", "cpu:gloo,cuda:hpccomm"])
def test_device_maps(config: str) -> None:
    group = dist.new_group(backend=config)
    assert sum_of_ranks(group) == sum(range(SIZE))
    assert (dist.get_backend_config(group) if config != "cpu:hpccomm" else config) == config
    is_gloo = config.startswith("cpu:gloo")
    assert type(group._get_backend(torch.device("cpu"))).__name__ == (
        "ProcessGroupGloo" if is_gloo else "HPCCommBackend"
    )
    dist.destroy_process_group(group)


def test_sharded_tensors_stay_on_the_cpu() -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(SIZE)])
    sharded = sharded_tensor.full(spec, (SIZE, 2), float(RANK))
    whole = torch.zeros(SIZE, 2) if RANK == 0 else None
    sharded.gather(0, out=whole)
    if whole is not None:
        assert whole[:, 1].tolist() == list(range(SIZE))
