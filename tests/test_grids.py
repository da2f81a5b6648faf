"""Grids: coordinates and neighbours against MPI's Cartesian topologies and NumPy's indices; their axes and planes."""

from __future__ import annotations

import os
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.domains import grids
from hpccomm.domains.grids import Grid, Layout, links_between, on_nodes

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)
pytestmark = pytest.mark.usefixtures("process_group")


def shapes(size: int, axes: int) -> list[tuple[int, ...]]:
    if axes == 1:
        return [(size,)]
    return [(n, *rest) for n in range(1, size + 1) if size % n == 0 for rest in shapes(size // n, axes - 1)]


def every_layout(size: int, axes: tuple[int, ...] = (1, 2, 3)) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return [(dims, wraps) for n in axes for dims in shapes(size, n) for wraps in product([False, True], repeat=n)]


def shifted(
    dims: tuple[int, ...], periodic: tuple[bool, ...], rank: int, axis: int, by: int
) -> tuple[list[int], tuple[int, int]]:
    """What MPI_Cart_coords and MPI_Cart_shift give: MPI-4.1 §8.5.5 and §8.5.6, with the strides of C's order."""
    strides = [prod(dims[each + 1 :]) for each in range(len(dims))]
    coords = [rank // stride % size for stride, size in zip(strides, dims)]

    def moved(step: int) -> int:
        place = coords[axis] + step
        if not periodic[axis] and not 0 <= place < dims[axis]:
            return MPI.PROC_NULL
        return rank + (place % dims[axis] - coords[axis]) * strides[axis]

    return coords, (moved(-by), moved(by))


def total(group: Any) -> float:
    array = np.ones(1)
    hc.all_reduce(array, group=group)
    return float(array[0])


# -- against MPI ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dims", "periodic"), every_layout(SIZE))
def test_is_as_mpi_cartesian_topology(dims: tuple[int, ...], periodic: tuple[bool, ...]) -> None:
    cart = MPI.COMM_WORLD.Create_cart(dims, periodic)
    grid = hc.new_grid(dims, periodic)
    assert (grid.dims, grid.periodic, list(grid.coords)) == (dims, periodic, cart.Get_coords(RANK))
    assert (grid.rank, grid.ranks) == (RANK, tuple(range(SIZE)))
    for rank in range(SIZE):
        assert list(grid.coords_of(rank)) == cart.Get_coords(rank)
        assert grid.rank_of(grid.coords_of(rank)) == cart.Get_cart_rank(cart.Get_coords(rank)) == rank
    for axis, by in product(range(len(dims)), range(-SIZE - 1, SIZE + 2)):
        assert grid.shift(axis, by) == cart.Shift(axis, by)
        assert (cart.Get_coords(RANK), cart.Shift(axis, by)) == shifted(dims, periodic, RANK, axis, by)
    assert grid.neighbours() == [rank for axis in range(len(dims)) for rank in cart.Shift(axis, 1)]
    for axes in product([False, True], repeat=len(dims)):
        if any(axes):
            ours = grid[tuple(axis for axis in range(len(dims)) if axes[axis])]
            theirs = cart.Sub(axes)
            assert (ours.rank, ours.size) == (theirs.Get_rank(), theirs.Get_size())
            assert list(ours.coords) == theirs.Get_coords(ours.rank)
            assert ours.ranks == tuple(theirs.allgather(RANK))
            assert total(ours) == ours.size
            theirs.Free()
    grid.destroy()
    cart.Free()


@pytest.mark.once
@pytest.mark.parametrize("size", [*range(1, 17), 24, 27, 36, 48, 60, 64])
def test_neighbours_are_those_of_the_indices(size: int) -> None:
    for dims, periodic in every_layout(size, (1, 2, 3) if size <= 16 else (3,)):
        ranks = np.arange(size).reshape(dims)
        for axis, by in product(range(len(dims)), (1, -2)):
            if periodic[axis]:
                sources, destinations = np.roll(ranks, by, axis), np.roll(ranks, -by, axis)
            else:
                wide = [(3, 3) if each == axis else (0, 0) for each in range(len(dims))]
                padded = np.pad(ranks, wide, constant_values=MPI.PROC_NULL)
                sources, destinations = (
                    np.take(padded, range(3 + move, 3 + move + dims[axis]), axis) for move in (-by, by)
                )
            for rank in {0, size // 2, size - 1}:
                grid = Grid(Layout(dims, periodic, None), rank, size)
                expected = int(sources[grid.coords]), int(destinations[grid.coords])
                assert grid.shift(axis, by) == expected, (dims, periodic, rank, axis, by)


@pytest.mark.once
@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_all_shapes_up_to_64_ranks_are_as_mpi_has_them(axes: int) -> None:
    for number, dims in enumerate(dims for size in range(1, 65) for dims in shapes(size, axes)):
        periodic = tuple((number + axis) % 2 == 0 for axis in range(axes))
        grid = Grid(Layout(dims, periodic, None), 0, prod(dims))
        for rank in range(grid.size):
            grid.coords = grid.coords_of(rank)
            assert grid.rank_of(grid.coords) == rank
            for axis in range(axes):
                for by in range(-3, 4) if grid.size <= 16 else [(rank + number) % 7 - 3]:
                    found = list(grid.coords), grid.shift(axis, by)
                    assert found == shifted(dims, periodic, rank, axis, by), (dims, periodic, rank, axis, by)


@pytest.mark.serial
@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_dims_of_up_to_64_ranks_are_chosen_as_mpi_does(axes: int) -> None:
    for size in range(1, 65):
        free = [0] * axes
        dims = grids._layout(size, free, False, None).dims
        assert list(dims) == MPI.Compute_dims(size, free)
        assert prod(dims) == size
        assert list(dims) == sorted(dims, reverse=True)  # and as close to each other as possible: MPI-4.1 §8.5.2
        assert max(dims) - min(dims) == min(max(each) - min(each) for each in shapes(size, axes))
        for fixed in (number for number in range(1, size + 1) if size % number == 0):
            given = [*free[1:], fixed]
            if axes > 1:
                dims = grids._layout(size, given, False, None).dims
                assert dims[-1] == fixed
                assert list(dims) == MPI.Compute_dims(size, given)
                assert list(dims[:-1]) == MPI.Compute_dims(size // fixed, axes - 1)


def test_dims_are_chosen_as_mpi_does() -> None:
    for axes in (1, 2, 3):
        with hc.new_grid([0] * axes) as grid:
            assert list(grid.dims) == MPI.Compute_dims(SIZE, axes)
    with hc.new_grid(0, periodic=True) as ring:
        assert (ring.dims, ring.ndim, ring.periodic) == ((SIZE,), 1, (True,))
    with hc.new_grid((np.int64(SIZE), 0)) as flat:
        assert flat.dims == (SIZE, 1)


def test_of_a_communicator_with_a_topology() -> None:
    cart = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(SIZE, 2), (True, False))
    with hc.ProcessGroup.from_comm(cart, name="theirs") as grid:
        assert isinstance(grid, hc.Grid)
        assert (list(grid.dims), grid.periodic, grid.names) == (cart.dims, (True, False), None)
        assert total(grid) == SIZE
        assert total(grid[0]) == grid.dims[0]
    cart.Barrier()
    cart.Free()
    with hc.ProcessGroup.from_comm(MPI.COMM_WORLD) as plain:
        assert not isinstance(plain, hc.Grid)


# -- axes and planes -----------------------------------------------------------------------------------


def test_parts_have_names_and_end_with_the_grid() -> None:
    dims = MPI.Compute_dims(SIZE, 3)
    grid = hc.new_grid(dims, (False, True, False), names=("z", "y", "x"), group_desc="ocean", timeout=77)
    plane, line = grid["z", "x"], grid["y"]
    assert (plane.names, plane.dims, plane.periodic) == (("z", "x"), (dims[0], dims[2]), (False, False))
    assert (line.names, line.periodic, line.name) == (("y",), (True,), "ocean[y]")
    assert line.timeout.total_seconds() == 77
    assert plane["x"] is grid["x"] is grid[2] is grid[-1]
    assert grid["z", "y", "x"] is grid
    assert line["y"] is line is line.get_group()
    assert total(plane) == plane.size == prod(plane.dims)
    assert hc.split_group(plane, plane.rank).size == 1  # groups can be made of it, as of any
    grid.destroy()
    assert plane.is_destroyed
    assert line.is_destroyed


def test_messages_along_an_axis_stop_at_a_border() -> None:
    with hc.new_grid(MPI.Compute_dims(SIZE, 2), (True, False), reorder="node") as grid:
        for axis in range(2):
            source, destination = grid.shift(axis)
            received = np.full(1, -1)
            got = hc.sendrecv(
                np.array([grid.rank]), None, received, group=grid, group_dst=destination, group_src=source
            )
            assert received[0] == (source if source != MPI.PROC_NULL else -1)
            assert got == (MPI.PROC_NULL if source == MPI.PROC_NULL else grid.ranks[source])
            pair = [
                hc.P2POp(hc.irecv, received, group=grid, group_peer=destination),
                hc.P2POp(hc.isend, np.array([10 * grid.rank]), group=grid, group_peer=source),
            ]
            for work in hc.batch_isend_irecv(pair):
                work.wait()
            if destination != MPI.PROC_NULL:
                assert received[0] == 10 * destination


@several
def test_of_a_part_of_the_world() -> None:
    half = hc.split_group(color=int(RANK == 0), key=-RANK)
    grid = hc.new_grid((half.size, 1), group=half, names="ab")
    assert grid.ranks == half.ranks
    assert grid["a"].ranks == half.ranks
    assert total(grid["a"]) == half.size
    outside = hc.new_group([0])
    if RANK > 0:
        with pytest.raises(ValueError, match="not a member"):
            hc.new_grid(1, group=outside)
    grid.destroy()


def test_as_device_mesh() -> None:
    mesh = hc.init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "tp"))
    assert (mesh.ndim, mesh.shape, mesh.size) == (2, (1, SIZE), SIZE)
    assert mesh.get_group("tp") is mesh["tp"]
    assert (mesh.get_local_rank("tp"), mesh.get_local_rank(0)) == (RANK, 0)
    assert mesh.get_coordinate() == [0, RANK]
    assert mesh["tp"].get_local_rank() == RANK
    assert mesh.mesh.tolist() == [list(range(SIZE))]
    with pytest.raises(ValueError, match="give mesh_dim"):
        mesh.get_group()
    with pytest.raises(ValueError, match="device_type is 'tpu'; the world has 'cpu'"):
        hc.init_device_mesh("tpu", (SIZE,))
    mesh.destroy()


# -- nodes -----------------------------------------------------------------------------------------------


def links(nodes: np.ndarray, periodic: tuple[bool, ...]) -> int:
    """How many neighbours are on different nodes, one after the other."""
    found = 0
    for place in np.ndindex(nodes.shape):
        for axis, size in enumerate(nodes.shape):
            beside = list(place)
            beside[axis] += 1
            if beside[axis] < size or (periodic[axis] and size > 1):
                found += nodes[place] != nodes[tuple(np.mod(beside, nodes.shape))]
    return found


@pytest.mark.once
@pytest.mark.parametrize("periodic", list(product([False, True], repeat=2)))
@pytest.mark.parametrize("dims", [(4, 4), (2, 8), (8, 2), (16, 1), (6, 4), (3, 8)])
@pytest.mark.parametrize("of_a_node", [1, 2, 4, 8])
def test_nodes_get_blocks(dims: tuple[int, int], periodic: tuple[bool, bool], of_a_node: int) -> None:
    size = prod(dims)
    nodes = [rank // of_a_node for rank in range(size)]
    order = on_nodes(nodes, Layout(dims, periodic, None))
    assert sorted(order) == list(range(size))
    before, after = (np.array(nodes)[ranks].reshape(dims) for ranks in (range(size), order))
    for places in (before, after):
        assert links_between(places, periodic) == links(places, periodic)
    assert links(after, periodic) <= links(before, periodic)
    if dims == (4, 4) and of_a_node == 4:
        assert (links(before, periodic), links(after, periodic)) == {0: (12, 8), 1: (12, 12), 2: (16, 12), 3: (16, 16)}[
            2 * periodic[0] + periodic[1]
        ]


@pytest.mark.parametrize(("dims", "periodic"), every_layout(SIZE, (1, 2)))
def test_ranks_of_a_node_are_beside_each_other(dims: tuple[int, ...], periodic: tuple[bool, ...]) -> None:
    node_of = np.array(MPI.COMM_WORLD.allgather(hc.get_node_rank()))
    pretended = os.environ.get("MPIR_CVAR_NUM_CLIQUES")  # in a job of tests/test_halos.py
    assert pretended is None or len(set(node_of)) == min(SIZE, int(pretended))
    for key in (RANK, 2 * (RANK % 2) + RANK // 2):
        group = hc.split_group(color=0, key=key)
        with hc.new_grid(dims, periodic, group=group, reorder="node") as grid:
            assert sorted(grid.ranks) == list(range(SIZE))
            assert (grid.ranks[grid.rank], grid.coords) == (RANK, grid.coords_of(grid.rank))
            apart = links(node_of[grid.mesh], periodic)
            assert apart <= links(node_of[list(group.ranks)].reshape(dims), periodic)
            if SIZE == 4:  # of which each node has as many
                orders = (node_of[list(order)].reshape(dims) for order in permutations(range(SIZE)))
                assert apart == min(links(nodes, periodic) for nodes in orders)
            for axis in range(grid.ndim):
                assert grid[axis].ranks == tuple(np.moveaxis(grid.mesh, axis, -1)[_others(grid, axis)])
                assert total(grid[axis]) == grid.dims[axis]
            place = np.full([3] * grid.ndim, MPI.PROC_NULL)
            place[(1,) * grid.ndim] = grid.rank
            hc.halo_exchange(place, grid, corners=False)
            for axis in range(grid.ndim):
                line = place[tuple(slice(None) if each == axis else 1 for each in range(grid.ndim))]
                assert line.tolist() == [grid.shift(axis)[0], grid.rank, grid.shift(axis)[1]]
        group.destroy()


def _others(grid: hc.Grid, axis: int) -> tuple[int, ...]:
    return tuple(place for each, place in enumerate(grid.coords) if each != axis)


def test_nodes_of_different_sizes_keep_the_order() -> None:
    assert on_nodes([0, 0, 0, 1], Layout((2, 2), (False, False), None)) == [0, 1, 2, 3]


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dims": (SIZE + 1, 0)}, ValueError, rf"the group has {SIZE} ranks; .* would fit"),
        ({"dims": (SIZE, 2)}, ValueError, rf"\({SIZE}, 1\)"),
        ({"dims": ()}, ValueError, "expected 1 to 8 numbers"),
        ({"dims": (-1, 1)}, ValueError, "expected 1 to 8 numbers"),
        ({"dims": (1.0, 1)}, TypeError, "expected an integer"),
        ({"dims": (0, 0), "periodic": (True,)}, ValueError, "expected a bool, or 2 of them"),
        ({"dims": (0, 0), "periodic": (1, 0)}, ValueError, "expected a bool, or 2 of them"),
        ({"dims": (0, 0), "periodic": 1}, ValueError, "periodic is 1; expected a bool, or 2 of them"),
        ({"dims": 0, "names": 5}, TypeError, "names are 5; expected 1 strings"),
        ({"dims": (0, 0), "names": ("x",)}, ValueError, "expected 2, each once"),
        ({"dims": (0, 0), "names": ("x", "x")}, ValueError, "expected 2, each once"),
        ({"dims": (0, 0), "names": (0, 1)}, TypeError, "expected 2 strings"),
        ({"dims": (0, 0), "reorder": "yes"}, ValueError, 'expected "node"'),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hc.new_grid(**arguments)


def test_wrong_axes_and_ranks() -> None:
    with hc.new_grid((0, 0), (True, False), names=("y", "x")) as grid:
        for axes, words in {
            "z": "no axis 'z'; its axes are y, x",
            2: "no axis 2; expected 0 to 1",
            ("x", "y"): "in its order",
            ("y", "y"): "each once",
        }.items():
            with pytest.raises(ValueError, match=words):
                grid[axes]  # type: ignore[index]
        with pytest.raises(TypeError, match="expected an integer"):
            grid[0.5]  # type: ignore[index]
        with pytest.raises(ValueError, match="expected 2, one for each axis"):
            grid.rank_of((0,))
        with pytest.raises(ValueError, match="outside <Grid"):
            grid.rank_of((0, grid.dims[1]))
        assert grid.rank_of((-grid.dims[0], 0)) == 0  # it wraps
        with pytest.raises(ValueError, match=f"has ranks 0 to {SIZE - 1}"):
            grid.coords_of(SIZE)
        assert {"shift", "all_reduce", "coords"} <= set(dir(grid))
    with pytest.raises(ValueError, match="no names; number them from 0"):
        hc.new_grid(0)["x"]
