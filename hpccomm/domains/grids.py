"""Grids: groups whose ranks have coordinates, like MPI's Cartesian topologies (MPI-4.1 §8.5) and c10d's DeviceMesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..api.groups import next_name, usable
from ..api.world import connect, current_world, member_of
from ..core import checks
from ..core.annotations import Integer
from ..core.c10d_names import c10d_names
from ..core.group import ProcessGroup, child_of, make_group
from ..core.members import TO_NOBODY
from ..core.options import time_limit
from ..core.registry import BackendConfig
from ..errors import on_rank
from ..job import failures, mpi_library

if TYPE_CHECKING:
    from ..core.non_member import Group

PUBLIC = [
    "dims", "periodic", "names", "coords", "ndim", "shape", "mesh", "rank_of", "coords_of", "shift", "neighbours",
    "axis", "get_group", "get_local_rank", "get_coordinate",
]  # fmt: skip
MOST_AXES = 8  # such a grid has 254 parts, and each is a group


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
    """Arrange the ranks of `group` in a grid with coordinates: MPI_Cart_create (MPI-4.1 §8.5.1).

    Every rank of `group` calls it. The call also makes a group for each axis and plane: ``grid["x"]``.

    Parameters
    ----------
    dims : int or sequence of int
        The number of ranks along each axis. hpccomm chooses those that are 0, as close to each other as possible
        (MPI_Dims_create).
    periodic : bool or sequence of bool
        True if the last rank along an axis is a neighbour of the first: one value for all axes, or one for each.
    names : sequence of str, optional
        The names of the axes; ``"yx"`` is the same as ``("y", "x")``. Default: axes have only numbers.
    group : ProcessGroup, optional
        The group whose ranks form the grid. Default: the world.
    timeout, backend, group_desc, on_timeout
        As for :func:`new_group`; the default is that of `group`.
    reorder : "node", optional
        Give each node a block of the grid if fewer neighbours are on different nodes then. Default: the ranks keep the
        order of `group`, and the last coordinate changes fastest.

    Returns
    -------
    Grid

    Raises
    ------
    ValueError
        The product of `dims` is not the number of ranks (the message names shapes that fit), `periodic` or `names` does
        not have one item per axis, a name is given twice, or this process is not in `group`.
    TypeError
        An item of `dims` is not an integer, or an item of `names` is not a string.
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
    layout = _layout(parent.size, dims, periodic, names)
    if reorder not in (None, "node"):
        raise ValueError(f'new_grid: reorder is {reorder!r}; expected "node" or None{on_rank()}')
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
    """Make a grid of all ranks, like c10d's function of this name: ``new_grid(mesh_shape, names=mesh_dim_names)``.

    Parameters
    ----------
    device_type : str
        The device of the arrays, ``"cpu"`` or ``"cuda"``; the world must have a backend for it.
    mesh_shape : sequence of int
        The number of ranks along each axis.
    mesh_dim_names : sequence of str, optional
        The names of the axes.

    Returns
    -------
    Grid
        It has these members of a DeviceMesh: ``mesh["dp"]``, `get_group`, `get_local_rank`, `get_coordinate`, `ndim`,
        `shape`, `mesh`.

    Raises
    ------
    ValueError, TypeError
        As for :func:`new_grid`, or the world has no backend for the device.

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
        raise ValueError(f"init_device_mesh: device_type is {device_type!r}; the world has {known}{on_rank()}")
    return new_grid(mesh_shape, names=mesh_dim_names)


class Layout(NamedTuple):
    """The shape of a grid, without its ranks."""

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]
    names: tuple[str, ...] | None

    def of(self, axes: Sequence[int]) -> Layout:
        """Return the layout of some of the axes."""
        names = None if self.names is None else tuple(self.names[axis] for axis in axes)
        return Layout(tuple(self.dims[axis] for axis in axes), tuple(self.periodic[axis] for axis in axes), names)


class Grid(ProcessGroup):
    """A group whose ranks have coordinates in a grid. Every operation accepts it as ``group=``.

    Make one with :func:`new_grid`, or with :meth:`ProcessGroup.from_comm` and a Cartesian communicator. The
    last coordinate changes fastest from rank to rank. ``grid["x"]`` is the group of the ranks along axis x through
    this rank, ``grid["y", "x"]`` the group of its plane, with axes in the grid's order. These parts are grids too, made
    and destroyed with this one. Axes are given by name or number. Methods take and return ranks *in the grid*;
    functions take them as `group_dst` and `group_src`.

    It has these members of c10d's ``DeviceMesh``: `ndim`, `shape`, `mesh`, `get_group`, `get_local_rank`,
    `get_coordinate`. (`size` is a number, as in every group.)

    Attributes
    ----------
    dims : tuple of int
        The number of ranks along each axis.
    periodic : tuple of bool
        For each axis, True if its last rank is a neighbour of its first.
    names : tuple of str or None
        The names of the axes, if they have any.
    coords : tuple of int
        This rank's coordinates.

    Examples
    --------
    >>> grid = hc.new_grid((0, 1), periodic=(True, False), names=("y", "x"))
    >>> grid.dims, grid.coords  # on rank 1 of 4: ((4, 1), (1, 0))
    ((1, 1), (0, 0))
    >>> grid.shift("y")  # on rank 1 of 4: (0, 2)
    (0, 0)
    >>> column = np.array([1.0])
    >>> hc.all_reduce(column, group=grid["y"])
    >>> column  # on 4 ranks: array([4.])
    array([1.])
    """

    def __init__(self, layout: Layout, rank: int, size: int, **fields: Any) -> None:
        super().__init__(rank, size, **fields)
        self.layout = layout
        self.dims, self.periodic, self.names = layout
        self.coords = self.coords_of(rank)
        self._parts: dict[tuple[int, ...], Grid] = {tuple(range(self.ndim)): self}

    # -- ranks and coordinates -----------------------------------------------------------------------

    def coords_of(self, rank: Integer) -> tuple[int, ...]:
        """Return the coordinates of a rank in the grid: MPI_Cart_coords. Raise ValueError if there is no such rank."""
        number = checks.integer("coords_of: rank", rank)
        if not 0 <= number < self.size:
            raise ValueError(f"coords_of: rank is {number}; {self!r} has ranks 0 to {self.size - 1}{on_rank()}")
        return tuple(int(each) for each in np.unravel_index(number, self.dims))

    def rank_of(self, coords: Sequence[Integer]) -> int:
        """Return the rank at given coordinates: MPI_Cart_rank; they wrap around along a periodic axis.

        Raise ValueError if there is not one coordinate per axis, or if one is outside the grid along another axis.
        """
        place = [checks.integer("rank_of: a coordinate", each) for each in checks.one_or_more(coords)]
        if len(place) != self.ndim:
            raise ValueError(f"rank_of: coords are {tuple(place)}; expected {self.ndim}, one for each axis{on_rank()}")
        rank = self.at(place)
        if rank is None:
            raise ValueError(f"rank_of: coords are {tuple(place)}, outside {self!r}{on_rank()}")
        return rank

    def at(self, place: Sequence[int]) -> int | None:
        """Return the rank at given coordinates; None if they are outside the grid."""
        rank = 0
        for coordinate, size, wraps in zip(place, *self.layout[:2]):
            if not 0 <= coordinate < size and not wraps:
                return None
            rank = rank * size + coordinate % size
        return rank

    def shift(self, axis: Integer | str, by: Integer = 1) -> tuple[int, int]:
        """Return the ranks `by` steps before and after this one along an axis: MPI_Cart_shift.

        Returns
        -------
        source, destination : int
            If every rank sends to its `destination`, this rank receives from `source`. Beyond a border the rank is
            MPI.PROC_NULL; messages to and from it do nothing.
        """
        along, steps = self.axis(axis), checks.integer("shift: by", by)
        mpi = mpi_library.load()
        found = []
        for step in (-steps, steps):
            rank = self.at([each + step * (number == along) for number, each in enumerate(self.coords)])
            found.append(mpi.PROC_NULL if rank is None else rank)
        return found[0], found[1]

    def neighbours(self) -> list[int]:
        """Return the ranks before and after this one along each axis; MPI.PROC_NULL beyond a border.

        They have the order of MPI's neighbourhood collectives (MPI-4.1 §8.6).
        """
        return [rank for axis in range(self.ndim) for rank in self.shift(axis)]

    def peer(self, operation: str, argument: str, global_rank: Integer | None, group_rank: Integer | None) -> int:
        """Return the group rank, as in every group; for messages it may also be MPI.PROC_NULL."""
        if operation in TO_NOBODY and global_rank is None and group_rank == mpi_library.load().PROC_NULL:
            return int(group_rank)  # type: ignore[arg-type]
        return super().peer(operation, argument, global_rank, group_rank)

    # -- axes ------------------------------------------------------------------------------------------

    def axis(self, axis: Integer | str) -> int:
        """Return the number of an axis, given by name or number; raise ValueError if there is no such axis."""
        names = self.names or ()
        if isinstance(axis, str):
            if axis not in names:
                known = f"its axes are {', '.join(names)}" if names else "its axes have no names; number them from 0"
                raise ValueError(f"{self!r} has no axis {axis!r}; {known}{on_rank()}")
            return names.index(axis)
        number = checks.integer("axis", axis)
        if not -self.ndim <= number < self.ndim:
            raise ValueError(f"{self!r} has no axis {number}; expected 0 to {self.ndim - 1}{on_rank()}")
        return number % self.ndim

    __iter__ = __contains__ = None  # Python would try 0, 1, 2 ...

    def __getitem__(self, axes: Integer | str | tuple[Integer | str, ...]) -> Grid:
        chosen = tuple(self.axis(axis) for axis in (axes if isinstance(axes, tuple) else (axes,)))
        if chosen not in self._parts:
            raise ValueError(
                f"{self!r} has no part {axes!r}; name one axis or more, each once, in its order{on_rank()}"
            )
        return self._parts[chosen]

    def make_parts(self) -> None:
        """Make the groups of the axes and planes; every rank of the grid calls it."""
        for axes in _subsets(range(self.ndim)):
            self._parts[axes] = self._part(axes)
        for axes, part in self._parts.items():
            for inner in _subsets(range(len(axes))):
                part._parts[inner] = self._parts[tuple(axes[each] for each in inner)]

    def _part(self, axes: tuple[int, ...]) -> Grid:
        layout = self.layout.of(axes)
        numbers = [
            int(np.ravel_multi_index([self.coords[axis] for axis in some], [self.dims[axis] for axis in some]))
            for some in ([axis for axis in range(self.ndim) if axis not in axes], axes)
        ]
        with failures.translating("new_grid", self.comm):
            comm = self.comm.Split(*numbers)
        here_but_for = [slice(None) if axis in axes else self.coords[axis] for axis in range(self.ndim)]
        ranks = self.mesh[tuple(here_but_for)].ravel().tolist()
        limits = {"timeout": self.timeout, "on_timeout": self.on_timeout}
        name = f"{self.name}[{', '.join(layout.names or map(str, axes))}]"
        kind = partial(Grid, layout)
        part = child_of(self.owner, comm, ranks, self.config, limits, name, self.description, kind=kind)
        assert isinstance(part, Grid)
        self.owner.children.remove(part)
        self.children.append(part)
        part.on_destroy = self.children.remove
        return part

    # -- members of c10d's DeviceMesh --------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis: `dims`."""
        return self.dims

    @property
    def mesh(self) -> np.ndarray:
        """The global ranks, as an array with the grid's shape."""
        return np.array(self.ranks).reshape(self.dims)

    def get_group(self, mesh_dim: Integer | str | None = None) -> Grid:
        """Return the group of the ranks along an axis through this rank: ``grid[mesh_dim]``."""
        return self[self._only(mesh_dim)]

    def get_local_rank(self, mesh_dim: Integer | str | None = None) -> int:
        """Return this rank's coordinate along an axis; a grid with one axis needs no `mesh_dim`."""
        return self.coords[self._only(mesh_dim)]

    def get_coordinate(self) -> list[int]:
        """Return this rank's coordinates."""
        return list(self.coords)

    def _only(self, axis: Integer | str | None) -> int:
        if axis is None and self.ndim > 1:
            raise ValueError(f"{self!r} has {self.ndim} axes; give mesh_dim{on_rank()}")
        return self.axis(0 if axis is None else axis)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *PUBLIC})

    def __repr__(self) -> str:
        dims = " x ".join(map(str, self.dims))
        return f"<Grid {self.name!r}: {dims}, rank {self.rank} at {self.coords}, {self.config}>"


