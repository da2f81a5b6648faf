"""Checkpoint: the time that a program is blocked by a checkpoint, and the time until the checkpoint is on the disk.

Each way writes the same arrays, a part on each rank, to its own folder below the working directory. The reference is a
copy of the arrays to existing memory, because every way has to wait at least for that. If PyTorch is installed, its
Distributed Checkpoint over gloo is measured too.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hpccomm as hc
from hpccomm.bench.contenders import contender_class
from hpccomm.bench.measure import Plan
from hpccomm.debug.words import size_in_words

from . import study

ARRAYS = 4  # per rank
SMALLEST = 1 << 20  # bytes per rank; smaller checkpoints only measure the file system
ITERATIONS = 5
WARM_UP = 2  # the first iterations allocate memory, also in the file system's cache
LOOK = 0.1  # seconds for which the loop's speed is measured


class Way(NamedTuple):
    """A way of saving: the program calls `begin`; `is_done` and `wait` take its result."""

    begin: Callable[[int], Any]  # takes the number of a step
    is_done: Callable[[Any], bool] = bool
    wait: Callable[[Any], object] = bool


@dataclass(frozen=True)
class Step:
    """The times of one way and size: medians of the iterations, each on the slowest rank."""

    way: str
    nbytes: int  # on each rank
    stall_ms: float  # time until the call returns
    ratio: float  # of the stall to a copy of the arrays
    total_ms: float  # time until the checkpoint is on the disk
    megabytes_per_s: float  # of all ranks together, over the total time
    pace: float  # the speed of a Python loop during the save, relative to before; 0: the program was blocked


def steps(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> Iterator[Step]:
    """Yield the times of each size and way, on every rank."""
    folder = [tempfile.mkdtemp(dir=".", prefix="hpccomm-bench-") if world.rank == 0 else ""]
    world.broadcast_object_list(folder, 0)
    torch, close = _torch(world)
    for nbytes in [each for each in sizes if each >= SMALLEST] or sizes:
        count = max(1, nbytes // ARRAYS // 8)
        arrays = {f"array {i}": np.random.default_rng(i).random(count) for i in range(ARRAYS)}
        place = Path(folder[0]) / str(nbytes)
        ways = {**ours(place / "hpccomm", arrays), **torch(place / "torch", arrays)}
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        shuffled = np.random.default_rng(0)  # the same on every rank
        for i in range(WARM_UP + (plan.iterations or ITERATIONS)):
            for name in shuffled.permutation(list(ways)).tolist():
                found[name].append(once(world, ways[name], i))
        copy = float(np.median([stall for stall, _, _ in found["copy"][WARM_UP:]]))
        for name, times in found.items():
            stall, total, pace = (float(np.median(each)) for each in zip(*times[WARM_UP:]))
            all_bytes = ARRAYS * count * 8 * world.size
            yield Step(name, ARRAYS * count * 8, 1e3 * stall, stall / copy, 1e3 * total, all_bytes / 1e6 / total, pace)
    close()
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder[0])


def once(world: hc.ProcessGroup, way: Way, step: int) -> tuple[float, float, float]:
    """Save twice; return the seconds until the call returns and until all is done, and the relative pace of a loop."""
    assert world.comm is not None
    world.comm.Barrier()
    began = time.perf_counter()
    handle = way.begin(step)
    stall = time.perf_counter() - began
    way.wait(handle)
    mine = np.array([stall, time.perf_counter() - began, 0.0])
    if handle is not None:
        alone = pace(partial(passed, time.perf_counter() + LOOK))
        handle = way.begin(step)
        mine[2] = -pace(partial(way.is_done, handle)) / alone
        way.wait(handle)
    world.all_reduce(mine, "max")
    return float(mine[0]), float(mine[1]), -float(mine[2])


def passed(deadline: float) -> bool:
    """Return True after the deadline."""
    return time.perf_counter() > deadline


def pace(is_over: Callable[[], bool]) -> float:
    """Run a Python loop, which holds the GIL, until `is_over`; return its turns per second."""
    began, turns = time.perf_counter(), 0
    while True:
        for _ in range(1000):
            pass
        turns += 1
        if is_over():
            return turns / (time.perf_counter() - began)


def ours(folder: Path, arrays: Mapping[str, Any]) -> dict[str, Way]:
    """Return the copy and hpccomm's ways."""
    copies = {name: array.copy() for name, array in arrays.items()}

    def copy(_: int) -> None:
        for name, array in arrays.items():
            np.copyto(copies[name], array)

    save = partial(hc.checkpoint.save, folder / "save", arrays, keep=1)  # like torch
    save_async = partial(hc.checkpoint.save_async, folder / "save_async", arrays, keep=1)
    return {"copy": Way(copy), "save": Way(save), "save_async": Way(save_async, hc.Work.is_completed, hc.Work.wait)}


def _torch(world: hc.ProcessGroup) -> tuple[Callable[[Path, Mapping[str, Any]], dict[str, Way]], Callable[[], None]]:
    """Return a function that makes the ways of torch's Distributed Checkpoint (none without PyTorch), and its end."""
    chosen = contender_class("torch-gloo")
    assert world.comm is not None
    if any(world.comm.allgather(chosen.missing())):
        return (lambda *_: {}), (lambda: None)
    contender: Any = chosen(world, world.comm)
    from torch.distributed import checkpoint as dcp

    warnings.filterwarnings("ignore", "Detected an existing checkpoint")

    def ways(folder: Path, arrays: Mapping[str, Any]) -> dict[str, Way]:
        # each rank uses its own names: torch writes tensors with the same name on one rank only
        tensors = {f"{name} of rank {world.rank}": contender.torch.from_numpy(array) for name, array in arrays.items()}

        def save(_: int) -> None:
            dcp.save(tensors, checkpoint_id=folder / "save")

        def async_save(_: int) -> Any:
            return dcp.async_save(tensors, checkpoint_id=folder / "async_save")

        return {"torch save": Way(save), "torch async": Way(async_save, lambda f: f.done(), lambda f: f.result())}

    return ways, contender.close


def text(found: Sequence[Step]) -> str:
    """Return a table for each size."""
    lines = [
        "stall: until the call returns, and beside a copy of the arrays; total: until it is on the disk; MB/s: of all",
        "ranks, until then; loop: the speed of a loop in Python while it is written. Medians, each of the slowest rank",
    ]
    for nbytes in dict.fromkeys(each.nbytes for each in found):
        lines += ["", f"{size_in_words(nbytes)} on each rank, in {ARRAYS} arrays"]
        lines += [f"{'':>12}{'stall ms':>12}{'/ copy':>9}{'total ms':>12}{'MB/s':>9}{'loop':>7}"]
        for each in found:
            if each.nbytes == nbytes:
                line = f"{each.way:>12}{each.stall_ms:>12.2f}{each.ratio:>9.2f}{each.total_ms:>12.2f}"
                is_copy, stands = each.way == "copy", each.pace == 0
                line += (
                    f"{'' if is_copy else f'{each.megabytes_per_s:.0f}':>9}{'' if stands else f'{each.pace:.2f}':>7}"
                )
                lines.append(line.rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    study.main(__doc__, steps, text)
