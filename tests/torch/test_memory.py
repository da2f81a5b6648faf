"""Training with hpccomm leaves no memory behind."""

from __future__ import annotations

import gc
import os

import torch

GRADIENTS = 256 << 10  # bytes: if each step left one behind, a thousand would be 256 MiB
LIMIT = 16 << 20  # bytes of resident memory: allocators keep less for later


def test_a_thousand_steps_of_ddp_leave_nothing_behind() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, GRADIENTS // 256 // 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images = torch.ones(1, 256)

    def train(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            optimizer.zero_grad()
            model(images).sum().backward()
            optimizer.step()
        gc.collect()
        return len(gc.get_objects()), resident()

    objects, before = train(300)
    more_objects, after = train(1000)
    assert more_objects - objects < 500  # less than one for two steps: no Work, Future or array of each
    assert after - before < LIMIT


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
