"""Groups whose ranks have coordinates: what MPI calls a Cartesian topology, and c10d a DeviceMesh."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from .core import checks
from .core.annotations import Integer
from .core.c10d_names import c10d_names
from .core.grid import Grid, Layout, fitting, on_nodes
from .core.group import child_of
from .core.options import time_limit
from .core.registry import BackendConfig
from .errors import here
from .groups import next_name, usable
from .job import failures, mpi_library
from .world import connect, current_world, member_of

if TYPE_CHECKING:
    from .core.non_member import Group

MOST_AXES = 8  # whose parts are 254 groups


def new_grid(
    dims: Integer | Sequence[Integer],
    periodic: bool | Sequence[bool] = False,
    names: Sequence[str] | None = None,
    group: Group | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    group_desc: str | None = None,
    on_timeout: str | None = None,
    reorder: str | None = None,
) -> Grid:
    """Make a group of the ranks of `group` that have coordinates: MPI_Cart_create (MPI-4.1 §8.5.1).

    Every rank of `group` calls it. The groups of its axes and planes are made with it: ``grid["x"]``.

    Parameters
    ----------
    dims : int or sequence of int
        The number of ranks along each axis; 0: chosen, as near as possible to those of the others that are chosen
        (MPI_Dims_create).
    periodic : bool or sequence of bool
        Whether the last rank along an axis is a neighbour of the first: one for all axes, or one for each.
    names : sequence of str, optional
        Of the axes; ``"yx"`` is the same as ``("y", "x")``. Default: they have numbers only.
    group : ProcessGroup, optional
        Whose ranks. Default: the world.
    timeout, backend, group_desc, on_timeout
        As for :func:`new_group`; the default is that of `group`.
    reorder : "node", optional
        Give the ranks of a node a block of the grid, where so fewer neighbours are on different nodes. Default: the
        ranks are in the order of `group`, the last coordinate changes fastest.

    Returns
    -------
    Grid

    Raises
    ------
    ValueError
        The product of `dims` is not the number of ranks (the message names shapes that fit), there are not as many
        `periodic` or `names` as axes, or a name is given twice.
    TypeError
        Of `dims` something is no integer, or of `names` no string.
    DistError
        `group` has been destroyed.

    Examples
    --------
    >>> ocean = hc.new_grid((0, 0), periodic=(False, True), names=("y", "x"), group_desc="ocean")
    >>> ocean.dims  # on 6 ranks: (3, 2)
    (1, 1)
    >>> west, east = ocean.shift("x")
    >>> received = np.empty(1)
    >>> _ = hc.sendrecv(np.array([2.0]), None, received, group=ocean, group_dst=east, group_src=west)
    >>> received
    array([2.])
    """
    parent = member_of("new_grid", group)
    layout = _layout("new_grid", parent.size, dims, periodic, names)
    if reorder not in (None, "node"):
        raise ValueError(f'new_grid: reorder is {reorder!r}; expected "node" or None{here()}')
    config = parent.config if backend is None else BackendConfig(backend)
    limits = time_limit(timeout, on_timeout)(parent)
    usable("new_grid", parent)
    dims, wraps, called = layout
    parent.agree_on("new_grid", f"dims {dims}, periodic {wraps}, names {called}, reorder {reorder}, backend {config}")
    order = list(range(parent.size)) if reorder is None else on_nodes(parent.nodes, layout)
    with failures.translating("new_grid", parent.comm):
        comm = parent.comm.Split(0, order.index(parent.rank))
    ranks = [parent.ranks[rank] for rank in order]
    kind = partial(Grid, layout)
    grid = child_of(parent.owner, comm, ranks, config, limits, next_name(group_desc), group_desc, kind=kind)
    assert isinstance(grid, Grid)
    grid.make_parts()
    connect(grid)
    return grid


@c10d_names("backend_override")
def init_device_mesh(
    device_type: str, mesh_shape: Sequence[Integer], mesh_dim_names: Sequence[str] | None = None
) -> Grid:
    """Make a grid of all ranks, as c10d's function of this name: ``new_grid(mesh_shape, names=mesh_dim_names)``.

    Parameters
    ----------
    device_type : str
        The device of the arrays, ``"cpu"`` or ``"cuda"``; the world has a backend for it.
    mesh_shape : sequence of int
        The number of ranks along each axis.
    mesh_dim_names : sequence of str, optional
        The names of the axes.

    Returns
    -------
    Grid
        With the methods of a DeviceMesh: ``mesh["dp"]``, `get_group`, `get_local_rank`, `get_coordinate`, `ndim`,
        `shape`, `mesh`.

    Raises
    ------
    ValueError, TypeError
        As :func:`new_grid`; or the world has no backend for the device.

    Examples
    --------
    >>> mesh = hc.init_device_mesh("cpu", (1, hc.get_world_size()), mesh_dim_names=("dp", "tp"))
    >>> x = np.array([1.0])
    >>> hc.all_reduce(x, group=mesh["tp"])
    >>> mesh.get_local_rank("tp"), mesh.get_coordinate()  # on rank 1 of 4: (1, [0, 1])
    (0, [0, 0])
    """
    devices = current_world().config.device_map
    if device_type not in devices:
        known = ", ".join(map(repr, devices))
        raise ValueError(f"init_device_mesh: device_type is {device_type!r}; the world has {known}{here()}")
    return new_grid(mesh_shape, names=mesh_dim_names)


def _layout(
    operation: str,
    size: int,
    dims: Integer | Sequence[Integer],
    periodic: bool | Sequence[bool],
    names: Sequence[str] | None,
) -> Layout:
    """Return the layout of a grid of `size` ranks, having checked what was given."""
    rows = dims if isinstance(dims, (Sequence, np.ndarray)) else (dims,)
    given = tuple(checks.integer(f"{operation}: a number of dims", each) for each in rows)
    if not 1 <= len(given) <= MOST_AXES or min(given) < 0:
        raise ValueError(
            f"{operation}: dims are {given}; expected 1 to {MOST_AXES} numbers, 0 for one to choose{here()}"
        )
    fixed = prod(each for each in given if each)
    if size % fixed or (0 not in given and fixed != size):
        fit = " or ".join(map(str, fitting(given, size)))
        raise ValueError(
            f"{operation}: dims are {given}, and the group has {size} ranks; {fit} would fit, and 0 is for a number to "
            f"choose{here()}"
        )
    chosen = tuple(mpi_library.load().Compute_dims(size, list(given)))
    wraps = (periodic,) * len(given) if isinstance(periodic, (bool, np.bool_)) else tuple(periodic)
    if len(wraps) != len(given) or not all(isinstance(each, (bool, np.bool_)) for each in wraps):
        raise ValueError(f"{operation}: periodic is {periodic!r}; expected a bool, or {len(given)} of them{here()}")
    called = None if names is None else tuple(names)
    if called is not None:
        if not all(isinstance(each, str) for each in called):
            raise TypeError(f"{operation}: names are {names!r}; expected {len(given)} strings{here()}")
        if len(called) != len(given) or len(set(called)) != len(called):
            raise ValueError(f"{operation}: names are {called}; expected {len(given)}, each once{here()}")
    return Layout(chosen, tuple(map(bool, wraps)), called)
