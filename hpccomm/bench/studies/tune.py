"""``--tune``: measure the sizes at which an operation should change its algorithm; HPCCOMM_TUNING reads the result.

Each algorithm has a group with its own tuning; the groups take turns (`measure`). Among piece sizes, the one with the
smallest geometric mean of its medians is chosen. A threshold is the smallest size from which the second algorithm is
always faster. Node memory is not used before it is measured itself.
`thread_bytes` is not measured: see ``benchmarks/overlap.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import hpccomm as hc

from ... import native
from ...debug.words import size_in_words
from ...process.tuning import NEVER, Tuning
from ..measure import Plan, measure

KIB, MIB = 1 << 10, 1 << 20
Medians = dict[int, dict[str, float]]
Make = Callable[[hc.ProcessGroup, int], Callable[[], Any]]


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure; tests measure fewer."""

    segments: Sequence[int] = (MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
    reductions: Sequence[int] = (16 * MIB, 64 * MIB)
    reduce_scatters: Sequence[int] = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
    nodes: Sequence[int] = (1 * KIB, 8 * KIB, 64 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
    chunks: Sequence[int] = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB)
    shared: Sequence[int] = (32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
    shared_reduction: int = 8 * MIB
    directs: Sequence[int] = (2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB)


def tune(world: hc.ProcessGroup, plan: Plan, sizes: Sizes | None = None) -> tuple[Tuning, str]:
    """Return rank 0's tuning for this machine, and the measurements as text. Every rank calls it."""
    sizes = sizes or Sizes()
    table = Tuning(node_bytes=0)
    lines: list[str] = []
    has_node = _has_node(world)
    trial = _Trial(world, plan, lines)

    ways = {size_in_words(each): table._replace(segment_bytes=each) for each in sizes.segments}
    medians = trial.medians("all_reduce in segments of", ways, sizes.reductions, _all_reduce)
    table = table._replace(segment_bytes=ways[_fastest(medians)].segment_bytes)

    at = {"one call": NEVER, "pieces": 1}
    ways = {name: table._replace(reduce_scatter_bytes=nbytes) for name, nbytes in at.items()}
    medians = trial.medians("reduce_scatter_single in", ways, sizes.reduce_scatters, _reduce_scatter)
    table = table._replace(reduce_scatter_bytes=max(1, _second_wins_from(medians) - 1))  # the largest size for one call

    if world.size > 1 and hc.get_node_count(world) == 1:
        if has_node:
            at = {"memory of the node": NEVER, "MPI": 0}
            ways = {name: table._replace(node_bytes=nbytes, node_reduction_bytes=NEVER) for name, nbytes in at.items()}
            moved = _first_wins_up_to(trial.medians("all_gather_single by", ways, sizes.nodes, _all_gather))
            made = {"all_reduce": _all_reduce, "reduce_scatter_single": _reduce_scatter}
            both = sorted({*sizes.nodes, *sizes.reduce_scatters})
            tried = [trial.medians(f"{name} by", ways, both, make) for name, make in made.items()]
            reduced = min(map(_first_wins_up_to, tried))
            table = table._replace(node_bytes=max(moved, min(reduced, 1)), node_reduction_bytes=max(reduced, 1))
            at = {"packing": NEVER, "direct copies": 1}
            ways = {name: table._replace(node_bytes=1, direct_bytes=nbytes) for name, nbytes in at.items()}
            medians = trial.medians("exchange by", ways, sizes.directs, _exchange)
            table = table._replace(direct_bytes=_second_wins_from(medians))

        ways = {size_in_words(each): table._replace(shared_bytes=1, shared_chunk_bytes=each) for each in sizes.chunks}
        medians = trial.medians("shared all_reduce in chunks of", ways, [sizes.shared_reduction], _shared_all_reduce)
        table = table._replace(shared_chunk_bytes=ways[_fastest(medians)].shared_chunk_bytes)
        ways = {"MPI": table._replace(shared_bytes=NEVER), "in place": table._replace(shared_bytes=1)}
        medians = trial.medians("shared all_reduce by", ways, sizes.shared, _shared_all_reduce)
        table = table._replace(shared_bytes=_second_wins_from(medians))
    else:
        lines.append("node-shared arrays: not measured, for this needs several ranks on one node")
    if not has_node:
        table = table._replace(node_bytes=Tuning().node_bytes)
        lines.append(
            "memory of the node: not measured: it needs the compiled extension, several ranks on a node, and space"
        )

    assert world.comm is not None
    return world.comm.bcast((table, "\n".join(lines)))  # type: ignore[no-any-return]


def _has_node(world: hc.ProcessGroup) -> bool:
    """Return True if collectives use node memory here; the function tries it."""
    assert world.comm is not None
    if not all(world.comm.allgather(native.fastpath is not None)):
        return False  # ranks with the extension would wait for the others
    with _groups({"": Tuning()}) as groups:
        for _ in range(20):  # the first barriers use MPI
            groups[""].barrier()
        return groups[""].dispatcher.fast_path.node_part > 0  # the same on all ranks


@dataclass(frozen=True)
class _Trial:
    """Measurements of several algorithms; the medians are appended to `lines`."""

    world: hc.ProcessGroup
    plan: Plan
    lines: list[str]

    def medians(self, what: str, ways: Mapping[str, Tuning], sizes: Sequence[int], make: Make) -> Medians:
        """Return the medians in seconds, by size and by the name in `ways`."""
        comm = self.world.comm
        assert comm is not None
        found: Medians = {}
        for size in sizes:
            with _groups(ways) as groups:
                calls = {name: make(group, size) for name, group in groups.items()}
                times = measure(calls, comm, self.plan)
                del calls
            found[size] = comm.bcast({name: time.median for name, time in times.items()})
            columns = "  ".join(f"{name}: {seconds * 1e6:.0f} us" for name, seconds in found[size].items())
            self.lines.append(f"{what} ({size_in_words(size)}):  {columns}")
        return found


def _fastest(medians: Medians) -> str:
    """Return the name with the smallest geometric mean."""
    names = next(iter(medians.values()))
    return min(names, key=lambda name: float(np.mean([np.log(of_size[name]) for of_size in medians.values()])))


def _second_wins_from(medians: Medians) -> int:
    """Return the smallest size from which the second algorithm always wins."""
    pairs = {size: tuple(of_size.values()) for size, of_size in medians.items()}
    return threshold([(size, second < first) for size, (first, second) in pairs.items()])


def _first_wins_up_to(medians: Medians) -> int:
    """Return the largest size below that of `_second_wins_from`; 0 if the second algorithm always wins."""
    limit = _second_wins_from(medians)
    return max((size for size in medians if size < limit), default=0)


def threshold(wins: Sequence[tuple[int, bool]]) -> int:
    """Return the smallest size from which every size is won; NEVER if the largest is lost."""
    smallest = NEVER
    for size, won in reversed(wins):
        if not won:
            break
        smallest = size
    return smallest


@contextmanager
def _groups(ways: Mapping[str, Tuning]) -> Iterator[dict[str, hc.ProcessGroup]]:
    """Make a group with each tuning, and destroy the groups at the end."""
    groups: dict[str, hc.ProcessGroup] = {}
    for name, table in ways.items():
        group = hc.new_group()
        assert isinstance(group, hc.ProcessGroup)
        group.tuning = table  # in time: the first operation makes the backend
        groups[name] = group
    yield groups
    for group in groups.values():
        hc.destroy_process_group(group)


def _all_reduce(group: hc.ProcessGroup, nbytes: int) -> Callable[[], Any]:
    return partial(group.all_reduce, np.zeros(nbytes // 4, np.float32))


def _all_gather(group: hc.ProcessGroup, nbytes: int) -> Callable[[], Any]:
    part = nbytes // 4 // group.size
    return partial(group.all_gather_single, np.empty(part * group.size, np.float32), np.ones(part, np.float32))


def _reduce_scatter(group: hc.ProcessGroup, nbytes: int) -> Callable[[], Any]:
    part = nbytes // 4 // group.size
    return partial(group.reduce_scatter_single, np.empty(part, np.float32), np.ones(part * group.size, np.float32))


def _exchange(group: hc.ProcessGroup, nbytes: int) -> Callable[[], Any]:
    part, following = nbytes // 4, (group.rank + 1) % group.size
    want, have = (slice(rank * part, (rank + 1) * part) for rank in (following, group.rank))
    return hc.redistribute_init(np.empty(part, np.float32), np.ones(part, np.float32), want, have, group).run


def _shared_all_reduce(group: hc.ProcessGroup, nbytes: int) -> Callable[[], Any]:
    array = hc.empty_shared(nbytes // 4, np.float32, group)
    array[...] = 0
    return partial(group.all_reduce, array)
