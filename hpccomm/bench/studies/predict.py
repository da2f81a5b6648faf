"""``--model``: measure points, fit the model, and draw it out to 65,536 ranks.

Groups of 1, 2, 4 ... ranks are measured, each the first ranks of the world; the group of one gives what a call of each
operation costs that communicates with nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import hpccomm as hc

from ..measure import Plan
from ..registry import load
from ..report import bandwidth
from ..session import Session
from .fit import Fit, Point, fit
from .model import Machine, best, crossovers

MEASURED = ("ping_pong", "barrier", "all_reduce", "reduce_scatter_single", "all_gather_single", "broadcast",
            "reduce", "all_to_all_single")  # fmt: skip
PREDICTED = ("all_reduce", "reduce_scatter_single", "all_gather_single", "broadcast", "reduce", "all_to_all_single",
             "barrier")  # fmt: skip
RANKS = (8, 64, 512, 4096, 32768, 65536)
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)


@dataclass(frozen=True)
class Network:
    """What is assumed of the nodes where only one has been measured."""

    ranks_per_node: int = 64
    alpha: float = 2e-6  # s
    beta: float = 1 / 25e9  # s per byte: 200 Gbit/s


def collect(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan) -> list[Point]:
    """Measure, and return the points of all groups. Every rank calls it."""
    benchmarks = load()
    assert world.comm is not None
    ranks_per_node: int = world.comm.bcast(hc.get_local_size(world))
    points: list[Point] = []
    calls: dict[str, float] = {}
    for count in sorted({1, world.size, *(2**i for i in range(1, world.size.bit_length()))}):
        group = hc.new_group(range(count))
        if isinstance(group, hc.ProcessGroup):
            with Session(group, ()) as session:
                for benchmark in (benchmarks[name] for name in MEASURED):
                    if count < benchmark.least_ranks:
                        continue
                    for rows in session.run(benchmark, sizes[:1] if count == 1 else sizes):
                        seconds = (rows[0].median_us or 0.0) * 1e-6
                        if count == 1:
                            calls[benchmark.name] = seconds
                        else:
                            call = calls.get(benchmark.name, calls["barrier"])
                            size = rows[0].size_bytes
                            points.append(Point(benchmark.name, count, size, seconds, ranks_per_node, call))
            hc.destroy_process_group(group)
        calls = world.comm.bcast(calls)  # and nobody is ahead while others measure
    collected: list[Point] = world.comm.bcast(points)
    return collected


def on_a_cluster(found: Fit, network: Network, nodes: int) -> Machine:
    """Return the machine to predict with: what was not measured is assumed."""
    if nodes > 1:
        return found.machine
    return replace(found.machine, ranks_per_node=network.ranks_per_node, alpha=network.alpha, beta=network.beta)


def report(points: Sequence[Point], found: Fit, network: Network, nodes: int) -> str:
    """Return the parameters, how well they fit, the predictions, and where the best algorithm changes."""
    machine = on_a_cluster(found, network, nodes)
    lines = ["model: alpha-beta-gamma, fitted to the measured points by relative least squares", ""]
    lines += parameters(found, machine, nodes)
    lines += ["", *quality(points, found)]
    for operation in PREDICTED:
        call = next(point.call for point in points if point.operation == operation)
        lines += ["", *predictions(operation, replace(machine, call=call))]
    return "\n".join(lines)


def parameters(found: Fit, machine: Machine, nodes: int) -> list[str]:
    """Return one line for each parameter: its value, and where it comes from."""

    def source(name: str) -> str:
        if name in ("alpha", "beta") and nodes == 1:
            return "assumed (--network)"
        return "fitted" if name in found.determined else "not measured"

    def rate(beta: float) -> str:
        return f"{bandwidth(1e-9 / beta)} GB/s" if beta else "no cost seen"

    how = "measured" if nodes > 1 else "assumed (--ranks-per-node)"
    rows = [
        ("node_alpha", f"{machine.node_alpha * 1e6:.3f} us", "a message within a node", source("node_alpha")),
        ("node_beta", rate(machine.node_beta), "its bandwidth", source("node_beta")),
        ("alpha", f"{machine.alpha * 1e6:.3f} us", "a message between nodes", source("alpha")),
        ("beta", rate(machine.beta), "the bandwidth of a node's link", source("beta")),
        ("gamma", rate(machine.gamma), "reducing", source("gamma")),
        ("ranks per node", str(machine.ranks_per_node), "", how),
    ]
    return [f"  {name:<15} {value:>16}  {what:<32} {where}".rstrip() for name, value, what, where in rows]


def quality(points: Sequence[Point], found: Fit) -> list[str]:
    """Return one line for each operation: how far the model is off the points, and the algorithms it took them for."""
    lines = [f"  {'operation':<23} {'call':>8} {'points':>6} {'median error':>12} {'largest':>8}  taken for"]
    for operation in dict.fromkeys(point.operation for point in points):
        of_it = [i for i, point in enumerate(points) if point.operation == operation]
        errors = np.abs(found.errors[of_it])
        names = ", ".join(dict.fromkeys(found.algorithms[i] for i in of_it))
        lines.append(
            f"  {operation:<23} {duration(points[of_it[0]].call):>8} {len(of_it):>6} {np.median(errors):>12.0%} "
            f"{errors.max():>8.0%}  {names}"
        )
    return [*lines, "  call: on a group of one rank, where there is nothing to communicate"]


def predictions(operation: str, machine: Machine) -> list[str]:
    """Return a table of predicted times for RANKS x SIZES, and the sizes where the best algorithm changes."""
    sized = operation != "barrier"
    sizes = SIZES if sized else (0,)
    heads = " ".join(f"{size_name(size):>9}" for size in sizes)
    last = "  best algorithm, and up to which size" if sized else ""
    lines = [f"{operation}, predicted:", f"  {'ranks':>6} {heads}{last}"]
    for ranks in RANKS:
        times = " ".join(f"{duration(best(operation, ranks, size, machine)[1]):>9}" for size in sizes)
        last = f"  {path(crossovers(operation, ranks, machine))}" if sized else ""
        lines.append(f"  {ranks:>6} {times}{last}")
    return lines


def path(found: Sequence[tuple[str, int]]) -> str:
    """Return crossovers as text: ``doubling < 12K < ring``."""
    text = found[0][0]
    for name, size in found[1:]:
        text += f" <{size_name(size)}< {name}"
    return text


def size_name(nbytes: int) -> str:
    """Return a size with a binary unit: 8, 12K, 3M, 1.5G."""
    if nbytes < 1024:
        return str(nbytes)
    power = min(3, int(math.log2(nbytes)) // 10)
    return f"{nbytes / 1024**power:.3g}{' KMG'[power]}"


def duration(seconds: float) -> str:
    """Return a time with its unit: 3.1us, 12ms, 1.5s."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * scale:
            return f"{seconds / scale:.3g}{unit}"
    return f"{seconds:.3g}s"


def as_document(points: Sequence[Point], found: Fit, machine: Machine) -> dict[str, Any]:
    """Return everything for the JSON."""
    return {
        "machine": vars(machine),
        "fitted": list(found.determined),
        "points": [
            {**vars(point), "taken_for": name, "relative_error": float(error)}
            for point, name, error in zip(points, found.algorithms, found.errors, strict=True)
        ],
        "predictions": [
            {"operation": operation, "ranks": ranks, "best_from_bytes": dict(crossovers(operation, ranks, machine))}
            for operation in PREDICTED
            for ranks in RANKS
        ],
    }


def run(world: hc.ProcessGroup, sizes: Sequence[int], plan: Plan, network: Network) -> tuple[str, dict[str, Any]]:
    """Measure, fit and predict; return the text and the part of the JSON. Every rank calls it."""
    points = collect(world, sizes, plan)
    found = fit(points)
    nodes = hc.get_node_count(world)
    document = as_document(points, found, on_a_cluster(found, network, nodes))
    return report(points, found, network, nodes), document
