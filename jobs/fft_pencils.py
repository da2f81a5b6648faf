"""Solve Poisson's equation in a periodic box by a 3-D Fourier transform over all ranks, and draw the result.

    mpiexec -n 4 python jobs/fft_pencils.py

The box is cut into pencils, one for each rank: along z they are whole, so SciPy transforms z. Then they change to
pencils that are whole along y, then to pencils along x (redistribute_init), and each time that axis is transformed. In
the spectrum the equation is a division; the same way back gives the solution.

The job is right if the solution is the one that the equation was made from: a sum of plane waves. Exit status: 0 if it
is, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import fft

import hpccomm as hc

X, Y, Z = range(3)
Box = tuple[slice, ...]
WAVES = 12
LARGEST_WAVE_NUMBER = 4  # along each axis
TOLERANCE = 1e-12  # of the solution, relative to its largest value: rounding errors are a hundredth of it


def pencil(coords: Sequence[int], dims: Sequence[int], shape: Sequence[int], along: int) -> Box:
    """Return the pencil at `coords` of p x q = `dims` ranks: whole along an axis; the others are cut into p and q."""
    box = [slice(0, cells) for cells in shape]
    cut = [axis for axis in (X, Y, Z) if axis != along]
    for axis, ranks, at in zip(cut, dims, coords):
        box[axis] = hc.block_slice(shape[axis], ranks, at)
    return tuple(box)


def size_of(box: Box) -> tuple[int, ...]:
    """Return the number of cells of a box along each axis."""
    return tuple(each.stop - each.start for each in box)


class PencilTransform:
    """The Fourier transform of real values, which are in pencils along z; the spectrum is in pencils along x.

    Only ranks along the grid's axis q exchange their parts between z and y, and only those along p between y and x.
    """

    def __init__(self, grid: hc.Grid, shape: Sequence[int]) -> None:
        self.shape = shape
        of_spectrum = *shape[:Z], shape[Z] // 2 + 1  # of real values: the other half is the conjugate of this one
        boxes = [pencil(grid.coords, grid.dims, of_spectrum, axis) for axis in (X, Y, Z)]
        self.spectrum_box = boxes[X]
        x, y, z = self.pencils = [np.zeros(size_of(box), complex) for box in boxes]
        self.z_to_y = hc.redistribute_init(y, z, boxes[Y], boxes[Z], group=grid["q"])
        self.y_to_x = hc.redistribute_init(x, y, boxes[X], boxes[Y], group=grid["p"])
        self.x_to_y = hc.redistribute_init(y, x, boxes[Y], boxes[X], group=grid["p"])
        self.y_to_z = hc.redistribute_init(z, y, boxes[Z], boxes[Y], group=grid["q"])

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Return this rank's part of the spectrum, in an array that is used again by the next call."""
        x, y, z = self.pencils
        z[...] = fft.rfft(values, axis=Z)
        self.z_to_y.run()
        y[...] = fft.fft(y, axis=Y)
        self.y_to_x.run()
        x[...] = fft.fft(x, axis=X)
        return x

    def back(self, spectrum: np.ndarray) -> np.ndarray:
        """Return this rank's part of the values that have this spectrum."""
        x, y, z = self.pencils
        x[...] = fft.ifft(spectrum, axis=X)
        self.x_to_y.run()
        y[...] = fft.ifft(y, axis=Y)
        self.y_to_z.run()
        values: np.ndarray = fft.irfft(z, self.shape[Z], axis=Z)
        return values


def inverse_laplacian(box: Box, shape: Sequence[int]) -> np.ndarray:
    """Return by what to multiply a part of the spectrum: -1 / |k|^2, and 0 for k = 0, so that the mean becomes 0."""
    numbers = [fft.fftfreq(cells, 1 / cells)[part] for cells, part in zip(shape, box)]
    square = sum(np.meshgrid(*(each**2 for each in numbers), indexing="ij", sparse=True))
    with np.errstate(divide="ignore"):
        return np.where(square == 0, 0, -1 / square)