def _subsets(axes: Iterable[int]) -> list[tuple[int, ...]]:
    every = tuple(axes)
    return [some for count in range(1, len(every)) for some in combinations(every, count)]


def on_cartesian(comm: Any, fields: Mapping[str, Any]) -> Grid:
    """Make a grid from a communicator with a Cartesian topology and a group's fields; every rank calls it."""
    dims, periodic, _ = comm.Get_topo()
    layout = Layout(tuple(dims), tuple(map(bool, periodic)), None)
    grid = make_group(kind=partial(Grid, layout), **fields)
    assert isinstance(grid, Grid)
    grid.make_parts()
    return grid


def links_between(places: np.ndarray, periodic: Sequence[bool]) -> int:
    """Return the number of pairs of neighbours in a grid that are on different nodes."""
    links = 0
    for axis, wraps in enumerate(periodic):
        if places.shape[axis] > 1:
            differs = places != np.roll(places, -1, axis)
            links += int(np.count_nonzero(differs if wraps else np.delete(differs, -1, axis)))
    return links


def on_nodes(nodes: Sequence[int], layout: Layout) -> list[int]:
    """Return the order of ranks that places the fewest neighbours on different nodes.

    Each node gets a block of the grid. If nodes have different numbers of ranks, or no block fits, the order stays the
    same.
    """
    dims, periodic, _ = layout
    unchanged = list(range(len(nodes)))
    members = [[rank for rank in unchanged if nodes[rank] == node] for node in sorted(set(nodes))]
    if len({len(each) for each in members}) > 1:
        return unchanged
    of_node = np.array(nodes)
    best, fewest = unchanged, links_between(of_node.reshape(dims), periodic)
    for block in _blocks(len(members[0]), dims):
        outer = [size // part for size, part in zip(dims, block)]
        # (a node's block, position in the block) -> coordinates: interleave the axes of both
        order = np.array(members).reshape(*outer, *block)
        axes = [each for axis in range(len(dims)) for each in (axis, axis + len(dims))]
        ranks = order.transpose(axes).reshape(dims)
        links = links_between(of_node[ranks], periodic)
        if links < fewest:
            best, fewest = ranks.ravel().tolist(), links
    return best


def _blocks(ranks: int, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of blocks with this number of ranks that divide a grid evenly."""
    if not dims:
        return [()] if ranks == 1 else []
    divisors = [part for part in range(1, dims[0] + 1) if dims[0] % part == 0 and ranks % part == 0]
    return [(part, *rest) for part in divisors for rest in _blocks(ranks // part, dims[1:])]


def fitting(dims: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return shapes near `dims` with `size` ranks: `dims` with one axis changed, for each axis, and MPI's choice."""
    mpi = mpi_library.load()
    found = [tuple(mpi.Compute_dims(size, [0] * len(dims)))]
    for axis, given in enumerate(dims):
        others = prod(each for number, each in enumerate(dims) if number != axis)
        if given and others and size % others == 0:
            found.insert(0, (*dims[:axis], size // others, *dims[axis + 1 :]))
    return list(dict.fromkeys(found))


def _layout(
    size: int, dims: Integer | Sequence[Integer], periodic: bool | Sequence[bool], names: Sequence[str] | None
) -> Layout:
    """Check the arguments and return the layout of a grid of `size` ranks."""
    given = tuple(checks.integer("new_grid: a number of dims", each) for each in checks.one_or_more(dims))
    if not 1 <= len(given) <= MOST_AXES or min(given) < 0:
        raise ValueError(
            f"new_grid: dims are {given}; expected 1 to {MOST_AXES} numbers, 0 for one to choose{on_rank()}"
        )
    fixed = prod(each for each in given if each)
    if size % fixed or (0 not in given and fixed != size):
        fit = " or ".join(map(str, fitting(given, size)))
        raise ValueError(
            f"new_grid: dims are {given}, and the group has {size} ranks; {fit} would fit, and 0 is for a number to "
            f"choose{on_rank()}"
        )
    chosen = tuple(mpi_library.load().Compute_dims(size, list(given)))
    wraps = (periodic,) * len(given) if isinstance(periodic, (bool, np.bool_)) else tuple(checks.one_or_more(periodic))
    if len(wraps) != len(given) or not all(isinstance(each, (bool, np.bool_)) for each in wraps):
        raise ValueError(f"new_grid: periodic is {periodic!r}; expected a bool, or {len(given)} of them{on_rank()}")
    called = None if names is None else tuple(checks.one_or_more(names))
    if called is not None:
        if not all(isinstance(each, str) for each in called):
            raise TypeError(f"new_grid: names are {names!r}; expected {len(given)} strings{on_rank()}")
        if len(called) != len(given) or len(set(called)) != len(called):
            raise ValueError(f"new_grid: names are {called}; expected {len(given)}, each once{on_rank()}")
    return Layout(chosen, tuple(map(bool, wraps)), called)
