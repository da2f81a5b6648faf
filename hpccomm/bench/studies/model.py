"""What each algorithm costs on paper: pure functions of (ranks, bytes, machine).

The model is Hockney's, with a term for the reduction, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (IJHPCA 19, 2005): a message of n bytes takes alpha + n beta, reducing n bytes takes
n gamma; every rank sends and receives one message at a time. Two things are added, in the spirit of LogGP: what a call
costs before it communicates (`call`), and nodes: ranks r with the same r // ranks_per_node share one link to the other
nodes, and messages between them have an alpha and beta of their own.

Every function is piecewise linear in (alpha, beta, gamma, node_alpha, node_beta), and homogeneous: with twice the
parameters it takes twice the time. `nbytes` is what the table of `hpccomm bench` calls size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """The parameters. With one rank per node (the default) every message is one between nodes."""

    alpha: float  # s: a message between nodes
    beta: float  # s per byte that passes a node's link
    gamma: float  # s per byte that is reduced
    ranks_per_node: int = 1
    node_alpha: float = 0.0  # s: a message within a node
    node_beta: float = 0.0  # s per byte of it
    call: float = 0.0  # s: what a call takes before it communicates


Cost = Callable[[int, float, Machine], float]
ALGORITHMS: dict[str, dict[str, Cost]] = {}
TWO_LEVEL = "two-level"  # how the names of algorithms begin that need several nodes of several ranks


def algorithm(operation: str, name: str) -> Callable[[Cost], Cost]:
    """Add an algorithm: the decorated function returns the seconds one operation takes."""

    def add(cost: Cost) -> Cost:
        ALGORITHMS.setdefault(operation, {})[name] = cost
        return cost

    return add


# -- rounds: every rank sends one message and receives one ---------------------------------------------


def shift(ranks: int, distance: int, nbytes: float, machine: Machine) -> float:
    """Rank r sends nbytes to rank r + distance (mod ranks): of a node, `distance` use its link."""
    k = machine.ranks_per_node
    within = machine.node_alpha + nbytes * machine.node_beta
    if ranks <= k:
        return within
    leaving = min(distance, ranks - distance, k)
    between = machine.alpha + leaving * nbytes * machine.beta
    return between if leaving == k else max(between, within)


def exchange(ranks: int, distance: int, nbytes: float, machine: Machine) -> float:
    """Rank r sends nbytes to rank r XOR distance: nobody leaves the node, or everybody does."""
    k = machine.ranks_per_node
    if ranks <= k or distance < k:
        return machine.node_alpha + nbytes * machine.node_beta
    return machine.alpha + k * nbytes * machine.beta


def one(ranks: int, distance: int, nbytes: float, machine: Machine) -> float:
    """A step of a tree: one rank sends nbytes to rank r + distance; of a node at most one does so between nodes."""
    if ranks <= machine.ranks_per_node or distance < machine.ranks_per_node:
        return machine.node_alpha + nbytes * machine.node_beta
    return machine.alpha + nbytes * machine.beta


def doublings(ranks: int) -> list[int]:
    """Return 1, 2, 4 ... below the largest power of two that is no larger than `ranks`."""
    return [1 << i for i in range(ranks.bit_length() - 1)]


def distances(ranks: int) -> list[int]:
    """Return 1, 2, 4 ... below `ranks`: ceil(log2(ranks)) of them."""
    return [1 << i for i in range((ranks - 1).bit_length())]


def _fold(ranks: int, nbytes: float, machine: Machine, reduces: bool) -> float:
    """What ranks above a power of two add: a neighbour takes their data before, and gives them the result."""
    if ranks & (ranks - 1) == 0:
        return 0.0
    there = shift(ranks, 1, nbytes, machine)
    return 2 * there + (nbytes * machine.gamma if reduces else 0.0)


# -- all_reduce ------------------------------------------------------------------------------------------


@algorithm("all_reduce", "doubling")
def all_reduce_recursive_doubling(ranks: int, nbytes: float, machine: Machine) -> float:
    """log2(p) exchanges of everything: the fewest messages."""
    rounds = sum(exchange(ranks, d, nbytes, machine) + nbytes * machine.gamma for d in doublings(ranks))
    return rounds + _fold(ranks, nbytes, machine, reduces=True)


@algorithm("all_reduce", "rabenseifner")
def all_reduce_rabenseifner(ranks: int, nbytes: float, machine: Machine) -> float:
    """Reduce-scatter by halving, all-gather by doubling: 2 log2(p) messages, the fewest bytes for powers of two."""
    rounds = 0.0
    for d in doublings(ranks):  # the neighbours first, with the largest halves
        half = nbytes / (2 * d)
        rounds += 2 * exchange(ranks, d, half, machine) + half * machine.gamma
    return rounds + _fold(ranks, nbytes, machine, reduces=True)


@algorithm("all_reduce", "ring")
def all_reduce_ring(ranks: int, nbytes: float, machine: Machine) -> float:
    """Reduce-scatter and all-gather around a ring: 2 (p - 1) messages, the fewest bytes, neighbours only."""
    return reduce_scatter_ring(ranks, nbytes, machine) + all_gather_ring(ranks, nbytes, machine)


@algorithm("all_reduce", "reduce+broadcast")
def all_reduce_by_trees(ranks: int, nbytes: float, machine: Machine) -> float:
    """A binomial reduce and a binomial broadcast: on many ranks per node the fewest messages between nodes."""
    return reduce_binomial(ranks, nbytes, machine) + broadcast_binomial(ranks, nbytes, machine)


@algorithm("all_reduce", "two-level")
def all_reduce_two_level(ranks: int, nbytes: float, machine: Machine) -> float:
    """Reduce-scatter within the nodes, all-reduce of each part between them, all-gather within.

    All ranks of a node send between the nodes at once, a part of the data each.
    """
    k, nodes = machine.ranks_per_node, math.ceil(ranks / machine.ranks_per_node)
    inside = all_reduce_ring(k, nbytes, machine)
    return inside + _between_nodes(nodes, nbytes / k, replace(machine, beta=k * machine.beta))


@algorithm("all_reduce", "two-level, leaders")
def all_reduce_by_leaders(ranks: int, nbytes: float, machine: Machine) -> float:
    """Binomial reduce to one rank of each node, all-reduce between those, binomial broadcast within the nodes."""
    k, nodes = machine.ranks_per_node, math.ceil(ranks / machine.ranks_per_node)
    inside = reduce_binomial(k, nbytes, machine) + broadcast_binomial(k, nbytes, machine)
    return inside + _between_nodes(nodes, nbytes, machine)


def _between_nodes(nodes: int, nbytes: float, machine: Machine) -> float:
    flat = replace(machine, ranks_per_node=1)
    costs = (all_reduce_recursive_doubling, all_reduce_rabenseifner, all_reduce_ring)
    return min(cost(nodes, nbytes, flat) for cost in costs)


# -- reduce_scatter, all_gather ------------------------------------------------------------------------------


@algorithm("reduce_scatter_single", "ring")
def reduce_scatter_ring(ranks: int, nbytes: float, machine: Machine) -> float:
    """p - 1 times a part to the neighbour."""
    part = nbytes / ranks
    return (ranks - 1) * (shift(ranks, 1, part, machine) + part * machine.gamma) if ranks > 1 else 0.0


@algorithm("reduce_scatter_single", "halving")
def reduce_scatter_recursive_halving(ranks: int, nbytes: float, machine: Machine) -> float:
    """log2(p) exchanges of a half, a quarter ... with the farthest first, so that the parts end up in rank order."""
    rounds, half = 0.0, nbytes
    for d in reversed(doublings(ranks)):
        half /= 2
        rounds += exchange(ranks, d, half, machine) + half * machine.gamma
    return rounds + _fold(ranks, nbytes, machine, reduces=True)


@algorithm("all_gather_single", "ring")
def all_gather_ring(ranks: int, nbytes: float, machine: Machine) -> float:
    """p - 1 times a part to the neighbour."""
    return (ranks - 1) * shift(ranks, 1, nbytes / ranks, machine) if ranks > 1 else 0.0


@algorithm("all_gather_single", "doubling")
def all_gather_recursive_doubling(ranks: int, nbytes: float, machine: Machine) -> float:
    """log2(p) exchanges of 1, 2, 4 ... parts."""
    part = nbytes / ranks
    rounds = sum(exchange(ranks, d, d * part, machine) for d in doublings(ranks))
    return rounds + _fold(ranks, nbytes, machine, reduces=False)


@algorithm("all_gather_single", "bruck")
def all_gather_bruck(ranks: int, nbytes: float, machine: Machine) -> float:
    """ceil(log2(p)) shifts of 1, 2, 4 ... parts, for any number of ranks."""
    part = nbytes / ranks
    return sum(shift(ranks, d, min(d, ranks - d) * part, machine) for d in distances(ranks))


# -- one to all, all to one ------------------------------------------------------------------------------------


@algorithm("broadcast", "binomial")
def broadcast_binomial(ranks: int, nbytes: float, machine: Machine) -> float:
    """ceil(log2(p)) messages of everything, one after the other."""
    return sum(one(ranks, d, nbytes, machine) for d in distances(ranks))


@algorithm("broadcast", "scatter+doubling")
def broadcast_scatter_doubling(ranks: int, nbytes: float, machine: Machine) -> float:
    """A binomial scatter, and an all-gather by doubling (van de Geijn)."""
    return scatter_binomial(ranks, nbytes, machine) + all_gather_recursive_doubling(ranks, nbytes, machine)


@algorithm("broadcast", "scatter+ring")
def broadcast_scatter_ring(ranks: int, nbytes: float, machine: Machine) -> float:
    """A binomial scatter, and an all-gather around a ring (van de Geijn)."""
    return scatter_binomial(ranks, nbytes, machine) + all_gather_ring(ranks, nbytes, machine)


@algorithm("reduce", "binomial")
def reduce_binomial(ranks: int, nbytes: float, machine: Machine) -> float:
    """A broadcast backwards."""
    return broadcast_binomial(ranks, nbytes, machine) + len(distances(ranks)) * nbytes * machine.gamma


@algorithm("reduce", "halving+gather")
def reduce_by_parts(ranks: int, nbytes: float, machine: Machine) -> float:
    """A reduce-scatter by halving, and a gather of the parts: Rabenseifner's all-reduce with one receiver."""
    return all_reduce_rabenseifner(ranks, nbytes, machine)


