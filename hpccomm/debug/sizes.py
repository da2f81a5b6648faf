"""Compare the numbers of elements that a group's ranks send to each other with the numbers that they expect.

Lists of them would make the reports grow with the square of the ranks. So in a large group each rank reports sums in
which every pair of ranks has its own weight. The sums show which ranks are in all wrong pairs, and, if there is only
one wrong pair, its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from ..core.arrays import count_of
from ..core.hooks import Operation
from ..core.operation_list import START
from .groups_seen import key_from

LISTED = 64  # ranks; larger groups report sums instead of lists


def sizes_by_rank(operation: Operation) -> list[list[int]] | None:
    """Return the numbers of elements sent to each rank and expected from each, for operations where they may differ.

    In a group of more than `LISTED` ranks: for both, the sum, the sum of squares, and a weighted sum.
    """
    name, arguments, size = operation.name.removesuffix(START), operation.arguments, operation.group.size
    sends, expects = [0] * size, [0] * size
    if name == "gather" and "outputs" in arguments:
        sends[arguments["root"]] = count_of(arguments["array"])
        expects = _counts(arguments["outputs"]) or expects
    elif name == "scatter" and "inputs" in arguments:
        expects[arguments["root"]] = count_of(arguments["output"])
        sends = _counts(arguments["inputs"]) or sends
    elif name == "all_to_all" and "inputs" in arguments:
        sends, expects = _counts(arguments["inputs"]), _counts(arguments["outputs"])
    elif name == "all_to_all_single" and arguments.get("input_counts") is not None:
        sends, expects = list(map(int, arguments["input_counts"])), list(map(int, arguments["output_counts"]))
    else:
        return None
    return [sends, expects] if size <= LISTED else [_sums(sends, "receiver"), _sums(expects, "sender")]


def unequal(sizes: Sequence[Any], ranks: Sequence[int], places: Sequence[str]) -> tuple[list[int], str]:
    """Return the ranks to blame for unequal sizes, and a description; [] and "" if all sizes are equal.

    `sizes` has the result of `sizes_by_rank` on each rank of a group; `ranks` and `places` are their ranks and lines.
    """
    if len(sizes) > LISTED:
        return _unequal_sums(sizes, ranks, places)
    sends, expects = (np.array([each[i] for each in sizes], np.int64) for i in (0, 1))
    wrong = [(int(sender), int(receiver)) for sender, receiver in np.argwhere(sends != expects.T)]
    if not wrong:
        return [], ""
    sender, receiver = wrong[0]
    more = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
    words = _in_words(wrong[0], sizes[sender][0][receiver], sizes[receiver][1][sender], ranks, places)
    return sorted(ranks[each] for each in set.intersection(*map(set, wrong)) or wrong[0]), words + more


def _unequal_sums(sizes: Sequence[Any], ranks: Sequence[int], places: Sequence[str]) -> tuple[list[int], str]:
    """Compare sums like `unequal`; each sum of differences covers all pairs, weighted by one or both ranks."""
    weights = [(_weight("sender", each), _weight("receiver", each)) for each in range(len(sizes))]
    total = squares = by_sender = by_receiver = by_pair = 0
    for (sends, expects), (own, others) in zip(sizes, weights):
        total += sends[0] - expects[0]
        squares += sends[1] - expects[1]
        by_sender += own * sends[0] - expects[2]
        by_receiver += sends[2] - others * expects[0]
        by_pair += own * sends[2] - others * expects[2]
    if not by_pair:
        return [], ""
    # A rank is in all wrong pairs if the sums are those of its row and column of the table, minus the cell in both.
    common = [
        each
        for each, (own, others) in enumerate(weights)
        if by_pair == own * by_receiver + others * by_sender - own * others * total
    ]
    culprits = sorted(ranks[each] for each in common or range(len(sizes)))
    for sender, receiver in product(common, common):
        if total and (by_sender, by_receiver) == (weights[sender][0] * total, weights[receiver][1] * total):
            sent = (squares // total + total) // 2  # with a sent and b expected: a - b and a * a - b * b are known
            return culprits, _in_words((sender, receiver), sent, sent - total, ranks, places)
    if common:
        sends, expects = sizes[common[0]]
        return culprits, (
            f"rank {ranks[common[0]]} sends {sends[0]} elements in all and expects {expects[0]} at "
            f"{places[common[0]]}, other numbers of each rank than the others expect and send"
        )
    sent = sum(sends[0] for sends, _ in sizes)
    return culprits, (
        f"the ranks send {sent} elements in all and expect {sent - total}: several pairs of ranks differ; compare what "
        f"each sends to each with what that expects"
    )


def _in_words(pair: tuple[int, int], sent: int, expected: int, ranks: Sequence[int], places: Sequence[str]) -> str:
    sender, receiver = pair
    return (
        f"rank {ranks[sender]} sends {sent} elements to rank {ranks[receiver]} at {places[sender]}, "
        f"which expects {expected} at {places[receiver]}"
    )


def _sums(counts: Sequence[int], others: str) -> list[int]:
    weighted = sum(count * _weight(others, rank) for rank, count in enumerate(counts) if count)
    return [sum(counts), sum(count * count for count in counts), weighted]


def _weight(side: str, rank: int) -> int:
    """Return a large number, the same in all processes, that is practically never a sum of others."""
    return int(key_from(side, rank), 16)


def _counts(arrays: Any) -> list[int]:
    return [count_of(array) for array in arrays or ()]
