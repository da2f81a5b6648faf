"""Grid: a group whose ranks have coordinates, as those of MPI's Cartesian topologies (MPI-4.1 §8.5)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import here
from ..job import failures, mpi_library
from . import checks
from .annotations import Integer
from .group import ProcessGroup, child_of, make_group
from .members import TO_NOBODY

PUBLIC = [
    "dims", "periodic", "names", "coords", "ndim", "shape", "mesh", "rank_of", "coords_of", "shift", "neighbours",
    "axis", "get_group", "get_local_rank", "get_coordinate",
]  # fmt: skip


class Layout(NamedTuple):
    """What a grid is, without its ranks."""

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]
    names: tuple[str, ...] | None

    def of(self, axes: Sequence[int]) -> Layout:
        """Return that of some of its axes."""
        names = None if self.names is None else tuple(self.names[axis] for axis in axes)
        return Layout(tuple(self.dims[axis] for axis in axes), tuple(self.periodic[axis] for axis in axes), names)


class Grid(ProcessGroup):
    """A group whose ranks stand on a grid: every operation takes it as ``group=``.

    Programs get one from :func:`new_grid`, and from :meth:`ProcessGroup.on` with a communicator that has a Cartesian
    topology. The last coordinate changes fastest from rank to rank. ``grid["x"]`` are the ranks along the axis x
    through this one, ``grid["y", "x"]`` those of a plane, in the order of the grid's axes: grids again, which were made
    with this one and are destroyed with it. An axis is named, or its number. Ranks are ranks *in the grid*, which
    methods take, and functions as `group_dst` and `group_src`.

    It has what c10d's ``DeviceMesh`` has of it: `ndim`, `shape`, `mesh`, `get_group`, `get_local_rank`,
    `get_coordinate`. (`size` is a number, as of every group.)

    Attributes
    ----------
    dims : tuple of int
        The number of ranks along each axis.
    periodic : tuple of bool
        Of each axis, whether its last rank is a neighbour of its first.
    names : tuple of str or None
        Of the axes, if they have any.
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
        """Return the coordinates of a rank of the grid: MPI_Cart_coords. ValueError if there is no such rank."""
        number = checks.integer("coords_of: rank", rank)
        if not 0 <= number < self.size:
            raise ValueError(f"coords_of: rank is {number}; {self!r} has ranks 0 to {self.size - 1}{here()}")
        return tuple(int(each) for each in np.unravel_index(number, self.dims))

    def rank_of(self, coords: Sequence[Integer]) -> int:
        """Return the rank of the grid at some coordinates: MPI_Cart_rank; along a periodic axis they wrap around.

        ValueError if they are not as many as the axes, or outside along an axis that is not periodic.
        """
        place = [checks.integer("rank_of: a coordinate", each) for each in coords]
        if len(place) != self.ndim:
            raise ValueError(f"rank_of: coords are {tuple(place)}; expected {self.ndim}, one for each axis{here()}")
        rank = self.at(place)
        if rank is None:
            raise ValueError(f"rank_of: coords are {tuple(place)}, outside {self!r}{here()}")
        return rank

    def at(self, place: Sequence[int]) -> int | None:
        """Return the rank at some coordinates; None if they are outside."""
        rank = 0
        for coordinate, size, wraps in zip(place, *self.layout[:2]):
            if not 0 <= coordinate < size and not wraps:
                return None
            rank = rank * size + coordinate % size
        return rank

    def shift(self, axis: Integer | str, by: Integer = 1) -> tuple[int, int]:
        """Return the ranks of the grid that are `by` before and after this one along an axis: MPI_Cart_shift.

        Returns
        -------
        source, destination : int
            What each rank sends `destination`, it gets from `source`. MPI.PROC_NULL beyond a border: messages to and
            from it are none.
        """
        along, steps = self.axis(axis), checks.integer("shift: by", by)
        mpi = mpi_library.load()
        found = []
        for step in (-steps, steps):
            rank = self.at([each + step * (number == along) for number, each in enumerate(self.coords)])
            found.append(mpi.PROC_NULL if rank is None else rank)
        return found[0], found[1]

    def neighbours(self) -> list[int]:
        """Return the ranks beside this one: of each axis the one before and the one after, or MPI.PROC_NULL.

        In the order of MPI's neighbourhood collectives (MPI-4.1 §8.6).
        """
        return [rank for axis in range(self.ndim) for rank in self.shift(axis)]

    def peer(self, operation: str, argument: str, global_rank: Integer | None, group_rank: Integer | None) -> int:
        """Return the group rank, as every group does; of messages it may be what `shift` returns at a border."""
        if operation in TO_NOBODY and global_rank is None and group_rank == mpi_library.load().PROC_NULL:
            return int(group_rank)  # type: ignore[arg-type]
        return super().peer(operation, argument, global_rank, group_rank)

    # -- axes ------------------------------------------------------------------------------------------

    def axis(self, axis: Integer | str) -> int:
        """Return the number of an axis, which is given by its name or its number; ValueError if there is none."""
        names = self.names or ()
        if isinstance(axis, str):
            if axis not in names:
                known = f"its axes are {', '.join(names)}" if names else "its axes have no names; number them from 0"
                raise ValueError(f"{self!r} has no axis {axis!r}; {known}{here()}")
            return names.index(axis)
        number = checks.integer("axis", axis)
        if not -self.ndim <= number < self.ndim:
            raise ValueError(f"{self!r} has no axis {number}; expected 0 to {self.ndim - 1}{here()}")
        return number % self.ndim

    def __getitem__(self, axes: Integer | str | tuple[Integer | str, ...]) -> Grid:
        chosen = tuple(self.axis(axis) for axis in (axes if isinstance(axes, tuple) else (axes,)))
        if chosen not in self._parts:
            raise ValueError(f"{self!r} has no part {axes!r}; name one axis or more, each once, in its order{here()}")
        return self._parts[chosen]

    def make_parts(self) -> None:
        """Make the groups of its axes and planes; every rank of the grid calls it."""
        for count in range(1, self.ndim):
            for axes in combinations(range(self.ndim), count):
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
        kind = functools.partial(Grid, layout)
        part = child_of(self.owner, comm, ranks, self.config, limits, name, self.description, kind=kind)
        assert isinstance(part, Grid)
        self.owner.children.remove(part)
        self.children.append(part)
        part.on_destroy = self.children.remove
        return part

    # -- as c10d's DeviceMesh ----------------------------------------------------------------------------

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
        """The global ranks, as an array of the grid's shape."""
        return np.array(self.ranks).reshape(self.dims)

    def get_group(self, mesh_dim: Integer | str | None = None) -> Grid:
        """Return the ranks along an axis through this one, ``grid[mesh_dim]``; of one axis alone the grid itself."""
        return self[self._only(mesh_dim)]

    def get_local_rank(self, mesh_dim: Integer | str | None = None) -> int:
        """Return this rank's coordinate along an axis, which may be left out where there is one only."""
        return self.coords[self._only(mesh_dim)]

    def get_coordinate(self) -> list[int]:
        """Return this rank's coordinates."""
        return list(self.coords)

    def _only(self, axis: Integer | str | None) -> int:
        if axis is None and self.ndim > 1:
            raise ValueError(f"{self!r} has {self.ndim} axes; give mesh_dim{here()}")
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
    """Return the grid of the fields of a group on a communicator with a Cartesian topology; every rank calls it."""
    dims, periodic, _ = comm.Get_topo()
    layout = Layout(tuple(dims), tuple(map(bool, periodic)), None)
    grid = make_group(kind=functools.partial(Grid, layout), **fields)
    assert isinstance(grid, Grid)
    grid.make_parts()
    return grid


