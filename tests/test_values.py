"""all_reduced: a number, an array or a container goes in, and the result over all ranks comes out."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

import hpccomm as hc

from .arrays import NUMERIC, assert_same, dtype_name, values


class State(NamedTuple):
    loss: Any
    seen: Any


@pytest.mark.parametrize(
    ("mine", "op", "expected"),
    [
        (lambda rank: rank + 1, "sum", lambda size: size * (size + 1) // 2),
        (lambda rank: 0.5 * rank, "sum", lambda size: sum(0.5 * rank for rank in range(size))),
        (lambda rank: rank == 0, "sum", lambda _: 1),
        (lambda rank: rank == 0, "max", lambda _: True),
        (lambda rank: rank > 0, "min", lambda _: False),
        (lambda rank: rank + 2, "product", lambda size: int(np.prod(np.arange(2, size + 2)))),
        (lambda rank: rank, "avg", lambda size: (size - 1) / 2),
        (lambda rank: 1j * rank, "sum", lambda size: 1j * sum(range(size))),
        (lambda rank: -rank, hc.ReduceOp.MIN, lambda size: 1 - size),
        (lambda rank: 0.1, "reproducible_sum", lambda size: float(sum(np.full(size, 0.1, np.longdouble)))),
    ],
    ids=["int", "float", "count", "any", "all", "product", "average", "complex", "min", "reproducible"],
)
def test_a_number_keeps_its_type(process_group: hc.ProcessGroup, mine: Any, op: Any, expected: Any) -> None:
    result = hc.all_reduced(mine(process_group.rank), op)
    assert result == expected(process_group.size)
    assert type(result) is type(expected(process_group.size))


@pytest.mark.parametrize("dtype", [each for each in NUMERIC if each.kind in "iuf"], ids=dtype_name)
def test_scalars_and_arrays_of_numpy_keep_their_dtype(process_group: hc.ProcessGroup, dtype: Any) -> None:
    contributions = [values(dtype, (6,), rank)[::2] for rank in range(process_group.size)]
    array, op = contributions[process_group.rank], "max"
    before, expected = array.copy(), np.max(contributions, axis=0)
    result = hc.all_reduced(array, op)
    assert result is not array
    assert_same(result, expected)
    assert_same(array, before)
    scalar = hc.all_reduced(array[0], op)
    assert type(scalar) is type(array[0])
    assert_same(np.array([scalar]), expected[:1])


def test_containers_are_one_operation_and_keep_their_kind(process_group: hc.ProcessGroup) -> None:
    rank, size = process_group.rank, process_group.size
    counts, words = defaultdict(int, {"a": rank}), Counter(b=1, c=rank)
    given = {"state": State(float(rank), [rank, np.float32(1)]), "none": None, "counts": counts, "words": words}
    given["x"] = np.arange(3)
    number = process_group.sequence_number
    result = hc.all_reduced(OrderedDict(given))
    assert process_group.sequence_number == number + 1
    total = sum(range(size))
    assert type(result) is OrderedDict
    assert list(result) == list(given)
    assert result["state"] == State(float(total), [total, size])
    assert type(result["state"]) is State
    assert (result["none"], result["counts"], type(result["counts"])) == (None, {"a": total}, defaultdict)
    assert_same(result["x"], np.arange(3) * size)
    assert result["words"] == Counter(b=size, c=total)
    assert counts == {"a": rank}


def test_ranks_may_insert_text_keys_in_different_orders(process_group: hc.ProcessGroup) -> None:
    rank, size = process_group.rank, process_group.size
    given = {"b": 1, "a": [2.0, 3]} if rank % 2 else {"a": [2.0, 3], "b": 1}
    result = hc.all_reduced(given)
    assert result == {"a": [2.0 * size, 3 * size], "b": size}
    assert list(result) == list(given)


def test_the_members_of_a_group_alone(process_group: hc.ProcessGroup) -> None:
    with hc.new_group([0]) as group:
        if process_group.rank == 0:
            assert hc.all_reduced(3, group=group) == 3
        else:
            with pytest.warns(RuntimeWarning, match="not in"):
                assert hc.all_reduced(3, group=group) == 3


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1 << 63, OverflowError, "too large for an int64; give a float"),
        ([1, -(1 << 64)], OverflowError, "too large"),
        ("text", TypeError, "'text' is neither a number nor an array"),
        ({"a": object()}, TypeError, "neither a number"),
        (np.ma.masked_array([1.0], [True]), TypeError, "all_reduced: value is a masked array"),
    ],
)
def test_values_that_are_refused(process_group: hc.ProcessGroup, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hc.all_reduced(value)


def test_a_sum_that_could_overflow_is_refused(process_group: hc.ProcessGroup) -> None:
    largest, smallest = (1 << 63) - 1, -1 << 63
    assert hc.all_reduced(largest, "max") == largest
    assert hc.all_reduced(smallest, "min") == smallest
    assert hc.all_reduced(True, "product") == 1
    factor = hc.ReduceOp.PREMUL_SUM(-(2**30))
    assert hc.all_reduced(True, factor) == -(2**30) * process_group.size
    with pytest.raises(OverflowError, match="too large"):
        hc.all_reduced(2**33, factor)
    refused: list[Any] = [(largest, "sum"), (smallest, "sum"), (largest, "reproducible_sum"), (10**10, "product")]
    for value, op in refused if process_group.size > 1 else ():
        with pytest.raises(OverflowError, match="too large"):
            hc.all_reduced(value, op)


def test_nothing_is_sent_for_nothing(process_group: hc.ProcessGroup) -> None:
    number = process_group.sequence_number
    assert hc.all_reduced([]) == []
    assert hc.all_reduced(None) is None
    assert process_group.sequence_number == number