def draw_waves(shape: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return wave vectors, which the cells can resolve and of which none is zero, and the waves' phases."""
    rng = np.random.default_rng(seed)
    largest = np.minimum((np.asarray(shape) - 1) // 2, LARGEST_WAVE_NUMBER)
    vectors = rng.integers(-largest, largest, (WAVES, 3), endpoint=True)
    vectors[~vectors.any(axis=1)] = largest
    return vectors, rng.uniform(0, 2 * np.pi, WAVES)


def known_solution(box: Box, shape: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a part of a sum of plane waves, in a box with sides of 2 pi, and of its Laplacian."""
    places = [2 * np.pi * np.arange(part.start, part.stop) / cells for cells, part in zip(shape, box)]
    x, y, z = np.meshgrid(*places, indexing="ij", sparse=True)
    values, laplacian = np.zeros(size_of(box)), np.zeros(size_of(box))
    for vector, phase in zip(*draw_waves(shape, seed)):
        wave = np.cos(vector[X] * x + vector[Y] * y + vector[Z] * z + phase)
        values += wave
        laplacian -= (vector @ vector) * wave
    return values, laplacian


def largest_of_all(value: float) -> float:
    """Return the largest of the ranks' values; NaN if a rank has it."""
    values = np.empty(hc.get_world_size())
    hc.all_gather_single(values, np.array([value]))
    return float(values.max())


def gather_plane(mine: np.ndarray, box: Box, shape: Sequence[int]) -> np.ndarray | None:
    """Return the values at z = 0 on rank 0, None on the others."""
    nothing = slice(0, 0)
    wanted = (slice(0, shape[X]), slice(0, shape[Y]), slice(0, 1)) if hc.get_rank() == 0 else (nothing,) * 3
    plane = np.empty(size_of(wanted))
    hc.redistribute(plane, mine, wanted, box)
    return plane[..., 0] if hc.get_rank() == 0 else None


def draw(plane: np.ndarray, grid: hc.Grid, shape: Sequence[int], file: Path) -> None:
    """Write a picture of the solution at z = 0, and of the pencils that it has been through."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files, without a display
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 3), layout="constrained")
    solution = figure.add_subplot(1, 4, 1, title="solution at z = 0", xlabel="x", ylabel="y")
    solution.imshow(plane.T, cmap=pyplot.get_cmap("RdBu", 12), origin="lower", interpolation="nearest")
    colours = pyplot.get_cmap("tab20").colors
    for number, along in enumerate((Z, Y, X), start=2):
        pencils = figure.add_subplot(1, 4, number, projection="3d", title=f"along {'xyz'[along]}")
        for axis in (pencils.xaxis, pencils.yaxis, pencils.zaxis):
            axis.labelpad = -12
        pencils.set(xlabel="x", ylabel="y", zlabel="z", xticks=[], yticks=[], zticks=[], box_aspect=shape)
        for rank in range(grid.size):
            box = pencil(grid.coords_of(rank), grid.dims, shape, along)
            if all(size_of(box)):
                starts = [each.start for each in box]
                pencils.bar3d(*starts, *size_of(box), color=colours[rank % len(colours)], edgecolor="white")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[120, 100, 90], metavar=("X", "Y", "Z"), help="cells (120 100 90)"
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="solve it N times (default: 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random waves (default: 0)")
    parser.add_argument(
        "--output", type=Path, default=Path("out/fft_pencils.png"), metavar="FILE.png",
        help="picture (out/fft_pencils.png)",
    )  # fmt: skip
    options = parser.parse_args()
    if min(options.shape) < 1 or max(options.shape) < 3:
        parser.error("--shape must be 1 or more along each axis, and 3 or more along one, or no wave fits in")
    if options.repeat < 1:
        parser.error("--repeat must be 1 or more")
    return options


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    shape = options.shape
    with hc.init_process_group() as world:
        grid = hc.new_grid((0, 0), names=("p", "q"))
        box = pencil(grid.coords, grid.dims, shape, Z)
        known, laplacian = known_solution(box, shape, options.seed)
        transform = PencilTransform(grid, shape)
        inverse = inverse_laplacian(transform.spectrum_box, shape)
        solution = np.empty_like(known)
        if world.rank == 0:
            cells, ranks = (" x ".join(map(str, each)) for each in (shape, grid.dims))
            print(f"{cells} cells, {ranks} pencils", flush=True)

        hc.barrier()
        start = time.perf_counter()
        for _ in range(options.repeat):
            solution = transform.back(inverse * transform.forward(laplacian))
        hc.barrier()
        seconds = (time.perf_counter() - start) / options.repeat

        error = largest_of_all(np.abs(solution - known).max(initial=0))
        error /= largest_of_all(np.abs(known).max(initial=0))
        right = error <= TOLERANCE

        plane = gather_plane(solution, box, shape)
        if plane is not None:
            draw(plane, grid, shape, options.output)
            print(
                f"picture in {options.output}\n"
                f"ranks {world.size}  {1e3 * seconds:.1f} ms for each solution  off the known one by {error:.1e}  "
                f"{'OK' if right else 'WRONG: not the known solution'}",
                flush=True,
            )
        hc.barrier()  # rank 0 draws for a while
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
