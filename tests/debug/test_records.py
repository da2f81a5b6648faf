"""Records: operations as reports and recordings tell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import hpccomm as hc
from hpccomm.core.hooks import Operation
from hpccomm.debug import records, stacks

pytestmark = pytest.mark.serial


class Tensor:
    """A torch.Tensor's way of telling its size."""

    dtype = np.dtype(np.float16)

    def size(self) -> tuple[int, ...]:
        return (3, 4)

    def numel(self) -> int:
        return 12


def test_a_tensor_whose_size_is_a_method(process_group: hc.ProcessGroup) -> None:
    work = hc.all_reduce(np.ones(1), group=process_group, async_op=True)
    work.wait()
    work.info = work.info._replace(result=Tensor())
    record = stacks.record_of(work)
    assert (record.dtype, record.count, record.nbytes) == ("float16", 12, 24)


def details(group: hc.ProcessGroup, **arguments: Any) -> str:
    every = {"ranks": None, "use_local_synchronization": False, "comm": None, "sort_ranks": True, **arguments}
    return records.details_of(Operation(group, "new_group", 1, "", False, every))


@pytest.mark.parametrize(
    "other",
    [
        [*range(8), 9, 8, *range(10, 30)],
        [*range(28), 29],
        [*range(9), *range(10, 30)],
        [*range(8), *range(100, 121), 29],
        range(29, -1, -1),
    ],
    ids=["two exchanged", "one less", "another less", "others between", "backwards"],
)
def test_different_ranks_of_a_new_group_are_told_apart(other: Sequence[int], process_group: hc.ProcessGroup) -> None:
    one, another = (details(process_group, ranks=ranks, sort_ranks=False) for ranks in (range(30), other))
    assert one != another
    assert max(len(one), len(another)) < 200


@pytest.mark.parametrize("made", [list, np.array, lambda ranks: ranks[::-1]], ids=["list", "array", "back"])
def test_the_same_ranks_of_a_new_group_are_alike(made: Any, process_group: hc.ProcessGroup) -> None:
    ranks = list(process_group.ranks)
    assert details(process_group, ranks=made(ranks)) == details(process_group) == f"ranks {', '.join(map(str, ranks))}"


@pytest.mark.parametrize("arguments", [{"use_local_synchronization": True}, {"comm": object()}])
def test_ranks_of_a_new_group_that_may_differ_are_not_compared(
    arguments: dict[str, Any], process_group: hc.ProcessGroup
) -> None:
    assert details(process_group, ranks=[0], **arguments) == ""
