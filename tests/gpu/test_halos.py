"""Halos of blocks on GPUs, and redistributions: the same as those of arrays on the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.cuda import seam

from ..arrays import LAYOUTS, strided, uneven, uneven_backwards
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
    for grid in made:
        hc.all_reduce(gpus.array(np.ones(1)), group=grid)  # by whose GPU a block without elements goes, too
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
            on_gpu = list(map(gpus.array, on_host, (strided, uneven, uneven_backwards)))
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


def test_a_graph_takes_no_sums_of_this_ranks_own_parts_either(process_group: hc.ProcessGroup) -> None:
    with hc.new_grid((1, process_group.size), periodic=True) as grid:
        block = gpus.array(np.ones((4, 4)))
        hc.halo_exchange([block], grid)  # connects
        with gpus.captured(), pytest.raises(hc.DistBackendError, match="can't be replayed by a CUDA graph"):
            hc.halo_accumulate([block], grid, width=[1, 0])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The seam's calls that take memory, or copy to the host and back."""
    made: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *arguments: (made.append(name), function(*arguments))[1]

    for name in ("empty", "pinned", "to_host", "to_device"):
        monkeypatch.setattr(seam.runtime(), name, noted(name, getattr(seam.runtime(), name)))
    return made


@pytest.mark.parametrize("set_up", [hc.halo_exchange_init, hc.halo_accumulate_init])
def test_what_is_started_again_takes_no_memory_and_one_copy_for_each_neighbour(
    set_up: Any, grids: list[hc.Grid], calls: list[str]
) -> None:
    for grid in grids:
        neighbours = around(grid, corners=True) if grid.config.device_map["cuda"] == "mpi" else set()
        calls.clear()
        with set_up([gpus.array(block) for block in blocks(grid, 0)], grid) as halo:
            assert grid.size == 1 or "empty" in calls
            for _ in range(3):
                calls.clear()
                halo.start()
                assert calls == ["to_host"] * len(neighbours)
                halo.wait()
                assert calls == ["to_host"] * len(neighbours) + ["to_device"] * len(neighbours)


def around(grid: hc.Grid, corners: bool) -> set[int | None]:
    """The other ranks that a rank exchanges something with."""
    steps = [each for each in product((-1, 0, 1), repeat=grid.ndim) if corners or sum(map(abs, each)) == 1]
    return {grid.at(tuple(map(sum, zip(grid.coords, step)))) for step in steps} - {None, grid.rank}


@pytest.mark.parametrize("form", ["once", "async", "again"])
def test_redistributions(grids: list[hc.Grid], form: str) -> None:
    """From slabs to pencils with ghosts, for two channels; the inputs are of several layouts."""
    whole = np.arange(2 * 3 * SIZE * 12).reshape(2, 3 * SIZE, 12)
    for grid, layout in product(grids, [*LAYOUTS, uneven, uneven_backwards]):
        n, me = grid.size, grid.rank
        rows, columns = hc.block_slice(3 * SIZE, n, me), hc.block_slice(12, n, me)
        columns = slice(max(0, columns.start - 1), min(12, columns.stop + 2))
        have, want = (rows, slice(0, 12)), (slice(1, 3 * SIZE), columns)
        expected = whole[(slice(None), *want)].astype("f4")
        given = gpus.array(whole[(slice(None), *have)].astype("f4"), layout)
        output = gpus.array(np.zeros_like(expected), layout)
        if form == "again":
            with hc.redistribute_init(output, given, want, have, group=grid) as work:
                for turn in range(3):
                    gpus.write(given, whole[(slice(None), *have)] + turn)
                    work.start()
                    work.wait()
                    np.testing.assert_array_equal(gpus.values(output), expected + turn)
            continue
        done = hc.redistribute(output, given, want, have, group=grid, async_op=form == "async")
        if done is not None:
            done.wait()
        np.testing.assert_array_equal(gpus.values(output), expected)


def test_a_redistribution_is_of_one_device(grids: list[hc.Grid]) -> None:
    boxes = slice(2 * RANK, 2 * RANK + 2), slice(2 * RANK, 2 * RANK + 2)
    with pytest.raises(ValueError, match="output and input are on cuda and cpu; one call, one device"):
        hc.redistribute(gpus.array(np.zeros(2)), np.zeros(2), *boxes, group=grids[0])


