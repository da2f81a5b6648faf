"""Solve the heat equation on a square plate that is split in two dimensions, and draw the result.

    mpiexec -n 4 python jobs/heat2d.py
    mpiexec -n 4 python jobs/heat2d.py --device cuda  # on GPUs, one for each rank

Each rank owns a block of the plate with a frame of one cell around it. Before each step the blocks' edges travel to
the neighbours' frames (batch_isend_irecv); while they are on the way, the inside of the block is computed, which does
not need them. Columns are sent as they are, without packing: hpccomm takes strided arrays.

The job is right if the result equals that of one rank alone, bit for bit. Exit status: 0 if it does, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from types import ModuleType

import numpy as np

import hpccomm as hc

COEFFICIENT = 0.2  # diffusivity * time step / cell size^2; the explicit scheme is stable up to 0.25


@dataclass(frozen=True)
class Block:
    """The rows and columns of the plate that one rank owns, and the ranks that own those beside it."""

    rows: slice
    columns: slice
    above: int | None
    below: int | None
    left: int | None
    right: int | None


def split_ranks(ranks: int) -> tuple[int, int]:
    """Arrange `ranks` in rows and columns, as nearly square as they divide (what MPI_Dims_create does)."""
    columns = next(divisor for divisor in range(isqrt(ranks), 0, -1) if ranks % divisor == 0)
    return ranks // columns, columns


def split_plate(size: int, ranks: int) -> list[Block]:
    """Return the block of each rank. The plate's outermost cells belong to nobody: they keep their temperature."""
    down, across = split_ranks(ranks)
    row_edges, column_edges = inner_edges(size, down), inner_edges(size, across)
    blocks = []
    for rank in range(ranks):
        i, j = divmod(rank, across)
        blocks.append(
            Block(
                rows=slice(row_edges[i], row_edges[i + 1]),
                columns=slice(column_edges[j], column_edges[j + 1]),
                above=rank - across if i > 0 else None,
                below=rank + across if i < down - 1 else None,
                left=rank - 1 if j > 0 else None,
                right=rank + 1 if j < across - 1 else None,
            )
        )
    return blocks


def inner_edges(size: int, parts: int) -> list[int]:
    """Return where `parts` nearly equal parts of 1 ... size - 2 begin, and where the last one ends."""
    return [1 + (size - 2) * part // parts for part in range(parts + 1)]


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


def start_exchange(field: np.ndarray, block: Block) -> list[hc.Work]:
    """Start to send the edges of this rank's block to its neighbours, and to receive theirs into the frame."""
    sides = [
        (block.above, field[1, 1:-1], field[0, 1:-1]),
        (block.below, field[-2, 1:-1], field[-1, 1:-1]),
        (block.left, field[1:-1, 1], field[1:-1, 0]),
        (block.right, field[1:-1, -2], field[1:-1, -1]),
    ]
    messages = []
    for neighbour, edge, frame in sides:
        if neighbour is not None:
            messages += [hc.P2POp(hc.irecv, frame, neighbour), hc.P2POp(hc.isend, edge, neighbour)]
    return hc.batch_isend_irecv(messages) if messages else []


def diffuse(block: Block, size: int, steps: int, xp: ModuleType) -> np.ndarray:
    """Return the temperatures of this rank's block after `steps` time steps, as an array of `xp`: NumPy or CuPy."""
    with_frame = (slice(each.start - 1, each.stop + 1) for each in (block.rows, block.columns))
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
    for _ in range(steps):
        halos = start_exchange(old, block)
        update(old, new, inner_rows, inner_columns)  # needs no neighbour: the messages travel meanwhile
        for halo in halos:
            halo.wait()
        for rows, columns in rim:
            update(old, new, rows, columns)
        old, new = new, old
    return old[1:-1, 1:-1]


def gather_plate(mine: np.ndarray, blocks: list[Block], size: int, xp: ModuleType) -> np.ndarray | None:
    """Return the whole plate on rank 0, None on the others."""
    if hc.get_rank() != 0:
        hc.gather(mine, dst=0)
        return None
    plate = xp.asarray(first_temperatures(size, slice(0, size), slice(0, size)))  # for its outermost cells
    hc.gather(mine, [plate[block.rows, block.columns] for block in blocks], dst=0)
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


def draw(plate: np.ndarray, blocks: list[Block], steps: int, file: Path) -> None:
    """Write a picture of the plate, with the ranks' blocks outlined."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files, without a display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    picture = axes.imshow(plate, cmap="inferno")
    for rank, block in enumerate(blocks):
        corner = block.columns.start - 0.5, block.rows.start - 0.5
        width, height = block.columns.stop - block.columns.start, block.rows.stop - block.rows.start
        axes.add_patch(pyplot.Rectangle(corner, width, height, fill=False, color="white", linewidth=0.5))
        axes.annotate(f"rank {rank}", corner, (3, -3), textcoords="offset points", color="white", size=7, va="top")
    axes.set_title(f"after {steps} steps")
    figure.colorbar(picture, label="temperature")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def from_rank_0(value: bool) -> bool:
    """Return rank 0's `value` on every rank."""
    array = np.array([value])
    hc.broadcast(array, src=0)
    return bool(array[0])


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
        down, across = split_ranks(world.size)
        if options.size - 2 < down:
            if world.rank == 0:
                print(
                    f"--size {options.size} is too small: {world.size} ranks need {down + 2} or more", file=sys.stderr
                )
            return 2
        if world.rank == 0:
            print(f"plate {options.size} x {options.size}, {options.steps} steps, {down} x {across} ranks", flush=True)
        blocks = split_plate(options.size, world.size)

        hc.barrier()
        start = time.perf_counter()
        mine = diffuse(blocks[world.rank], options.size, options.steps, xp)
        if on_gpus:
            xp.cuda.get_current_stream().synchronize()
        hc.barrier()
        seconds = time.perf_counter() - start

        plate = gather_plate(mine, blocks, options.size, xp)
        right = True
        if plate is not None:
            draw(plate, blocks, options.steps, options.output)
            wrong_cells = np.count_nonzero(plate != serial(options.size, options.steps))
            right = wrong_cells == 0
            verdict = (
                "equals the serial answer bit for bit  OK"
                if right
                else f"WRONG: {wrong_cells} cells differ from the serial answer"
            )
            print(f"picture in {options.output}\nranks {world.size}  {seconds:.2f} s  {verdict}", flush=True)
        return 0 if from_rank_0(right) else 1


if __name__ == "__main__":
    sys.exit(main())
