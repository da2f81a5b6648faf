"""Let two hills of water collapse, carried by particles that move from rank to rank, and draw the waves.

    mpiexec -n 4 python jobs/particles.py

The ranks stand on a periodic grid, and each owns a block of cells and the particles in it. In each step, particles that
have left the block are sent to their owners, which do not know of them in advance (exchange_sparse). Each particle
deposits its water into nine cells; some are ghosts, which are added to the neighbours' cells (halo_accumulate_init).
Then the ghosts get the depth of the water there (halo_exchange_init), and its slope pushes the particles.

The job is right if every particle is there once at the end, the cells hold all water after each step, and the energy
stays what it was. Exit status: 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hpccomm as hc

# Units: a cell, the depth of calm water, and the time in which a wave on calm water crosses a cell.
TIME_STEP = 0.1
HILLS = [(0.45, 0.3), (0.65, 0.75)]  # y and x, in sides of the square
HILL_WIDTH = 0.08  # in sides of the square
TOLERANCE = 0.01  # by which the energy may change, relative to that of the hills


class Particles(NamedTuple):
    """Some of the particles: places and velocities are y and x, of shape (particles, 2)."""

    places: np.ndarray
    velocities: np.ndarray
    ids: np.ndarray


class Water:
    """The depth of the water in this rank's block of cells, with a ghost around it."""

    def __init__(self, grid: hc.Grid, size: int, per_cell: int) -> None:
        self.box = tuple(hc.block_slice(size, ranks, at) for ranks, at in zip(grid.dims, grid.coords))
        self.per_cell = per_cell
        self.depth = np.zeros([each.stop - each.start + 2 for each in self.box])
        self.own = self.depth[1:-1, 1:-1]
        self.add_ghosts = hc.halo_accumulate_init(self.depth, grid)
        self.fill_ghosts = hc.halo_exchange_init(self.depth, grid)

    def acceleration(self, places: np.ndarray) -> np.ndarray:
        """Let the particles deposit their water, and return how it accelerates them: downhill."""
        cells = np.floor(places).astype(int)
        (wy, wx), (sy, sx) = (np.moveaxis(each, 1, 0) for each in shares((places - cells).T))
        first = cells - [each.start for each in self.box]  # of 3 x 3 cells: the block begins with a ghost
        rows, columns = np.moveaxis(np.arange(3)[:, None, None] + first.T, 1, 0)
        near = rows[:, None] * self.depth.shape[1] + columns

        water = wy[:, None] * wx / self.per_cell
        self.depth[...] = np.bincount(near.ravel(), water.ravel(), self.depth.size).reshape(self.depth.shape)
        for ghosts in (self.add_ghosts, self.fill_ghosts):
            ghosts.run()
        depth = self.depth.ravel()[near]
        uphill = (sy[:, None] * wx * depth).sum((0, 1)), (wy[:, None] * sx * depth).sum((0, 1))
        return -np.stack(uphill, axis=1)