@algorithm("scatter", "binomial")
@algorithm("gather", "binomial")
def scatter_binomial(ranks: int, nbytes: float, machine: Machine) -> float:
    """ceil(log2(p)) messages of a half, a quarter ...; a gather is the same backwards."""
    part, left, rounds = nbytes / ranks, ranks, 0.0
    for d in reversed(distances(ranks)):
        rounds += one(ranks, d, (left - d) * part if left > d else 0.0, machine)
        left = min(left, d)
    return rounds


@algorithm("scatter", "linear")
@algorithm("gather", "linear")
def scatter_linear(ranks: int, nbytes: float, machine: Machine) -> float:
    """The root sends to every rank itself."""
    part, k = nbytes / ranks, machine.ranks_per_node
    near = min(ranks, k) - 1
    within = near * (machine.node_alpha + part * machine.node_beta)
    return within + (ranks - 1 - near) * (machine.alpha + part * machine.beta)


# -- all to all ----------------------------------------------------------------------------------------------------


@algorithm("all_to_all_single", "bruck")
def all_to_all_bruck(ranks: int, nbytes: float, machine: Machine) -> float:
    """ceil(log2(p)) shifts of half of the data: few messages, more bytes."""
    return sum(shift(ranks, d, nbytes / 2, machine) for d in distances(ranks))


