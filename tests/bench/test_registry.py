"""The list of benchmarks: sizes, partners, values, NumPy's answers, and the factors of nccl-tests."""

from __future__ import annotations

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.bench import registry
from hpccomm.bench.contenders import OF_DEVICE, contender_class
from hpccomm.bench.registry import Arrays, Case, assign, benchmark, flat
from hpccomm.core.operation_list import OPERATIONS

pytestmark = pytest.mark.serial

BENCHMARKS = registry.load()
FLOAT = np.dtype(np.float32)

# nccl-tests, doc/PERFORMANCE.md, "Summary"; gather and scatter from the source of gather.cu and scatter.cu
NCCL_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_single": lambda n: (n - 1) / n,
    "all_gather_single": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_to_all_single": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1,
}


@pytest.mark.parametrize("name", NCCL_FACTORS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
def test_bus_bandwidth_has_the_factors_of_nccl_tests(name: str, ranks: int) -> None:
    assert BENCHMARKS[name].busbw(ranks) == pytest.approx(NCCL_FACTORS[name](ranks))


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_other_forms_of_an_operation_have_its_factor(name: str) -> None:
    for each in BENCHMARKS.values():
        if each.name.startswith(name):
            single = BENCHMARKS.get(f"{name}_single", BENCHMARKS[name])
            assert each.busbw(6) == single.busbw(6), each.name


def test_the_decorator_adds_a_benchmark_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BENCHMARKS", {})

    @benchmark("halo", busbw=lambda n: 3.0, kind="message", shared=True)
    def halo(case: Case) -> Arrays:
        """Swap borders.

        More about it.
        """
        return Arrays(receive=case.array(case.count))

    added = registry.BENCHMARKS["halo"]
    assert (added.summary, added.kind, added.busbw(5)) == ("Swap borders.", "message", 3.0)
    with pytest.raises(ValueError, match="'halo' exists already"):
        benchmark("halo")(halo)


def test_every_benchmark_is_run_by_hpccomm_and_where_mpi_has_the_function_by_raw_mpi4py() -> None:
    raw, ours = contender_class("mpi4py"), contender_class("hpccomm")
    for name, each in BENCHMARKS.items():
        assert hasattr(ours, name)
        assert not (each.mpi and hasattr(raw, name)), name
        assert each.mpi or hasattr(raw, name) or "MPI_" not in getattr(hc, name).__doc__, name


def test_every_contender_can_say_whether_it_is_there() -> None:
    for device, contenders in OF_DEVICE.items():
        for name in contenders:
            missing = contender_class(name, device).missing()
            assert missing is None or isinstance(missing, str)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_shared_array_is_a_multiple_of_the_ranks_and_never_empty(ranks: int) -> None:
    for size in (1, 4, 100, 1 << 20):
        (case,) = BENCHMARKS["all_gather_single"].cases(Case(0, ranks, 0, FLOAT), [size])
        assert case.count % ranks == 0
        assert case.part >= 1
        assert case.nbytes <= max(size, 4 * ranks)
        assert BENCHMARKS["all_reduce"].cases(Case(0, ranks, 0, FLOAT), [size])[0].nbytes == max(4, size)


def test_sizes_that_rounding_makes_equal_are_measured_once() -> None:
    cases = BENCHMARKS["all_to_all_single"].cases(Case(0, 4, 0, FLOAT), [8, 16, 32, 64])
    assert [case.nbytes for case in cases] == [16, 32, 64]


@pytest.mark.parametrize("ranks", range(1, 8))
def test_partners_agree_and_one_of_an_odd_number_has_none(ranks: int) -> None:
    partners = [Case(rank, ranks, 1, FLOAT).peer for rank in range(ranks)]
    assert all(partners[partner] == rank for rank, partner in enumerate(partners) if partner is not None)
    assert partners.count(None) == ranks % 2


def test_many_messages_in_flight_take_a_bounded_amount_of_memory() -> None:
    for nbytes in (8, 1 << 16, 1 << 20, 1 << 30):
        case = Case(0, 2, nbytes, np.dtype(np.uint8))
        assert 1 <= case.window <= registry.WINDOW
        assert case.window == 1 or case.window * nbytes <= registry.WINDOW_BYTES


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [6, 11]), ("avg", [2, 11 / 3]), ("product", [6, 45]), ("min", [1, 3]), ("max", [3, 5])],
)
def test_numpys_answer(op: str, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    given = [[1, 3], [2, 3], [3, 5]]
    monkeypatch.setattr(Case, "values", lambda self, rank, count: np.array(given[rank], self.dtype))
    for dtype in (np.float16, np.float64):
        answer = Case(0, 3, 2, np.dtype(dtype), op).reduced(2)
        assert answer.dtype == dtype
        np.testing.assert_allclose(answer, expected, rtol=1e-3)


def test_the_values_of_ranks_differ_and_reach_every_part() -> None:
    case = Case(0, 4, 1000, FLOAT)
    values = [case.values(rank, 1000) for rank in range(4)]
    assert all((a != b).any() for i, a in enumerate(values) for b in values[:i])
    parts = values[0].reshape(4, 250)
    assert all((a != b).any() for i, a in enumerate(parts) for b in parts[:i])


def test_every_wrong_element_is_counted() -> None:
    arrays = Arrays(receive=np.zeros(5), given=lambda: np.arange(5.0), expected=lambda: np.arange(5.0))
    arrays.fill()
    assert arrays.wrong() == 0
    arrays.receive[[1, 3]] = [-1, np.nan]
    assert arrays.wrong() == 2
    arrays.clear()
    assert arrays.wrong() == 4
    assert Arrays(receive=None).wrong() == 0


def test_flat_values_are_dealt_out_to_lists_of_arrays() -> None:
    pieces = [np.zeros(2), np.zeros((2, 1)), np.zeros(0), np.zeros(1)]
    assign(pieces, np.arange(5.0))
    assert flat(pieces).tolist() == [0, 1, 2, 3, 4]
    assert pieces[1].tolist() == [[2], [3]]
    assign(pieces, None)
    assert not flat(pieces).any()


def test_what_is_measured_are_operations_of_hpccomm() -> None:
    patterns = {"ping_pong", "bidirectional", "message_rate"}  # of several messages
    assert BENCHMARKS.keys() - patterns <= OPERATIONS.keys()
    for name in BENCHMARKS.keys() - patterns:
        assert BENCHMARKS[name].reduces == OPERATIONS[name].reduces, name
    assert sum(each.reduces for each in BENCHMARKS.values()) == 8
