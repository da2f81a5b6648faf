"""Halos of blocks on GPUs: the same as those of blocks on the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc

from . import gpus

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


@pytest.fixture(scope="module", params=["nccl", "mpi"])
def grids(process_group: hc.ProcessGroup, request: pytest.FixtureRequest) -> Iterator[list[hc.Grid]]:
    """One of two axes and one of one, for GPU arrays over..."""
    backend = f"cpu:mpi,cuda:{request.param}"
    made = [
        hc.new_grid((0, 0), periodic=(True, False), backend=backend),
        hc.new_grid((0,), periodic=True, backend=backend),
    ]
    yield made
    for grid in made:
        grid.destroy()


def blocks(grid: hc.Grid, salt: int) -> list[Any]:
    """Three of different shapes and dtypes; the second has an axis more than the grid."""
    rng = np.random.default_rng([RANK, salt])
    shapes = [(5, 6)[: grid.ndim], (*(7, 7)[: grid.ndim], 2), (6, 5)[: grid.ndim]]
    return [rng.integers(0, 9, shape).astype(dtype) for shape, dtype in zip(shapes, ("f8", "f4", "i4"))]


@pytest.mark.parametrize("corners", [True, False])
def test_as_on_the_host(grids: list[hc.Grid], corners: bool) -> None:
    for grid in grids:
        options: dict[str, Any] = {"width": [(1, 2), 1][: grid.ndim], "corners": corners}
        for salt, (call, async_op) in enumerate(
            product((hc.halo_exchange, hc.halo_accumulate), (False, True)),
        ):
            on_host = blocks(grid, salt)
            on_gpu = [gpus.array(block) for block in on_host]
            call(on_host, grid, **options)
            work = call(on_gpu, grid, **options, async_op=async_op)
            if work is not None:
                work.wait()
            for one, other in zip(on_gpu, on_host):
                np.testing.assert_array_equal(gpus.values(one), other)


@pytest.mark.parametrize("set_up", [hc.halo_exchange_init, hc.halo_accumulate_init])
def test_again_and_again(set_up: Any, grids: list[hc.Grid]) -> None:
    for grid in grids:
        on_host = blocks(grid, 0)
        on_gpu = [gpus.array(block) for block in on_host]
        with set_up(on_host, grid) as there, set_up(on_gpu, grid) as halo:
            for salt in range(3):
                for one, other, values in zip(on_gpu, on_host, blocks(grid, salt)):
                    other[...] = values
                    gpus.write(one, values)
                there.start()
                halo.start()
                there.wait()
                halo.wait()
                for one, other in zip(on_gpu, on_host):
                    np.testing.assert_array_equal(gpus.values(one), other)


def test_more_parts_than_a_group_of_calls_takes(process_group: hc.ProcessGroup) -> None:
    """All of them are in one group: in two, a receive would wait for a send of the second."""
    me, size = process_group.rank, process_group.size
    backend = process_group.door.backends["cuda"]
    sent = [gpus.array(np.full(1, 1000.0 * me + i)) for i in range(700)]
    received = [gpus.array(np.zeros(1)) for _ in sent]
    sends, receives = [((me + 1) % size, each) for each in sent], [((me - 1) % size, each) for each in received]
    backend.exchange(sends, receives, False, False)
    assert [float(gpus.values(each)[0]) for each in received] == [1000.0 * ((me - 1) % size) + i for i in range(700)]
    if process_group.config.device_map["cuda"] == "nccl":
        with pytest.raises(ValueError, match=r"2100 parts of GPU arrays .* NCCL takes 2048 at once"):
            backend.exchange(sends + sends[:350], receives + receives[:350], False, False)