@pytest.mark.mpi(min_size=2)
def test_what_is_set_up_is_on_the_same_device_on_all_ranks(grids: list[hc.Grid]) -> None:
    block = np.zeros((3, 3)) if RANK == 0 else gpus.array(np.zeros((3, 3)))
    for init in (hc.halo_exchange_init, hc.halo_accumulate_init):
        with pytest.raises(ValueError, match="devices differ: rank 0 gives cpu, rank 1 cuda"):
            init(block, grids[0])
    boxes = (slice(0, 3), slice(0, 3)), (slice(0, 3), slice(0, 3))
    with pytest.raises(ValueError, match="rank 0 has arrays on cpu, and rank 1 on cuda; expected the same"):
        hc.redistribute_init(block, block, *boxes, group=grids[0])


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("form", ["once", "async"])
def test_over_mpi_devices_may_differ_in_a_call(form: str) -> None:
    with hc.new_grid(0, periodic=True, backend="cpu:mpi,cuda:mpi") as ring:
        arrays = [np.full((4, 2), 10.0 * RANK), np.full((4, 3), RANK, "i4")]  # two parts for each neighbour
        if RANK:
            arrays = [gpus.array(each) for each in arrays]
        work = hc.halo_exchange(arrays, ring, async_op=form == "async")
        if work is not None:
            work.wait()
        for array, scale in zip(arrays, (10, 1)):
            found = gpus.values(array) if RANK else array
            assert found[:, 0].tolist() == [scale * rank for rank in (ring.shift(0)[0], RANK, RANK, ring.shift(0)[1])]


@pytest.mark.parametrize("width", [0, ((0, 2),), 1])
def test_channels_and_widths(grids: list[hc.Grid], width: Any) -> None:
    for grid in grids:
        options = {"width": [*width, (1, 0)][: grid.ndim] if isinstance(width, tuple) else width}
        shape = (3, *(6, 7)[: grid.ndim])
        on_host = [(np.arange(np.prod(shape)).reshape(shape) % 50 + RANK).astype(t) for t in ("f2", "c16")]
        on_gpu = [gpus.array(block) for block in on_host]
        axes = tuple(range(1, 1 + grid.ndim))
        for arrays in (on_host, on_gpu):
            hc.halo_exchange(arrays, grid, axes=axes, **options)
        for one, other in zip(on_gpu, on_host):
            np.testing.assert_array_equal(gpus.values(one), other)


@pytest.mark.parametrize("corners", [True, False])
def test_one_message_for_each_neighbour_and_one_group_of_calls(
    grids: list[hc.Grid], corners: bool, machine: Any
) -> None:
    for grid in grids:
        if grid.config.device_map["cuda"] != "nccl":
            continue
        arrays = [gpus.array(block) for block in blocks(grid, 0)]
        hc.halo_exchange(arrays, grid, corners=corners)
        neighbours = around(grid, corners)
        machine.calls.clear()
        hc.halo_exchange(arrays, grid, corners=corners)
        assert machine.calls.count("send") == machine.calls.count("recv") == len(neighbours)
        assert machine.calls.count("group_start") == (len(neighbours) > 0)


def test_many_parts_go_in_one_message(process_group: hc.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    me, size = process_group.rank, process_group.size
    backend = process_group.dispatcher.backends["cuda"]
    sent = [gpus.array(np.full(1, 1000.0 * me + i)) for i in range(70)]
    received = [gpus.array(np.zeros(1)) for _ in sent]
    sends, receives = [((me + 1) % size, each) for each in sent], [((me - 1) % size, each) for each in received]
    backend.exchange(sends, receives, False, False)
    assert [float(gpus.values(each)[0]) for each in received] == [1000.0 * ((me - 1) % size) + i for i in range(70)]
    if process_group.config.device_map["cuda"] == "nccl" and size > 1:
        monkeypatch.setattr("hpccomm.nccl.backend.MOST_CALLS", 1)
        with pytest.raises(hc.UnsupportedOperationError, match=r"with 1 ranks; NCCL takes 1 messages at once"):
            backend.exchange(sends, receives, False, False)
