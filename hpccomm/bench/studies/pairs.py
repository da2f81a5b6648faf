"""Pairs: latency and bandwidth between every two ranks; it finds slow pairs of an allocation.

In each round every rank has another partner, as in a tournament: N - 1 rounds for N ranks. The pairs of a round are
measured at the same time, so pairs on a shared link get only a share of its bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import hpccomm as hc

from ..plot import pyplot_without_display

SMALL, LARGE = 8, 1 << 20  # bytes
BATCH, SAMPLES = 20, 7  # round trips of small messages in one sample; number of samples
SLOW = 2.0  # a pair is slow beyond this factor of the median of its kind
WIDEST = 16  # the most ranks for which a table is printed


@dataclass(frozen=True)
class Pair:
    """The result for two ranks; a message takes half a round trip."""

    ranks: tuple[int, int]
    same_node: bool
    latency_us: float  # for 8 bytes
    bandwidth_gbs: float  # for 1 MiB


def measured(world: hc.ProcessGroup) -> list[Pair]:
    """Return the results of all pairs, on every rank."""
    mine = []
    for partners in rounds(world.size):
        world.barrier()
        partner = partners.get(world.rank)
        if partner is not None:
            latency = round_trip(world, partner, SMALL, BATCH) / 2
            bandwidth = LARGE / (round_trip(world, partner, LARGE, 1) / 2)
            if world.rank < partner:
                same = world.nodes[world.rank] == world.nodes[partner]
                mine.append(Pair((world.rank, partner), same, 1e6 * latency, bandwidth / 1e9))
    assert world.comm is not None
    everybody: list[list[Pair]] = world.comm.allgather(mine)
    return sorted((pair for each in everybody for pair in each), key=lambda pair: pair.ranks)


def rounds(size: int) -> Iterator[dict[int, int]]:
    """Yield the partner of each rank for each round; every two ranks meet once (the circle method)."""
    seats = [*range(size), *([-1] if size % 2 else [])]
    for _ in range(len(seats) - 1):
        halves = zip(seats[: len(seats) // 2], reversed(seats))
        pairs = [(a, b) for a, b in halves if -1 not in (a, b)]
        yield {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        seats.insert(1, seats.pop())


def round_trip(world: hc.ProcessGroup, partner: int, nbytes: int, batch: int) -> float:
    """Return the median time of a round trip to the partner, in seconds."""
    array, is_first = np.zeros(nbytes, np.uint8), world.rank < partner
    samples = []
    for _ in range(SAMPLES + 1):
        start = time.perf_counter()
        for _ in range(batch):
            if is_first:
                world.send(array, partner)
                world.recv(array, partner)
            else:
                world.recv(array, partner)
                world.send(array, partner)
        samples.append((time.perf_counter() - start) / batch)
    return statistics.median(samples[1:])  # the first sample includes connecting


def text(pairs: Sequence[Pair], size: int) -> str:
    """Return the table (unless it is too wide), a line for each kind of pair, and the slow pairs."""
    lines = [f"{SMALL} bytes above the diagonal (us, one way), {LARGE >> 20} MiB below it (GB/s)", ""]
    if size <= WIDEST:
        of = {pair.ranks: pair for pair in pairs}
        lines.append("rank " + "".join(f"{rank:>8}" for rank in range(size)))
        for row in range(size):
            cells = [
                "-" if row == column
                else f"{of[row, column].latency_us:.2f}" if row < column
                else f"{of[column, row].bandwidth_gbs:.2f}"
                for column in range(size)
            ]  # fmt: skip
            lines.append(f"{row:>4} " + "".join(f"{cell:>8}" for cell in cells))
        lines.append("")
    for kind, of_kind in kinds(pairs):
        latencies, widths = [pair.latency_us for pair in of_kind], [pair.bandwidth_gbs for pair in of_kind]
        lines.append(
            f"{len(of_kind)} pairs {kind}: {statistics.median(latencies):.2f} us ({min(latencies):.2f} to "
            f"{max(latencies):.2f}), {statistics.median(widths):.2f} GB/s ({min(widths):.2f} to {max(widths):.2f})"
        )
    return "\n".join([*lines, *slow(pairs)])


def kinds(pairs: Sequence[Pair]) -> Iterator[tuple[str, list[Pair]]]:
    """Yield the pairs within nodes, then the pairs between nodes; skip a kind without pairs."""
    for kind, same in (("of one node", True), ("between nodes", False)):
        found = [pair for pair in pairs if pair.same_node == same]
        if found:
            yield kind, found


def slow(pairs: Sequence[Pair]) -> list[str]:
    """Return a line for each pair that is much slower than the others of its kind."""
    said = []
    for kind, of_kind in kinds(pairs):
        latency = statistics.median(pair.latency_us for pair in of_kind)
        width = statistics.median(pair.bandwidth_gbs for pair in of_kind)
        for pair in of_kind:
            us, gbs, who = pair.latency_us, pair.bandwidth_gbs, "slow: ranks {} and {}".format(*pair.ranks)
            if us > SLOW * latency:
                said.append(f"{who}: {us:.2f} us, {us / latency:.1f} times the median of those {kind}")
            if gbs < width / SLOW:
                said.append(f"{who}: {gbs:.2f} GB/s, the median of those {kind} is {width:.2f}")
    return said


def plot(pairs: Sequence[Pair], size: int, file: str) -> None:
    """Write heat maps of latency and bandwidth."""
    pyplot = pyplot_without_display()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5))
    fields = (("latency_us", f"{SMALL} bytes, one way (us)"), ("bandwidth_gbs", f"{LARGE >> 20} MiB (GB/s)"))
    for axis, (field, title) in zip(axes, fields):
        values = np.full((size, size), np.nan)
        for pair in pairs:
            values[pair.ranks] = values[pair.ranks[::-1]] = getattr(pair, field)
        figure.colorbar(axis.imshow(values, cmap="viridis"), ax=axis, shrink=0.8)
        axis.set_title(title)
        axis.set_xlabel("rank")
        axis.set_ylabel("rank")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