def shares(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how much of a particle the cells before, around and after it get along an axis, and the derivatives.

    Offsets are those from the beginning of the cell, from 0 to 1. The three shares (a quadratic spline) add up to 1.
    """
    d = offsets - 0.5
    return np.stack([(0.5 - d) ** 2 / 2, 0.75 - d**2, (0.5 + d) ** 2 / 2]), np.stack([d - 0.5, -2 * d, d + 0.5])


def first_particles(ids: np.ndarray, size: int, per_side: int) -> Particles:
    """Return particles at the start: at rest, in even rows, but drawn to the tops of the hills."""
    rows = np.stack(np.divmod(ids, size * per_side), axis=1)
    even = (rows + 0.5) / per_side
    places = even.copy()
    for top in HILLS:
        away = even - np.multiply(top, size)
        places -= 0.4 * away * np.exp(-((away / (HILL_WIDTH * size)) ** 2).sum(axis=1, keepdims=True))
    return Particles(places % size, np.zeros_like(places), ids)


def send_to_owners(particles: Particles, grid: hc.Grid, size: int) -> Particles:
    """Send particles to the ranks whose blocks they are in, and return those that are in this rank's."""
    coords = []
    for axis, ranks in enumerate(grid.dims):
        starts = [hc.block_slice(size, ranks, at).start for at in range(ranks)]
        coords.append(np.searchsorted(starts, particles.places[:, axis], side="right") - 1)
    owners = np.asarray(np.ravel_multi_index(coords, grid.dims))
    stays = owners == grid.rank
    leaving = {
        grid.ranks[owner]: tuple(each[owners == owner] for each in particles) for owner in np.unique(owners[~stays])
    }
    arrived = hc.exchange_sparse(leaving, group=grid)
    parts = [tuple(each[stays] for each in particles), *arrived.values()]
    return Particles(*(np.concatenate(each) for each in zip(*parts)))


def flow(water: Water, particles: Particles, grid: hc.Grid, size: int, steps: int) -> tuple[Particles, np.ndarray]:
    """Move the particles; return this rank's, and for each step the energies and the water of all ranks.

    By velocity Verlet. The forces are exact derivatives of the sum of the energies, so that this stays: what is lost in
    a step comes back in another, and only the step's length matters.
    """
    particles = send_to_owners(particles, grid, size)
    acceleration = water.acceleration(particles.places)
    records = np.empty((steps + 1, 3))
    for step in range(steps + 1):
        if step > 0:
            velocities = particles.velocities + TIME_STEP / 2 * acceleration
            places = (particles.places + TIME_STEP * velocities) % size
            places[places == size] = 0  # what % makes of the smallest negative numbers
            particles = send_to_owners(Particles(places, velocities, particles.ids), grid, size)
            acceleration = water.acceleration(particles.places)
            particles.velocities[...] += TIME_STEP / 2 * acceleration
        kinetic = (particles.velocities**2).sum() / 2 / water.per_cell
        records[step] = kinetic, (water.own**2).sum() / 2, water.own.sum()
    hc.all_reduce(records)
    return particles, records


def fault(ids: np.ndarray, records: np.ndarray, size: int, per_cell: int) -> str:
    """Return what is wrong with the result, the same on every rank; nothing if it is right."""
    found = np.bincount(ids, minlength=size**2 * per_cell)
    hc.all_reduce(found)
    if (found != 1).any():
        return f"{np.count_nonzero(found != 1)} particles are lost, or there twice"
    if not np.allclose(records[:, 2], size**2, rtol=1e-12):
        return "the cells do not hold the particles' water"
    if not energy_change(records, size) <= TOLERANCE:
        return "the energy has changed"
    return ""


def energies(records: np.ndarray, size: int) -> np.ndarray:
    """Return the energies of the motion and of the depth after each step, less that of calm water."""
    above: np.ndarray = records[:, :2] - np.array([0, size**2 / 2])
    return above


def energy_change(records: np.ndarray, size: int) -> float:
    """Return by how much the energy has changed at most, relative to what it was at the start."""
    energy = energies(records, size).sum(axis=1)
    return float(np.abs(energy / energy[0] - 1).max())


def gather_depth(water: Water, size: int) -> np.ndarray | None:
    """Return the depth of the water everywhere on rank 0, None on the others."""
    side = slice(0, size if hc.get_rank() == 0 else 0)
    depth = np.empty((side.stop, side.stop))
    hc.redistribute(depth, water.own, (side, side), water.box)
    return depth if hc.get_rank() == 0 else None


def save_places(particles: Particles, count: int, file: Path) -> None:
    """Write the places of all particles, in the order of their numbers."""
    places = np.zeros((count, 2))
    places[particles.ids] = particles.places
    hc.reduce(places, dst=0)
    if hc.get_rank() == 0:
        np.savez(file, places=places)


def draw(depth: np.ndarray, records: np.ndarray, grid: hc.Grid, file: Path) -> None:
    """Write a picture of the water, with the ranks' blocks outlined, and of the energies."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files, without a display
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    picture = left.imshow(depth, cmap="Blues_r", interpolation="nearest")
    figure.colorbar(picture, label="depth")
    left.set_title(f"after {len(records) - 1} steps")
    for axis, draw_line in enumerate((left.axhline, left.axvline)):
        for at in range(1, grid.dims[axis]):
            draw_line(hc.block_slice(len(depth), grid.dims[axis], at).start - 0.5, color="black", linewidth=0.5)
    energy = energies(records, len(depth))
    times = TIME_STEP * np.arange(len(records))
    right.plot(times, energy, label=["of the motion", "of the depth"])
    right.plot(times, energy.sum(axis=1), label="both")
    right.set(title="energy above that of calm water", xlabel="time")
    right.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, metavar="N", help="cells along each side (default: 64)")
    parser.add_argument(
        "--per-side", type=int, default=3, metavar="N", help="N x N particles in each cell (default: 3)"
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="time steps (default: 200)")
    parser.add_argument(
        "--output", type=Path, default=Path("out/particles.png"), metavar="FILE.png", help="picture (out/particles.png)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="write the particles' last places to this file")
    options = parser.parse_args()
    if options.size < 2:
        parser.error("--size must be 2 or more: there is no hill in a single cell")
    return options


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    size, per_cell = options.size, options.per_side**2
    count = size**2 * per_cell
    with hc.init_process_group() as world:
        grid = hc.new_grid((0, 0), periodic=True, names=("y", "x"))
        down, across = grid.dims
        if size < down:
            if world.rank == 0:
                print(f"--size {size} is too small: {world.size} ranks need {down} or more", file=sys.stderr)
            return 2
        if world.rank == 0:
            print(
                f"{count} particles in {size} x {size} cells, {options.steps} steps, {down} x {across} ranks",
                flush=True,
            )

        water = Water(grid, size, per_cell)
        share = hc.block_slice(count, world.size, world.rank)
        particles = first_particles(np.arange(share.start, share.stop), size, options.per_side)
        hc.barrier()
        start = time.perf_counter()
        particles, records = flow(water, particles, grid, size, options.steps)
        seconds = time.perf_counter() - start

        wrong = fault(particles.ids, records, size, per_cell)
        if options.save:
            save_places(particles, count, options.save)
        depth = gather_depth(water, size)
        if depth is not None:
            draw(depth, records, grid, options.output)
            print(
                f"picture in {options.output}\n"
                f"ranks {world.size}  {seconds:.2f} s  energy changed by {energy_change(records, size):.1e}  "
                f"{f'WRONG: {wrong}' if wrong else 'OK'}",
                flush=True,
            )
        hc.barrier()  # rank 0 draws for a while
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
