"""torch.distributed on hpccomm: every collective and message, DDP, FSDP, DTensor, as NumPy or one process computes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
both_ways = pytest.mark.parametrize("async_op", [False, True])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def of_rank(rank: int, n: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(n) % 3 + rank + 1).to(dtype)


def done(work: Any) -> None:
    if work is not None:
        work.wait()


def test_a_tensor_that_was_communicated_can_still_be_resized() -> None:
    tensor = of_rank(RANK)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(of_rank(rank) for rank in range(SIZE)))
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


@both_ways
@every_dtype
@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PRODUCT"])
def test_all_reduce(op: str, dtype: torch.dtype, async_op: bool) -> None:
    tensor = of_rank(RANK, dtype=dtype)
    done(dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=async_op))
    everybody = torch.stack([of_rank(rank, dtype=torch.float64) for rank in range(SIZE)])
    function = {"SUM": torch.sum, "MIN": torch.amin, "MAX": torch.amax, "PRODUCT": torch.prod}[op]
    assert torch.equal(tensor, function(everybody, 0).to(dtype))


@both_ways
def test_tensors_of_any_layout(async_op: bool) -> None:
    for tensor in (
        of_rank(RANK, 12).reshape(3, 4).t(),
        of_rank(RANK, 12)[::3],
        of_rank(RANK).requires_grad_(),
        torch.tensor(float(RANK)),
        torch.empty(0),
        torch.complex(of_rank(RANK), of_rank(RANK)),
        of_rank(RANK) > 2,
    ):
        op = dist.ReduceOp.MAX if tensor.dtype == torch.bool else dist.ReduceOp.SUM
        expected: Any = sum(of_rank(rank, 12) for rank in range(SIZE))
        done(dist.all_reduce(tensor, op, async_op=async_op))
        if tensor.shape == (4, 3):
            assert torch.equal(tensor, expected.reshape(3, 4).t())
        elif tensor.dtype == torch.complex64:
            assert torch.equal(tensor, torch.complex(expected[:4], expected[:4]))


@both_ways
@every_dtype
def test_gathers_and_scatters(dtype: torch.dtype, async_op: bool) -> None:
    last = SIZE - 1
    each = [of_rank(rank, dtype=dtype) for rank in range(SIZE)]
    tensor = each[last].clone() if last == RANK else torch.zeros(4, dtype=dtype)
    done(dist.broadcast(tensor, last, async_op=async_op))
    assert torch.equal(tensor, each[last])
    found = [torch.zeros(4, dtype=dtype) for _ in range(SIZE)]
    done(dist.all_gather(found, each[RANK], async_op=async_op))
    assert all(map(torch.equal, found, each))
    whole = torch.zeros(4 * SIZE, dtype=dtype)
    done(dist.all_gather_single(whole, each[RANK], async_op=async_op))
    assert torch.equal(whole, torch.cat(each))
    gathered = [torch.zeros(4, dtype=dtype) for _ in range(SIZE)] if last == RANK else None
    done(dist.gather(each[RANK], gathered, last, async_op=async_op))
    assert gathered is None or all(map(torch.equal, gathered, each))
    tensor = torch.zeros(4, dtype=dtype)
    done(dist.scatter(tensor, each if last == RANK else None, last, async_op=async_op))
    assert torch.equal(tensor, each[RANK])
    exchanged = torch.zeros(SIZE, dtype=dtype)
    done(dist.all_to_all_single(exchanged, of_rank(RANK, SIZE, dtype), async_op=async_op))
    assert torch.equal(exchanged, torch.stack([of_rank(rank, SIZE, dtype)[RANK] for rank in range(SIZE)]))
    lists = [torch.zeros(2, dtype=dtype) for _ in range(SIZE)]
    done(dist.all_to_all(lists, [of_rank(RANK + to, 2, dtype) for to in range(SIZE)], async_op=async_op))
    assert all(torch.equal(lists[rank], of_rank(rank + RANK, 2, dtype)) for rank in range(SIZE))


@both_ways
def test_reduce_scatters(async_op: bool) -> None:
    total: Any = sum(of_rank(rank, 2 * SIZE) for rank in range(SIZE))
    mine = total[2 * RANK : 2 * RANK + 2]
    tensor = torch.zeros(2)
    done(dist.reduce_scatter_single(tensor, of_rank(RANK, 2 * SIZE), async_op=async_op))
    assert torch.equal(tensor, mine)
    tensor = torch.zeros(2)
    done(dist.reduce_scatter(tensor, list(of_rank(RANK, 2 * SIZE).split(2)), async_op=async_op))
    assert torch.equal(tensor, mine)
    tensor = of_rank(RANK, 2 * SIZE)
    done(dist.reduce(tensor, 0, async_op=async_op))
    assert RANK != 0 or torch.equal(tensor, total)


def test_uneven_parts() -> None:
    counts = [rank + 1 for rank in range(SIZE)]
    received = torch.zeros(SIZE * (RANK + 1))
    dist.all_to_all_single(received, of_rank(RANK, sum(counts)), [RANK + 1] * SIZE, counts)
    start = sum(counts[:RANK])
    expected = [of_rank(rank, sum(counts))[start : start + RANK + 1] for rank in range(SIZE)]
    assert torch.equal(received, torch.cat(expected))


def test_messages() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    received = torch.zeros(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, of_rank(RANK), after), dist.P2POp(dist.irecv, received, before)]
    )
    for work in works:
        work.wait()
    assert torch.equal(received, of_rank(before))
    if SIZE > 1 and RANK < 2:
        if RANK == 0:
            dist.send(of_rank(0), 1, tag=7)
        else:
            dist.irecv(received, tag=7).wait()  # from any rank
            assert torch.equal(received, of_rank(0))


def test_objects() -> None:
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": rank} for rank in range(SIZE)]
    told = [("from", RANK)]
    dist.broadcast_object_list(told, SIZE - 1)
    assert told == [("from", SIZE - 1)]


def test_subgroups() -> None:
    for ranks, local in (([SIZE - 1], False), ([0, SIZE - 1][: min(SIZE, 2)], True)):
        group = None
        if not local or RANK in ranks:
            group = dist.new_group(ranks, use_local_synchronization=local)
        if RANK in ranks:
            tensor = of_rank(RANK)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.stack([of_rank(rank) for rank in ranks]).sum(0))
            dist.destroy_process_group(group)
    dist.barrier()


def test_futures() -> None:
    work = dist.all_reduce(of_rank(RANK), async_op=True)
    doubled = work.get_future().then(lambda future: 2 * future.value()[0])
    assert torch.equal(doubled.wait(), 2 * sum(of_rank(rank) for rank in range(SIZE)))


def test_works() -> None:
    tensor = of_rank(RANK)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert (work.is_success(), work.exception(), work.wait()) == (True, None, True)
    assert work.result()[0] is tensor
    if SIZE > 1:
        received = torch.zeros(4)
        sent = dist.isend(of_rank(RANK), (RANK + 1) % SIZE)
        work = dist.irecv(received)
        assert work.wait()
        assert work.source_rank() == (RANK - 1) % SIZE
        sent.wait()
        sent = dist.isend(torch.zeros(0), (RANK + 1) % SIZE)
        assert dist.recv(torch.zeros(0)) == (RANK - 1) % SIZE
        sent.wait()


def test_the_coalescing_manager() -> None:
    tensors = [of_rank(RANK, n) for n in (1, 4, 9)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        assert torch.equal(tensor, sum(of_rank(rank, len(tensor)) for rank in range(SIZE)))
    gathered = [torch.zeros(SIZE, n) for n in (2, 3)]
    with dist._coalescing_manager():
        for whole in gathered:
            dist.all_gather_into_tensor(whole, of_rank(RANK, whole.shape[1]))
    for whole in gathered:
        assert torch.equal(whole, torch.stack([of_rank(rank, whole.shape[1]) for rank in range(SIZE)]))


def test_what_hpccomm_refuses_is_told() -> None:
    with pytest.raises(Exception, match=r"all_reduce: .*BAND.* is not defined for array's dtype float32"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


# -- libraries of PyTorch ----------------------------------------------------------------------------


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(3):
        torch.manual_seed(step)
        yield torch.randn(2 * SIZE, 4), torch.randn(2 * SIZE, 3)


def trained(model: Any, mine: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in model.parameters()]


def test_ddp_and_fsdp_train_as_one_process_does() -> None:
    from torch.distributed.fsdp import fully_shard

    mine = slice(2 * RANK, 2 * RANK + 2)
    alone = trained(net(), slice(None))
    for several in (
        trained(torch.nn.parallel.DistributedDataParallel(net()), mine),
        trained(fully_shard(copy.deepcopy(net())), mine),
    ):
        for one, other in zip(alone, several, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(2)
    a, b = torch.randn(2 * SIZE, 6), torch.randn(6, 2 * SIZE)
    product = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), a @ b)
    torch.testing.assert_close((distribute_tensor(a, mesh, [Shard(1)]) * 2).sum().full_tensor(), (a * 2).sum())


def all_reduced(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0


def test_functional_collectives() -> None:
    total: Any = sum(of_rank(rank) for rank in range(SIZE))
    assert torch.equal(all_reduced(of_rank(RANK)), total)


def test_compiled() -> None:
    total: Any = sum(of_rank(rank) for rank in range(SIZE))
    compiled = torch.compile(all_reduced, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(of_rank(RANK)), total)


def test_gradients_through_collectives() -> None:
    import torch.distributed.nn as collectives

    everybody = [of_rank(rank).requires_grad_() for rank in range(SIZE)]
    weights = [of_rank(rank + 5) for rank in range(SIZE)]
    loss: Any = sum((sum(everybody) ** 2 * weights[rank]).sum() for rank in range(SIZE))
    loss.backward()  # of all ranks' losses, in one process
    mine = of_rank(RANK).requires_grad_()
    (collectives.all_reduce(mine) ** 2 * weights[RANK]).sum().backward()
    torch.testing.assert_close(mine.grad, everybody[RANK].grad)
    mine = of_rank(RANK).requires_grad_()
    parts = collectives.all_gather(mine)
    (parts[(RANK + 1) % SIZE] * weights[RANK]).sum().backward()
    torch.testing.assert_close(mine.grad, weights[(RANK - 1) % SIZE])


def test_sparse_sums() -> None:
    mine = torch.sparse_coo_tensor([[0, 1], [RANK, SIZE]], [1.0, 2.0], (2, SIZE + 1))
    dist.all_reduce(mine)
    expected = torch.zeros(2, SIZE + 1)
    expected[0, :SIZE], expected[1, SIZE] = 1, 2 * SIZE
    assert torch.equal(mine.to_dense(), expected)


SHAPES = [((6,), 0), ((6, 4), 0), ((6, 4), 1), ((1 << 20, 1 << 20), 0), ((6, 2, 3), 0), ((6, 2, 3), 1), ((6, 0), 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize(("shape", "dense"), SHAPES)
def test_sparse_sums_of_any_shape(shape: tuple[int, ...], dense: int, dtype: torch.dtype) -> None:
    sparse, rest = shape[: len(shape) - dense], shape[len(shape) - dense :]
    places = [[(0,) * len(sparse), (1 + rank, *(n - 1 for n in sparse[1:]))] for rank in range(SIZE)]
    ones, with_grad = torch.ones(2, *rest, dtype=dtype), dtype.is_floating_point
    mine = torch.sparse_coo_tensor(list(zip(*places[RANK], strict=True)), ones, shape, requires_grad=with_grad)
    dist.all_reduce(mine)
    found = mine.detach().coalesce()
    assert (found.dtype, found.shape) == (dtype, torch.Size(shape))
    if 0 not in shape:
        values = dict(zip(map(tuple, found.indices().T.tolist()), found.values(), strict=True))
        expected = {place: torch.full(rest, count, dtype=dtype) for place, count in Counter(chain(*places)).items()}
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[place], expected[place]) for place in expected)


def test_gather_single() -> None:
    for root in range(SIZE):
        output = torch.zeros(2 * SIZE, dtype=torch.bfloat16) if root == RANK else None
        dist.gather_single(torch.full((2,), RANK + 1, dtype=torch.bfloat16), output, dst=root)
        if output is not None:
            assert output.tolist() == [rank + 1 for rank in range(SIZE) for _ in range(2)]
