"""Fitting the model: the alpha, beta and gamma that explain measured points best.

The costs are linear in the parameters once it is known which algorithm made each point, and which of its messages
decide. Neither is, so two steps alternate: give each point the algorithm that is the fastest under the present
parameters (a library chooses well), and fit the parameters by least squares. Errors are relative: otherwise the largest
messages would be the only ones that count. Relative to the measured time alone, half of it would be a small error and
twice it a large one, and noise would pull the model down; so they are relative to the geometric mean of the measured
time and the one modelled before. No parameter may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .model import ALGORITHMS, Cost, Machine
from .model import best as best_algorithm

PARAMETERS = ("alpha", "beta", "gamma", "node_alpha", "node_beta")
ROUNDS = 30
# Where the alternation begins; it ends in the nearest minimum, so it begins in several places.
STARTS = (
    (2e-6, 1e-10, 1e-10, 5e-7, 1e-10),
    (2e-5, 1e-10, 1e-10, 5e-6, 1e-10),
    (2e-6, 1e-9, 1e-9, 5e-7, 1e-9),
)


@dataclass(frozen=True)
class Point:
    """A measured time."""

    operation: str
    ranks: int
    nbytes: int
    seconds: float
    ranks_per_node: int = 1
    call: float = 0.0  # s of `seconds` that the call takes before it communicates


@dataclass(frozen=True)
class Fit:
    """The fitted machine, and how well it explains the points.

    Attributes
    ----------
    machine : Machine
    determined : tuple of str
        The parameters that the points depend on; the others are 0.
    algorithms : tuple of str
        The algorithm that each point was taken for.
    errors : numpy.ndarray
        The relative error of each point: 0.1 means that the model says 10 % more than was measured.
    """

    machine: Machine
    determined: tuple[str, ...]
    algorithms: tuple[str, ...]
    errors: np.ndarray


def coefficients(cost: Cost, ranks: int, nbytes: float, machine: Machine) -> list[float]:
    """Return what each of PARAMETERS is multiplied by in a cost, as it is around `machine`."""
    here = cost(ranks, nbytes, machine)
    found = []
    for name, typical in zip(PARAMETERS, STARTS[0], strict=True):
        step = 1e-4 * (getattr(machine, name) or typical)
        changed = replace(machine, **{name: getattr(machine, name) + step})
        slope = (cost(ranks, nbytes, changed) - here) / step
        found.append(slope if slope * step > 1e-12 * here else 0.0)  # else it is a rounding error
    return found


def fit(points: Sequence[Point]) -> Fit:
    """Fit the parameters to `points`.

    Raises
    ------
    ValueError
        There are no points.
    """
    if not points:
        raise ValueError("fit: there are no points")
    times = np.array([point.seconds for point in points])
    # A point that took no longer than a call has noise in it.
    net = np.maximum(times - np.array([point.call for point in points]), 0.05 * times)
    ranks_per_node = max(point.ranks_per_node for point in points)
    best: tuple[float, np.ndarray, list[str], np.ndarray] | None = None
    for start in STARTS:
        parameters = np.array(start)
        names: list[str] = []
        for _ in range(ROUNDS):
            machine = _machine(parameters, ranks_per_node)
            chosen = [_fastest(point, machine) for point in points]
            matrix = np.array([row for _, row in chosen])
            modelled = np.clip(matrix @ parameters, net / 100, net * 100)
            residual = float(np.sum(np.log(modelled / net) ** 2))
            if best is None or residual < best[0]:
                best = residual, parameters, [name for name, _ in chosen], matrix
            previous, names = names, [name for name, _ in chosen]
            following = relative_least_squares(matrix, net, np.sqrt(net * modelled))
            if names == previous and np.allclose(following, parameters, rtol=1e-9, atol=0):
                break
            parameters = following
    assert best is not None
    _, parameters, names, matrix = best
    return Fit(
        _machine(parameters, ranks_per_node),
        tuple(name for name, column in zip(PARAMETERS, matrix.T, strict=True) if column.any()),
        tuple(names),
        (matrix @ parameters - net) / times,
    )


def _machine(parameters: np.ndarray, ranks_per_node: int) -> Machine:
    alpha, beta, gamma, node_alpha, node_beta = map(float, parameters)
    return Machine(alpha, beta, gamma, ranks_per_node, node_alpha, node_beta)


def _fastest(point: Point, machine: Machine) -> tuple[str, list[float]]:
    """Return the algorithm that is the fastest for a point, and its coefficients."""
    machine = replace(machine, ranks_per_node=point.ranks_per_node)
    name, _ = best_algorithm(point.operation, point.ranks, point.nbytes, machine)
    cost = ALGORITHMS[point.operation][name]
    return name, coefficients(cost, point.ranks, point.nbytes, machine)


def relative_least_squares(matrix: np.ndarray, measured: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the non-negative x with the smallest ``sum(((matrix @ x - measured) / scale) ** 2)``."""
    from scipy.optimize import nnls

    scaled = matrix / scale[:, None]
    widths = np.linalg.norm(scaled, axis=0)  # seconds and seconds per byte differ by a factor of 10^6
    widths[widths == 0] = 1
    solution: np.ndarray = nnls(scaled / widths, measured / scale)[0] / widths
    return solution
