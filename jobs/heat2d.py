"""Solve the heat equation on a square plate that is split in two dimensions, and draw the result.

    mpiexec -n 4 python jobs/heat2d.py
    mpiexec -n 4 python jobs/heat2d.py --device cuda  # on GPUs, one for each rank

The ranks stand on a grid, and each owns a block of the plate with a frame of one cell around it. Before each step the
blocks' edges travel to the neighbours' frames (halo_exchange_init); while they are on the way, the inside of the block
is computed, which does not need them.

The job is right if the result equals that of one rank alone, bit for bit. Exit status: 0 if it does, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np

import hpccomm as hc

COEFFICIENT = 0.2  # diffusivity * time step / cell size^2; the explicit scheme is stable up to 0.25


def block_of(rank: int, grid: hc.Grid, size: int) -> tuple[slice, slice]:
    """Return the rows and columns of a rank. The plate's outermost cells belong to nobody: they keep their values."""
    inner = (hc.block_slice(size - 2, ranks, at) for ranks, at in zip(grid.dims, grid.coords_of(rank)))
    rows, columns = (slice(each.start + 1, each.stop + 1) for each in inner)
    return rows, columns


def first_temperatures(size: int, rows: slice, columns: slice) -> np.ndarray:
    """Return a part of the plate at the start: cold, with two hot discs and a warm upper edge, in degrees."""
    y = np.arange(rows.start, rows.stop)[:, None] / (size - 1)
    x = np.arange(columns.start, columns.stop)[None, :] / (size - 1)
    temperatures = np.zeros((y.size, x.size))
    temperatures[(y - 0.35) ** 2 + (x - 0.30) ** 2 < 0.15**2] = 100
    temperatures[(y - 0.65) ** 2 + (x - 0.70) ** 2 < 0.20**2] = 60
    temperatures[y[:, 0] == 0, :] = 30
    return temperatures


def update(old: np.ndarray, new: np.ndarray, rows: slice, columns: slice) -> None:
    """Do one time step for a rectangle of cells: each moves towards the mean of its four neighbours."""
    centre = old[rows, columns]
    above = old[rows.start - 1 : rows.stop - 1, columns]
    below = old[rows.start + 1 : rows.stop + 1, columns]
    left = old[rows, columns.start - 1 : columns.stop - 1]
    right = old[rows, columns.start + 1 : columns.stop + 1]
    new[rows, columns] = centre + COEFFICIENT * (above + below + left + right - 4 * centre)


def diffuse(grid: hc.Grid, size: int, steps: int, xp: ModuleType) -> np.ndarray:
    """Return the temperatures of this rank's block after `steps` time steps, as an array of `xp`: NumPy or CuPy."""
    with_frame = (slice(each.start - 1, each.stop + 1) for each in block_of(grid.rank, grid, size))
    old: np.ndarray = xp.asarray(first_temperatures(size, *with_frame))
    new = old.copy()
    height, width = old.shape[0] - 2, old.shape[1] - 2
    inner_rows, inner_columns = slice(2, height), slice(2, width)
    rim = [
        (slice(1, 2), slice(1, width + 1)),
        (slice(height, height + 1), slice(1, width + 1)),
        (inner_rows, slice(1, 2)),
        (inner_rows, slice(width, width + 1)),
    ]
    frames = [hc.halo_exchange_init(field, grid, corners=False) for field in (old, new)]
    for step in range(steps):
        frame = frames[step % 2]
        frame.start()
        update(old, new, inner_rows, inner_columns)  # needs no neighbour: the edges travel meanwhile
        frame.wait()
        for rows, columns in rim:
            update(old, new, rows, columns)
        old, new = new, old
    return old[1:-1, 1:-1]


def gather_plate(mine: np.ndarray, grid: hc.Grid, size: int, xp: ModuleType) -> np.ndarray | None:
    """Return the whole plate on rank 0, None on the others."""
    if grid.rank != 0:
        hc.gather(mine, dst=0, group=grid)
        return None
    plate = xp.asarray(first_temperatures(size, slice(0, size), slice(0, size)))  # for its outermost cells
    hc.gather(mine, [plate[block_of(rank, grid, size)] for rank in range(grid.size)], dst=0, group=grid)
    on_host: np.ndarray = plate if xp is np else plate.get()
    return on_host


def serial(size: int, steps: int) -> np.ndarray:
    """Return the plate as one rank computes it, without blocks, frames or messages."""
    old = first_temperatures(size, slice(0, size), slice(0, size))
    new = old.copy()
    inside = slice(1, size - 1)
    for _ in range(steps):
        update(old, new, inside, inside)
        old, new = new, old
    return old


def draw(plate: np.ndarray, grid: hc.Grid, steps: int, file: Path) -> None:
    """Write a picture of the plate, with the ranks' blocks outlined."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files, without a display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    picture = axes.imshow(plate, cmap="inferno")
    for rank in range(grid.size):
        rows, columns = block_of(rank, grid, len(plate))
        corner = columns.start - 0.5, rows.start - 0.5
        width, height = columns.stop - columns.start, rows.stop - rows.start
        axes.add_patch(pyplot.Rectangle(corner, width, height, fill=False, color="white", linewidth=0.5))
        axes.annotate(f"rank {rank}", corner, (3, -3), textcoords="offset points", color="white", size=7, va="top")
    axes.set_title(f"after {steps} steps")
    figure.colorbar(picture, label="temperature")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=400, metavar="N", help="cells along each side (default: 400)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the plate is (cpu)")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="time steps (default: 1000)")
    parser.add_argument(
        "--output", type=Path, default=Path("out/heat2d.png"), metavar="FILE.png", help="picture (out/heat2d.png)"
    )
    return parser.parse_args()


def main() -> int:
    """Run the job and return its exit status, the same on every rank."""
    options = parse_arguments()
    on_gpus = options.device == "cuda"
    xp = importlib.import_module("cupy" if on_gpus else "numpy")
    with hc.init_process_group(device_id="auto" if on_gpus else None) as world:
        grid = hc.new_grid((0, 0), names=("y", "x"))
        down, across = grid.dims
        if options.size - 2 < down:
            if world.rank == 0:
                print(
                    f"--size {options.size} is too small: {world.size} ranks need {down + 2} or more", file=sys.stderr
                )
            return 2
        if world.rank == 0:
            print(f"plate {options.size} x {options.size}, {options.steps} steps, {down} x {across} ranks", flush=True)

        hc.barrier()
        start = time.perf_counter()
        mine = diffuse(grid, options.size, options.steps, xp)
        if on_gpus:
            xp.cuda.get_current_stream().synchronize()
        hc.barrier()
        seconds = time.perf_counter() - start

        plate = gather_plate(mine, grid, options.size, xp)
        right = True
        if plate is not None:
            draw(plate, grid, options.steps, options.output)
            wrong_cells = np.count_nonzero(plate != serial(options.size, options.steps))
            right = wrong_cells == 0
            verdict = (
                "equals the serial answer bit for bit  OK"
                if right
                else f"WRONG: {wrong_cells} cells differ from the serial answer"
            )
            print(f"picture in {options.output}\nranks {world.size}  {seconds:.2f} s  {verdict}", flush=True)
        return 0 if hc.agree(right) else 1


if __name__ == "__main__":
    sys.exit(main())