@algorithm("all_to_all_single", "pairwise")
def all_to_all_pairwise(ranks: int, nbytes: float, machine: Machine) -> float:
    """p - 1 shifts of a part, each to its place: many messages, no byte more than needed."""
    part = nbytes / ranks
    k = machine.ranks_per_node
    if ranks <= 2 * k:
        return sum(shift(ranks, d, part, machine) for d in range(1, ranks))
    # All shifts by k or more, either way around, cost the same.
    near = 2 * sum(shift(ranks, d, part, machine) for d in range(1, k))
    return near + (ranks - 2 * k + 1) * shift(ranks, k, part, machine)


@algorithm("barrier", "dissemination")
def barrier_dissemination(ranks: int, nbytes: float, machine: Machine) -> float:
    """ceil(log2(p)) rounds of empty messages."""
    return sum(shift(ranks, d, 0.0, machine) for d in distances(ranks))


@algorithm("ping_pong", "message")
def message(ranks: int, nbytes: float, machine: Machine) -> float:
    """One message between rank r and rank r + p // 2; the pairs of a node share its link."""
    return exchange(ranks, max(1, ranks // 2), nbytes, machine)


# -- choosing --------------------------------------------------------------------------------------------------------


def algorithms(operation: str, ranks: int, machine: Machine) -> dict[str, Cost]:
    """Return the algorithms that make sense: the two-level ones need several nodes of several ranks."""
    levels = ranks > machine.ranks_per_node > 1
    return {name: cost for name, cost in ALGORITHMS[operation].items() if levels or not name.startswith(TWO_LEVEL)}


def seconds(operation: str, name: str, ranks: int, nbytes: float, machine: Machine) -> float:
    """Return the predicted time of one algorithm."""
    return machine.call + ALGORITHMS[operation][name](ranks, nbytes, machine)


def best(operation: str, ranks: int, nbytes: float, machine: Machine) -> tuple[str, float]:
    """Return the fastest algorithm and its predicted time; of equally fast ones the one that is listed first."""
    costs = {name: cost(ranks, nbytes, machine) for name, cost in algorithms(operation, ranks, machine).items()}
    smallest = min(costs.values())
    name = next(name for name, cost in costs.items() if cost <= smallest * (1 + 1e-9))
    return name, machine.call + costs[name]


def crossovers(
    operation: str, ranks: int, machine: Machine, smallest: int = 8, largest: int = 1 << 32
) -> list[tuple[str, int]]:
    """Return which algorithm is best from which size on: ``[("doubling", 8), ("ring", 70_000)]``."""
    found = [(best(operation, ranks, smallest, machine)[0], smallest)]
    size = smallest
    while size < largest:
        following = min(largest, 2 * size)
        if best(operation, ranks, following, machine)[0] != found[-1][0]:
            low, high = size, following  # bisect; within a factor of two one change is all there is, or hidden
            while high - low > max(1, low // 100):
                middle = (low + high) // 2
                if best(operation, ranks, middle, machine)[0] == found[-1][0]:
                    low = middle
                else:
                    high = middle
            found.append((best(operation, ranks, high, machine)[0], high))
            size = high
        else:
            size = following
    return found
