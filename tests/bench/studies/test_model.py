"""The model: closed forms from the literature, where algorithms change, and fits to made-up measurements."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hpccomm.bench.studies.fit import PARAMETERS, Point, coefficients, fit, relative_least_squares
from hpccomm.bench.studies.model import (
    ALGORITHMS,
    TWO_LEVEL,
    Machine,
    algorithms,
    all_to_all_pairwise,
    best,
    crossovers,
    distances,
    doublings,
    seconds,
    shift,
)
from hpccomm.bench.studies.predict import Network, duration, on_a_cluster, path, predictions, report, size_name

pytestmark = pytest.mark.serial

A, B, G = 2e-6, 1 / 25e9, 1 / 5e9
FLAT = Machine(A, B, G)
CLUSTER = Machine(A, B, G, ranks_per_node=16, node_alpha=4e-7, node_beta=1 / 8e9)
EVERY = [(operation, name) for operation, costs in ALGORITHMS.items() for name in costs]

# Thakur, Rabenseifner, Gropp (IJHPCA 2005), for p = 2^k ranks and n bytes: coefficients of alpha, n beta, n gamma
CLOSED_FORMS = {
    ("all_reduce", "doubling"): lambda p, lg: (lg, lg, lg),
    ("all_reduce", "rabenseifner"): lambda p, lg: (2 * lg, 2 * (p - 1) / p, (p - 1) / p),
    ("all_reduce", "ring"): lambda p, lg: (2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p),
    ("all_reduce", "reduce+broadcast"): lambda p, lg: (2 * lg, 2 * lg, lg),
    ("reduce_scatter_single", "halving"): lambda p, lg: (lg, (p - 1) / p, (p - 1) / p),
    ("reduce_scatter_single", "ring"): lambda p, lg: (p - 1, (p - 1) / p, (p - 1) / p),
    ("all_gather_single", "doubling"): lambda p, lg: (lg, (p - 1) / p, 0),
    ("all_gather_single", "bruck"): lambda p, lg: (lg, (p - 1) / p, 0),
    ("all_gather_single", "ring"): lambda p, lg: (p - 1, (p - 1) / p, 0),
    ("broadcast", "binomial"): lambda p, lg: (lg, lg, 0),
    ("broadcast", "scatter+ring"): lambda p, lg: (lg + p - 1, 2 * (p - 1) / p, 0),
    ("broadcast", "scatter+doubling"): lambda p, lg: (2 * lg, 2 * (p - 1) / p, 0),
    ("reduce", "binomial"): lambda p, lg: (lg, lg, lg),
    ("reduce", "halving+gather"): lambda p, lg: (2 * lg, 2 * (p - 1) / p, (p - 1) / p),
    ("scatter", "binomial"): lambda p, lg: (lg, (p - 1) / p, 0),
    ("gather", "linear"): lambda p, lg: (p - 1, (p - 1) / p, 0),
    ("all_to_all_single", "bruck"): lambda p, lg: (lg, lg / 2, 0),
    ("all_to_all_single", "pairwise"): lambda p, lg: (p - 1, (p - 1) / p, 0),
    ("barrier", "dissemination"): lambda p, lg: (lg, 0, 0),
}


@pytest.mark.parametrize(("operation", "name"), CLOSED_FORMS)
@pytest.mark.parametrize("ranks", [2, 8, 1024, 65536])
def test_costs_are_those_of_the_literature(operation: str, name: str, ranks: int) -> None:
    alphas, betas, gammas = CLOSED_FORMS[operation, name](ranks, math.log2(ranks))
    for nbytes in (0 if operation == "barrier" else 8, 1 << 20):
        volume = 0 if operation == "barrier" else nbytes
        expected = alphas * A + betas * volume * B + gammas * volume * G
        assert seconds(operation, name, ranks, nbytes, FLAT) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_every_cost_grows_with_size_and_latency_and_is_positive(operation: str, name: str) -> None:
    for machine in (FLAT, CLUSTER):
        for ranks in (2, 3, 17, 100, 4096):
            if name not in algorithms(operation, ranks, machine):
                continue
            times = [seconds(operation, name, ranks, nbytes, machine) for nbytes in (8, 4096, 1 << 20)]
            assert 0 < times[0] <= times[1] <= times[2]
            slower = replace(machine, alpha=2 * machine.alpha, node_alpha=2 * machine.node_alpha)
            assert seconds(operation, name, ranks, 8, slower) > times[0]


@pytest.mark.parametrize(("operation", "name"), [pair for pair in EVERY if not pair[1].startswith(TWO_LEVEL)])
def test_a_rank_alone_has_nothing_to_send(operation: str, name: str) -> None:
    if operation != "ping_pong":
        assert seconds(operation, name, 1, 1 << 20, FLAT) == 0


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_costs_are_homogeneous(operation: str, name: str) -> None:
    doubled = replace(CLUSTER, **{parameter: 2 * getattr(CLUSTER, parameter) for parameter in PARAMETERS})
    for ranks in (48, 1000):
        once, twice = (seconds(operation, name, ranks, 4096, machine) for machine in (CLUSTER, doubled))
        assert twice == pytest.approx(2 * once)


def test_on_one_node_the_network_does_not_matter() -> None:
    other = replace(CLUSTER, alpha=1.0, beta=1.0)
    for operation in ALGORITHMS:
        assert best(operation, 16, 4096, CLUSTER) == best(operation, 16, 4096, other)
        assert best(operation, 32, 4096, CLUSTER)[1] < best(operation, 32, 4096, other)[1]


def test_ranks_of_a_node_share_its_link() -> None:
    assert shift(64, 1, 1e6, CLUSTER) == pytest.approx(CLUSTER.node_alpha + 1e6 * CLUSTER.node_beta)  # the slower one
    assert shift(64, 16, 1e6, CLUSTER) == pytest.approx(A + 16e6 * B)
    assert shift(64, 50, 1e6, CLUSTER) == pytest.approx(A + 14e6 * B)  # 14 ranks back


@pytest.mark.parametrize("ranks", [2, 16, 17, 31, 32, 33, 100])
def test_pairwise_exchange_is_the_sum_of_its_shifts(ranks: int) -> None:
    for machine in (FLAT, CLUSTER):
        explicit = sum(shift(ranks, d, 1e6 / ranks, machine) for d in range(1, ranks))
        assert all_to_all_pairwise(ranks, 1e6, machine) == pytest.approx(explicit)


def test_rounds() -> None:
    assert (doublings(1), doublings(8), doublings(9)) == ([], [1, 2, 4], [1, 2, 4])
    assert (distances(1), distances(8), distances(9)) == ([], [1, 2, 4], [1, 2, 4, 8])


def test_two_level_algorithms_are_for_several_nodes_of_several_ranks() -> None:
    def has_two_level(ranks: int, machine: Machine) -> bool:
        return any(name.startswith(TWO_LEVEL) for name in algorithms("all_reduce", ranks, machine))

    assert has_two_level(17, CLUSTER)
    assert not has_two_level(16, CLUSTER)
    assert not has_two_level(64, FLAT)


def test_two_levels_are_better_where_nodes_are_many_and_their_number_is_no_power_of_two() -> None:
    name, _ = best("all_reduce", 16 * 100, 1 << 20, CLUSTER)
    assert name.startswith(TWO_LEVEL)


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_where_recursive_doubling_ends(ranks: int) -> None:
    lg = math.log2(ranks)
    share = (ranks - 1) / ranks
    # lg (a + n b + n g) = 2 lg a + 2 share n b + share n g
    expected = lg * A / ((lg - 2 * share) * B + (lg - share) * G)
    (first, _), (second, size), *_ = crossovers("all_reduce", ranks, FLAT)
    assert (first, second) == ("doubling", "rabenseifner")
    assert size == pytest.approx(expected, rel=0.03, abs=2)


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_between_crossovers_the_best_algorithm_is_the_one_they_say(operation: str) -> None:
    for machine in (FLAT, CLUSTER):
        for ranks in (8, 96, 4096):
            found = crossovers(operation, ranks, machine)
            assert found[0][1] == 8
            for (name, start), end in zip(found, [size for _, size in found[1:]] + [1 << 32]):
                assert start < end
                for size in (start, end - max(2, end // 50)):
                    if size >= start:
                        assert best(operation, ranks, size, machine)[0] == name


def test_a_call_costs_what_it_costs_before_it_communicates() -> None:
    assert best("barrier", 8, 0, replace(FLAT, call=1e-6))[1] == pytest.approx(3 * A + 1e-6)


# -- fitting ---------------------------------------------------------------------------------------------

OPERATIONS = ["ping_pong", "all_reduce", "broadcast", "all_gather_single", "all_to_all_single"]


def made_up(machine: Machine, ranks: list[int], noise: float = 0.0, call: float = 0.0) -> list[Point]:
    """Return points as `machine` would give them."""
    random = np.random.default_rng(1)
    points = []
    for operation in OPERATIONS:
        for count in ranks:
            for nbytes in (8, 256, 8192, 1 << 18, 1 << 23):
                seconds = call + best(operation, count, nbytes, machine)[1] * random.uniform(1 - noise, 1 + noise)
                points.append(Point(operation, count, nbytes, seconds, machine.ranks_per_node, call))
    return points


def test_the_parameters_behind_exact_points_are_found() -> None:
    found = fit(made_up(FLAT, [2, 4, 8, 16]))
    assert (found.machine.alpha, found.machine.beta, found.machine.gamma) == pytest.approx((A, B, G), rel=1e-6)
    assert np.abs(found.errors).max() < 1e-6
    assert found.determined == ("alpha", "beta", "gamma")


def test_the_parameters_of_both_levels_are_found() -> None:
    found = fit(made_up(CLUSTER, [4, 16, 32, 64, 256]))
    for name in PARAMETERS:
        assert getattr(found.machine, name) == pytest.approx(getattr(CLUSTER, name), rel=0.25), name
    assert np.median(np.abs(found.errors)) < 0.1
    assert found.determined == PARAMETERS


def test_noise_moves_them_a_little() -> None:
    found = fit(made_up(FLAT, [2, 4, 8, 16], noise=0.2))
    assert (found.machine.alpha, found.machine.beta, found.machine.gamma) == pytest.approx((A, B, G), rel=0.2)
    assert 0.02 < np.median(np.abs(found.errors)) < 0.2


def test_strong_noise_does_not_pull_the_model_down() -> None:
    random = np.random.default_rng(2)
    points = [
        replace(point, seconds=point.seconds * 2.0 ** random.choice([-2, 2]))
        for point in made_up(FLAT, [2, 4, 8, 16, 32])
    ]
    found = fit(points)
    assert 0.7 < found.machine.alpha / A < 1.4
    assert abs(np.mean(found.errors < 0) - 0.5) < 0.1


def test_what_a_call_costs_is_not_taken_for_latency() -> None:
    found = fit(made_up(FLAT, [2, 4, 8], call=5e-6))
    assert found.machine.alpha == pytest.approx(A, rel=1e-6)


def test_on_one_node_only_its_own_parameters_are_found() -> None:
    found = fit(made_up(CLUSTER, [2, 4, 8]))
    assert found.determined == ("gamma", "node_alpha", "node_beta")
    assert (found.machine.alpha, found.machine.beta) == (0, 0)
    assert found.machine.node_alpha == pytest.approx(CLUSTER.node_alpha, rel=1e-6)


def test_small_and_large_points_count_alike() -> None:
    # two points of the same kind that contradict each other: the answer halves the relative error, not the absolute
    matrix = np.array([[1.0, 0.0], [1e6, 0.0]])
    solution = relative_least_squares(matrix, np.array([1.0, 2e6]), np.array([1.0, 2e6]))
    a, b = solution[0] - 1, solution[0] / 2 - 1
    assert a > 0 > b
    assert solution[0] == pytest.approx((1 + 0.5) / (1 + 0.25))
    assert solution[1] == 0


def test_no_parameter_is_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert relative_least_squares(matrix, np.array([3.0, 2.0, 1.0]), np.ones(3))[1] == 0
    assert (relative_least_squares(matrix, np.array([1.0, 2.0, 3.5]), np.ones(3)) >= 0).all()


def test_coefficients_are_those_of_the_formula() -> None:
    cost = ALGORITHMS["all_reduce"]["ring"]
    assert coefficients(cost, 4, 1000, FLAT) == pytest.approx([6, 1500, 750, 0, 0])
    assert coefficients(cost, 4, 1000, replace(CLUSTER, ranks_per_node=4)) == pytest.approx([0, 0, 750, 6, 1500])


def test_no_points_no_fit() -> None:
    with pytest.raises(ValueError, match="there are no points"):
        fit([])


# -- what is printed -------------------------------------------------------------------------------------


def test_the_report_says_what_was_fitted_and_what_is_assumed() -> None:
    points = [
        Point(operation, 2, nbytes, best(operation, 2, nbytes, CLUSTER)[1], 16, 1e-7)
        for operation in (*OPERATIONS, "reduce_scatter_single", "reduce", "barrier")
        for nbytes in (8, 1 << 20)
    ]
    text = report(points, fit(points), Network(ranks_per_node=32, alpha=3e-6, beta=1e-10), nodes=1)
    assert "3.000 us  a message between nodes          assumed (--network)" in text
    assert "10.00 GB/s  the bandwidth of a node's link   assumed (--network)" in text
    assert "32                                   assumed (--ranks-per-node)" in text
    assert text.count("65536") == 7
    assert max(map(len, text.splitlines())) <= 160


def test_measured_nodes_are_not_overridden_by_assumptions() -> None:
    found = fit(made_up(CLUSTER, [4, 16, 32, 64]))
    assert on_a_cluster(found, Network(), nodes=4) is found.machine
    assert on_a_cluster(found, Network(ranks_per_node=7), nodes=1).ranks_per_node == 7


def test_a_prediction_has_a_time_for_each_size_and_the_path_of_the_best() -> None:
    lines = predictions("all_reduce", FLAT)
    assert len(lines) == 2 + 6
    assert "doubling <" in lines[2]
    assert path([("a", 8), ("b", 12 << 10), ("c", 3 << 20)]) == "a <12K< b <3M< c"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(8, "8"), (1024, "1K"), (1536, "1.5K"), (1 << 20, "1M"), (3 << 29, "1.5G")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size_name(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(3.14e-6, "3.14us"), (0.0123, "12.3ms"), (2.5, "2.5s")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
