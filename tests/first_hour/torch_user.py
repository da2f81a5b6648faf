"""Three programs as users of torch.distributed write them from memory; only the import and the first call differ."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import hpccomm as dist

try:
    import torch
except ImportError:  # arrays in place of tensors, then
    torch = None  # type: ignore[assignment]


def tensor(values: Any) -> Any:
    array = np.asarray(values, np.float64)
    return array if torch is None else torch.from_numpy(array.copy())


def data_parallel() -> None:
    """Gradient descent; gradients are flattened into one tensor and averaged."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = tensor(np.arange(4 * world_size).reshape(-1, 1) / (4 * world_size))[rank::world_size]
    y = 3 * x + 1
    w, b = tensor([0.0]), tensor([0.0])
    for p in (w, b):
        dist.broadcast(p, src=0)
    for _ in range(200):
        error = x * w + b - y
        flat = tensor([float((2 * error * x).mean()), float((2 * error).mean())])
        dist.all_reduce(tensor=flat, op=dist.ReduceOp.SUM)
        flat /= world_size
        w -= 0.5 * flat[:1]
        b -= 0.5 * flat[1:]
    loss = tensor([float((error**2).mean())])
    dist.reduce(loss, dst=0, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"loss below 1e-4: {float(loss[0]) < 1e-4}, w {float(w[0]):.2f}, b {float(b[0]):.2f}")


def ring() -> None:
    """A ring all-reduce by isend and irecv, and again in batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for is_batched in (False, True):
        total = tensor([rank + 1.0, 10.0 * (rank + 1)])
        sent = tensor(total)
        for _ in range(world_size - 1):
            received = tensor([0.0, 0.0])
            if is_batched:
                ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
                works = dist.batch_isend_irecv(ops)
            else:
                works = [dist.isend(tensor=sent, dst=right), dist.irecv(tensor=received, src=left)]
            for work in works:
                work.wait()
            total += received
            sent = received
        if rank == 0:
            print(f"sum by a ring: {float(total[0]):.0f}, {float(total[1]):.0f}")


def parameter_server() -> None:
    """Rank 0 answers whoever asks; then everybody's report is gathered."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    if rank == 0:
        parameter, asked = tensor([0.0]), []
        for _ in range(2 * (world_size - 1)):
            gradient = tensor([0.0])
            asked.append(dist.recv(gradient))  # from any source
            parameter += gradient
            dist.send_object_list([{"parameter": float(parameter[0])}], dst=asked[-1])
        print(f"asked by {sorted(asked)}, parameter {float(parameter[0]):.0f}")
    else:
        for _ in range(2):
            dist.send(tensor([float(rank)]), dst=0)
            answer: list[Any] = [None]
            dist.recv_object_list(answer, src=0, device="cpu")
            assert answer[0]["parameter"] >= rank
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object({"rank": dist.get_rank(group)}, reports if rank == 0 else None, dst=0)
    if rank == 0:
        print("reports of", [report["rank"] for report in reports])


if __name__ == "__main__":
    dist.init_process_group("gloo" if sys.argv[1:] == ["gloo"] else None)
    data_parallel()
    ring()
    parameter_server()
    dist.barrier(device_ids=[dist.get_node_local_rank()])
    dist.destroy_process_group()