def links_between(places: np.ndarray, periodic: Sequence[bool]) -> int:
    """Return the number of neighbours in a grid that have different numbers (of nodes)."""
    links = 0
    for axis, wraps in enumerate(periodic):
        if places.shape[axis] > 1:
            differs = places != np.roll(places, -1, axis)
            links += int(np.count_nonzero(differs if wraps else np.delete(differs, -1, axis)))
    return links


def on_nodes(nodes: Sequence[int], layout: Layout) -> list[int]:
    """Return the ranks in a new order, in which the fewest neighbours are on different nodes.

    Each node gets a block of the grid. Where the nodes have different numbers of ranks, or no block fits, the order
    stays as it is.
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
        # position (node's block, place in it) -> coordinates: interleave the axes of both
        order = np.array(members).reshape(*outer, *block)
        axes = [each for axis in range(len(dims)) for each in (axis, axis + len(dims))]
        ranks = order.transpose(axes).reshape(dims)
        links = links_between(of_node[ranks], periodic)
        if links < fewest:
            best, fewest = ranks.ravel().tolist(), links
    return best


def _blocks(ranks: int, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of blocks of so many ranks that divide a grid."""
    if not dims:
        return [()] if ranks == 1 else []
    divisors = [part for part in range(1, dims[0] + 1) if dims[0] % part == 0 and ranks % part == 0]
    return [(part, *rest) for part in divisors for rest in _blocks(ranks // part, dims[1:])]


def fitting(dims: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return shapes near `dims` that have `size` ranks: one for each axis that is chosen anew, and MPI's own."""
    mpi = mpi_library.load()
    found = [tuple(mpi.Compute_dims(size, [0] * len(dims)))]
    for axis, given in enumerate(dims):
        others = prod(each for number, each in enumerate(dims) if number != axis)
        if given and others and size % others == 0:
            found.insert(0, (*dims[:axis], size // others, *dims[axis + 1 :]))
    return list(dict.fromkeys(found))
