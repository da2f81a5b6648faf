"""Sparse exchange: what random ranks send to random ranks, of which each rank knows everything by the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpccomm as hc
from hpccomm.mpi import sparse_exchange

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.mpi(min_size=2)

DTYPES = ["f8", "f4", "i2", "c16", "?", "M8[s]", [("at", "f8", 3), ("number", "i4")], ml_dtypes.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[hc.ProcessGroup]:
    with hc.init_process_group() as group:
        yield group


@pytest.fixture(autouse=True, params=["counted", "consensus"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "consensus":
        monkeypatch.setattr(sparse_exchange, "FEW", 0)


def sent(seed: int, source: int, destination: int, ranks: int) -> Any:
    """What a rank sends to another; None: nothing."""
    rng = np.random.default_rng([seed, source, destination])
    if rng.random() > 3 / ranks:
        return None

    def array() -> Any:
        shape = rng.integers(0, 5, int(rng.integers(0, 4))).tolist()
        if rng.random() < 0.2:
            shape = [int(rng.integers(3000, 9000))]  # too large to travel with what it is
        values = rng.integers(0, 99, [2 * n for n in shape])
        dtype = np.dtype(DTYPES[int(rng.integers(len(DTYPES)))])
        strided = np.zeros(values.shape, dtype)
        if dtype.names:
            strided["number"] = values
        else:
            strided[...] = values.astype(dtype)
        return np.asarray(strided[tuple(slice(None, None, 2) for _ in shape)])

    return array() if rng.random() < 0.5 else tuple(array() for _ in range(int(rng.integers(0, 4))))


def assert_same(received: Any, expected: Any) -> None:
    assert type(received) is type(expected)
    if isinstance(expected, tuple):
        assert len(received) == len(expected)
        for one, other in zip(received, expected):
            assert_same(one, other)
    else:
        assert (received.dtype, received.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("kind", ["world", "reversed"])
def test_random_messages(kind: str) -> None:
    group = hc.split_group(color=0, key=-RANK if kind == "reversed" else RANK)
    ranks = group.ranks
    for seed in range(20):
        given = {to: each for to in range(SIZE) if (each := sent(seed, RANK, to, SIZE)) is not None}
        expected = {source: each for source in range(SIZE) if (each := sent(seed, source, RANK, SIZE)) is not None}
        if seed % 3 == 0:
            received = hc.all_to_all_sparse(given, group)
        elif seed % 3 == 1:
            received = hc.all_to_all_sparse(given, group, async_op=True).result()
        else:  # by ranks of the group
            mine = {group.group_rank(to): each for to, each in given.items()}
            received = {ranks[source]: each for source, each in group.all_to_all_sparse(mine).items()}
        assert set(received) == set(expected)
        for source, each in expected.items():
            assert_same(received[source], each)
        order = [group.group_rank(source) for source in received]
        assert order == sorted(order)
    group.destroy()


def test_many_in_flight_and_fast_ranks() -> None:
    works = []
    for turn in range(50):
        works.append(hc.all_to_all_sparse({(RANK + turn) % SIZE: np.array([RANK, turn])}, async_op=True))
        if turn % 5 == RANK % 5:
            works[-1].wait()
    for turn, work in enumerate(works):
        ((source, array),) = work.result().items()
        assert array.tolist() == [source, turn]
        assert source == (RANK - turn) % SIZE


def test_nothing_at_all() -> None:
    assert hc.all_to_all_sparse({}) == {}
    assert hc.all_to_all_sparse({RANK: ()}) == {RANK: ()}


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ([np.zeros(1)], TypeError, "arrays is a list; expected a dict"),
        ({SIZE: np.zeros(1)}, ValueError, f"a receiver is {SIZE}, which is not in the group"),
        ({0.5: np.zeros(1)}, TypeError, "expected an integer"),
        ({0: [1.0]}, TypeError, "arrays"),
        ({0: np.array([None])}, TypeError, "arrays"),
    ],
)
def test_wrong_arguments(arrays: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hc.all_to_all_sparse(arrays)
    assert hc.all_to_all_sparse({}) == {}


@several
def test_outside_the_group() -> None:
    group = hc.new_group([0])
    if RANK == 0:
        assert hc.all_to_all_sparse({0: np.ones(2)}, group)[0].tolist() == [1, 1]
    else:
        with pytest.warns(RuntimeWarning, match="all_to_all_sparse: this rank is not in"):
            assert hc.all_to_all_sparse({}, group) is None
