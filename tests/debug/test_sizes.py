"""Sizes that do not fit, found in what each rank tells of its own: in small groups lists, in large ones sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpccomm.core.hooks import Operation
from hpccomm.debug.sizes import LISTED, sizes_by_rank, unequal

pytestmark = pytest.mark.once

Table = np.ndarray[Any, np.dtype[np.int64]]
SMALL, LARGE = LISTED, LISTED + 1
SIZES = [2, 5, SMALL, LARGE, 90]


def told(name: str, rank: int, size: int, **arguments: Any) -> Any:
    """Return what a rank tells of one operation, from its file."""
    group: Any = SimpleNamespace(rank=rank, size=size)
    return json.loads(json.dumps(sizes_by_rank(Operation(group, name, 1, "cpu", False, arguments))))


def arrays(counts: Any) -> list[Any]:
    return [np.empty(count, np.int8) for count in counts]


def in_parts(sends: Table, expects: Table) -> list[Any]:
    size = len(sends)
    counts = [{"input_counts": sends[rank], "output_counts": expects[:, rank]} for rank in range(size)]
    return [told("all_to_all_single", rank, size, **each) for rank, each in enumerate(counts)]


def in_lists(sends: Table, expects: Table) -> list[Any]:
    size = len(sends)
    lists = [{"inputs": arrays(sends[rank]), "outputs": arrays(expects[:, rank])} for rank in range(size)]
    return [told("all_to_all", rank, size, **each) for rank, each in enumerate(lists)]


def one_pair(table: Table, n: int) -> None:
    table[n - 1, 0] += 5


def one_pair_less(table: Table, n: int) -> None:
    table[0, n // 2] -= 3


def with_itself(table: Table, n: int) -> None:
    table[n // 2, n // 2] += 1


def one_sender(table: Table, n: int) -> None:
    table[n // 2] += np.arange(1, n + 1)


def one_receiver(table: Table, n: int) -> None:
    table[:, n - 1] += np.arange(1, n + 1)


def both_of_one_rank(table: Table, n: int) -> None:
    table[n // 2] += np.arange(1, n + 1)
    table[:, n // 2] += 2 * np.arange(1, n + 1)


def for_one_another(table: Table, n: int) -> None:
    """The sum stays the same."""
    table[1, 0] += 2
    table[1, n - 1] -= 2


def two_pairs(table: Table, n: int) -> None:
    table[0, 1] += 4
    table[n - 1, n // 2] += 4


def there_and_back(table: Table, n: int) -> None:
    table[0, 1] += 4
    table[1, 0] += 4


def the_other_way_round(table: Table, n: int) -> None:
    table[:] = table.T.copy()


FAULTS = [
    one_pair, one_pair_less, with_itself, one_sender, one_receiver, both_of_one_rank, for_one_another, two_pairs,
    there_and_back, the_other_way_round,
]  # fmt: skip


@pytest.mark.parametrize("of_all", [in_parts, in_lists])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", FAULTS)
def test_sizes_that_do_not_fit_are_found(fault: Callable[..., None], size: int, of_all: Callable[..., Any]) -> None:
    sends = np.random.default_rng(size).integers(10, 1000, (size, size))
    expects, ranks = sends.copy(), [100 + rank for rank in range(size)]
    places = [f"a.py:{rank}" for rank in range(size)]
    assert unequal(of_all(sends, expects), ranks, places) == ([], "")
    fault(expects, size)
    wrong = [(int(sender), int(receiver)) for sender, receiver in np.argwhere(sends != expects)]
    culprits, words = unequal(of_all(sends, expects), ranks, places)
    common = set.intersection(*map(set, wrong))
    assert culprits == sorted(ranks[each] for each in common or (wrong[0] if size <= LISTED else range(size)))
    sender, receiver = wrong[0]
    pair = (
        f"rank {ranks[sender]} sends {sends[sender, receiver]} elements to rank {ranks[receiver]} at {places[sender]}, "
        f"which expects {expects[sender, receiver]} at {places[receiver]}"
    )
    if size <= LISTED or len(wrong) == 1:
        assert words.startswith(pair)
        assert ("more like it" in words) == (len(wrong) > 1)
    elif common:
        rank = min(common)
        assert words.startswith(
            f"rank {ranks[rank]} sends {sends[rank].sum()} elements in all and expects {expects[:, rank].sum()} at "
            f"{places[rank]}, "
        )
    else:
        assert words.startswith(f"the ranks send {sends.sum()} elements in all and expect {expects.sum()}: ")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_gather", [True, False], ids=["gather", "scatter"])
def test_a_wrong_list_of_the_root_is_found(is_gather: bool, size: int) -> None:
    root, counts = size // 2, np.arange(10, 10 + size)

    def of_all(listed: Any) -> list[Any]:
        name, own, of_root = ("gather", "array", "outputs") if is_gather else ("scatter", "output", "inputs")
        every = [{own: np.empty(count), of_root: None, "root": root} for count in counts]
        every[root][of_root] = arrays(listed)
        return [told(name, rank, size, **each) for rank, each in enumerate(every)]

    places = [f"a.py:{rank}" for rank in range(size)]
    assert unequal(of_all(counts), range(size), places) == ([], "")
    counts_of_root = counts.copy()
    counts_of_root[0] += 7
    culprits, words = unequal(of_all(counts_of_root), range(size), places)
    assert culprits == sorted({0, root})
    sent, expected = (10, 17) if is_gather else (17, 10)
    sender, receiver = (0, root) if is_gather else (root, 0)
    assert words == (
        f"rank {sender} sends {sent} elements to rank {receiver} at a.py:{sender}, "
        f"which expects {expected} at a.py:{receiver}"
    )


@pytest.mark.parametrize("of_one", [in_parts, in_lists])
def test_what_a_rank_tells_does_not_grow_with_the_ranks(of_one: Callable[..., Any]) -> None:
    few, many = (len(json.dumps(of_one(*2 * [np.full((size, size), 1000)])[0])) for size in (LARGE, 5 * LARGE))
    assert many < few + 50
    assert many < 200
